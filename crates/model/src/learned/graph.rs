//! A checked graph: what is to be computed, in order, each input named by its place.

use std::collections::{BTreeMap, BTreeSet};

use super::onnx::{Element, End, Graph as Source, Tensor as Stored};
use super::operators::Operator;
use super::tensor::{Budget, Fault, Tensor};
use super::{LearnedError, clipped};

/// What one row may cost. A network of three layers of 512 takes 540,000 steps, a thousand trees of
/// depth ten 11,000.
const STEPS: usize = 2_000_000;
const ELEMENTS: usize = 1_000_000;

/// Where an input comes from.
#[derive(Debug, Clone, Copy)]
enum Place {
    Constant(usize),
    /// What a node gave; 0 is the row itself.
    Value(usize),
}

#[derive(Debug, Clone)]
struct Step {
    /// For errors.
    name: String,
    operator: Operator,
    inputs: Vec<Option<Place>>,
}

/// A regressor of one row.
#[derive(Debug, Clone)]
pub(super) struct Graph {
    /// The type of the row.
    element: Element,
    constants: Vec<Tensor>,
    steps: Vec<Step>,
    output: Place,
}

/// A stored tensor as a value.
pub(super) fn constant(stored: &Stored<'_>) -> Result<Tensor, LearnedError> {
    let refused = || LearnedError::Tensor { name: clipped(stored.name) };
    let (element, data) = stored.elements()?.ok_or_else(refused)?;
    let shape = stored.dimensions.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<_>>();
    shape.and_then(|shape| Tensor::new(element, shape, data)).ok_or_else(refused)
}

const fn budget() -> Budget {
    Budget { elements: ELEMENTS, steps: STEPS }
}

impl Graph {
    /// A graph that takes rows of `features` numbers.
    pub(super) fn new(source: &Source<'_>, features: usize) -> Result<Self, LearnedError> {
        let mut constants = Vec::new();
        let mut places = BTreeMap::new();
        for stored in &source.initializers {
            places.insert(stored.name, Place::Constant(constants.len()));
            constants.push(constant(stored)?);
        }
        // Before IR version 4, initializers are inputs too.
        let is_given = |end: &&End<'_>| !places.contains_key(end.name);
        let inputs: Vec<&End<'_>> = source.inputs.iter().filter(is_given).collect();
        let [input] = inputs[..] else { return Err(LearnedError::Inputs(inputs.len())) };
        let [output] = &source.outputs[..] else {
            return Err(LearnedError::Outputs(source.outputs.len()));
        };
        let element = Element::of(input.data_type).filter(|e| *e != Element::Int);
        let element = element.ok_or(LearnedError::InputType(input.data_type))?;
        if let Some(shape) = &input.shape {
            let is_row = |n: Option<i64>| n.is_none_or(|n| n <= 1);
            let is_wide = |n: Option<i64>| n.is_none_or(|n| n == features as i64);
            if !matches!(shape[..], [rows, columns] if is_row(rows) && is_wide(columns)) {
                return Err(LearnedError::InputShape {
                    found: shape.iter().take(8).copied().collect(),
                    features,
                });
            }
        }
        places.insert(input.name, Place::Value(0));
        // Only what the output needs: the rest may hold what no regressor has.
        let mut needed = BTreeSet::from([output.name]);
        for node in source.nodes.iter().rev() {
            if node.outputs.first().is_some_and(|name| needed.contains(name)) {
                needed.extend(&node.inputs);
            }
        }
        let mut steps: Vec<Step> = Vec::new();
        for node in &source.nodes {
            let Some(&given) = node.outputs.first().filter(|name| needed.contains(*name)) else {
                continue;
            };
            let operator = match Operator::of(node)? {
                Ok(operator) => operator,
                Err(constant) => {
                    places.insert(given, Place::Constant(constants.len()));
                    constants.push(constant);
                    continue;
                }
            };
            let place = |name: &&str| match *name {
                "" => Ok(None),
                name => {
                    let unknown = || LearnedError::Unknown { name: clipped(name) };
                    places.get(name).copied().map(Some).ok_or_else(unknown)
                }
            };
            let inputs = node.inputs.iter().map(place).collect::<Result<Vec<_>, _>>()?;
            steps.push(Step { name: clipped(node.operator), operator, inputs });
            places.insert(given, Place::Value(steps.len()));
        }
        let unknown = || LearnedError::Unknown { name: clipped(output.name) };
        let output = *places.get(output.name).ok_or_else(unknown)?;
        Ok(Self { element, constants, steps, output })
    }

    /// The one or two numbers that the graph gives for `row`, or the operator at which it fails.
    pub(super) fn run(&self, row: &[f64]) -> Result<(f64, Option<f64>), (String, Fault)> {
        let mut budget = budget();
        let mut values = Vec::with_capacity(1 + self.steps.len());
        values.push(Tensor::row(self.element, row.to_vec()));
        for step in &self.steps {
            let inputs: Vec<Option<&Tensor>> =
                step.inputs.iter().map(|p| p.map(|p| self.at(p, &values))).collect();
            let value = step.operator.run(&inputs, &mut budget);
            let value = value.map_err(|fault| (step.name.clone(), fault))?;
            values.push(value);
        }
        match self.at(self.output, &values).data() {
            [tail] => Ok((*tail, None)),
            [tail, high] => Ok((*tail, Some(*high))),
            _ => Err(("its output".to_owned(), Fault::Shape)),
        }
    }

    fn at<'a>(&'a self, place: Place, values: &'a [Tensor]) -> &'a Tensor {
        match place {
            Place::Constant(i) => &self.constants[i],
            Place::Value(i) => &values[i],
        }
    }
}
