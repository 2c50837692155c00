//! The operators of a regressor.
//!
//! What scikit-learn's and PyTorch's exporters make of linear models, perceptrons, trees, their
//! pipelines and ensembles. Source: ONNX's `Operators.md` and `Operators-ml.md`, operator set 7
//! (where broadcasting became what it is) and later; where axes or limits moved from attribute to
//! input, both are read.

use super::LearnedError;
use super::attributes::Attributes;
use super::clipped;
use super::onnx::{Element, Node};
use super::tensor::{Budget, Fault, MAX_RANK, Tensor};
use super::trees::Trees;

/// What one node does.
#[derive(Debug, Clone)]
pub(super) enum Operator {
    Map(fn(f64) -> f64),
    /// Two inputs for an operation of two, any number for one that folds.
    Zip {
        f: fn(f64, f64) -> f64,
        folds: bool,
    },
    Mean,
    LeakyRelu(f64),
    Elu(f64),
    /// Limits, unless they are inputs.
    Clip(f64, f64),
    MatMul,
    Gemm {
        alpha: f64,
        beta: f64,
        transposed: [bool; 2],
    },
    BatchNormalization(f64),
    Cast(Element),
    Reshape {
        zero_is_zero: bool,
    },
    Flatten(i64),
    Squeeze(Vec<i64>),
    Unsqueeze(Vec<i64>),
    Shape,
    Transpose,
    Concat(i64),
    Gather(i64),
    Reduce {
        mean: bool,
        axes: Vec<i64>,
        keeps: bool,
        none_is_none: bool,
    },
    ArrayFeatureExtractor,
    Scaler {
        offset: Tensor,
        scale: Tensor,
    },
    Linear {
        coefficients: Tensor,
        intercepts: Tensor,
    },
    Trees(Box<Trees>),
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Operator {
    /// The operator of `node`; `None`: its output is the returned constant, which `Constant` is.
    pub(super) fn of(node: &Node<'_>) -> Result<Result<Self, Tensor>, LearnedError> {
        let mut attributes = Attributes::of(node);
        let operator = match node.domain {
            "" | "ai.onnx" => {
                if node.operator == "Constant" {
                    let constant = Self::constant(&mut attributes)?;
                    attributes.finish()?;
                    return Ok(Err(constant));
                }
                Self::standard(node.operator, &mut attributes)?
            }
            "ai.onnx.ml" => Self::learning(node.operator, &mut attributes)?,
            _ => None,
        };
        let unsupported = || LearnedError::Operator {
            operator: clipped(node.operator),
            domain: clipped(node.domain),
        };
        let operator = operator.ok_or_else(unsupported)?;
        attributes.finish()?;
        Ok(Ok(operator))
    }

    fn constant(attributes: &mut Attributes<'_, '_>) -> Result<Tensor, LearnedError> {
        let one = |element, value| Tensor::new(element, Vec::new(), vec![value]);
        let many = |element, values: Vec<f64>| Tensor::new(element, vec![values.len()], values);
        let constant = if attributes.has("value_float") {
            one(Element::Single, attributes.float("value_float", 0.0))
        } else if attributes.has("value_int") {
            one(Element::Int, attributes.int("value_int", 0) as f64)
        } else if attributes.has("value_floats") {
            many(Element::Single, attributes.reals("value_floats")?)
        } else if attributes.has("value_ints") {
            let ints = attributes.ints("value_ints");
            many(Element::Int, ints.into_iter().map(|i| i as f64).collect())
        } else {
            attributes.tensor("value")?
        };
        constant.ok_or_else(|| attributes.refuse("value"))
    }

    fn standard(
        name: &str,
        attributes: &mut Attributes<'_, '_>,
    ) -> Result<Option<Self>, LearnedError> {
        let binary = |f| Self::Zip { f, folds: false };
        let fold = |f| Self::Zip { f, folds: true };
        Ok(Some(match name {
            "Identity" => Self::Map(|x| x),
            "Relu" => Self::Map(|x| x.max(0.0)),
            "Tanh" => Self::Map(f64::tanh),
            "Sigmoid" => Self::Map(sigmoid),
            // ln(1 + e^x), without overflow.
            "Softplus" => Self::Map(|x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
            "Exp" => Self::Map(f64::exp),
            "Log" => Self::Map(f64::ln),
            "Sqrt" => Self::Map(f64::sqrt),
            "Neg" => Self::Map(|x| -x),
            "Abs" => Self::Map(f64::abs),
            "Reciprocal" => Self::Map(f64::recip),
            "LeakyRelu" => Self::LeakyRelu(attributes.float("alpha", f64::from(0.01_f32))),
            "Elu" => Self::Elu(attributes.float("alpha", 1.0)),
            "Clip" => {
                let least = attributes.float("min", f64::NEG_INFINITY);
                Self::Clip(least, attributes.float("max", f64::INFINITY))
            }
            "Add" => binary(|a, b| a + b),
            "Sub" => binary(|a, b| a - b),
            "Mul" => binary(|a, b| a * b),
            "Div" => binary(|a, b| a / b),
            "Pow" => binary(f64::powf),
            "Sum" => fold(|a, b| a + b),
            "Max" => fold(f64::max),
            "Min" => fold(f64::min),
            "Mean" => Self::Mean,
            "MatMul" => Self::MatMul,
            "Gemm" => Self::Gemm {
                alpha: attributes.float("alpha", 1.0),
                beta: attributes.float("beta", 1.0),
                transposed: ["transA", "transB"].map(|name| attributes.int(name, 0) != 0),
            },
            "BatchNormalization" => {
                attributes.ignore("momentum");
                if attributes.int("training_mode", 0) != 0 {
                    return Err(attributes.refuse("training_mode"));
                }
                Self::BatchNormalization(attributes.float("epsilon", f64::from(1e-5_f32)))
            }
            "Cast" => {
                // Of 8-bit floats only.
                attributes.ignore("saturate");
                let to = Element::of(attributes.int("to", 0));
                Self::Cast(to.ok_or_else(|| attributes.refuse("to"))?)
            }
            "Reshape" => Self::Reshape { zero_is_zero: attributes.int("allowzero", 0) != 0 },
            "Flatten" => Self::Flatten(attributes.int("axis", 1)),
            "Squeeze" => Self::Squeeze(attributes.ints("axes")),
            "Unsqueeze" => Self::Unsqueeze(attributes.ints("axes")),
            "Shape" => Self::Shape,
            "Transpose" => match attributes.ints("perm")[..] {
                [] | [1, 0] => Self::Transpose,
                _ => return Err(attributes.refuse("perm")),
            },
            "Concat" => Self::Concat(attributes.int("axis", 0)),
            "Gather" => Self::Gather(attributes.int("axis", 0)),
            "ReduceMean" | "ReduceSum" => Self::Reduce {
                mean: name == "ReduceMean",
                axes: attributes.ints("axes"),
                keeps: attributes.int("keepdims", 1) != 0,
                none_is_none: attributes.int("noop_with_empty_axes", 0) != 0,
            },
            _ => return Ok(None),
        }))
    }

    fn learning(
        name: &str,
        attributes: &mut Attributes<'_, '_>,
    ) -> Result<Option<Self>, LearnedError> {
        let row = |values| Tensor::row(Element::Single, values);
        Ok(Some(match name {
            "ArrayFeatureExtractor" => Self::ArrayFeatureExtractor,
            "Scaler" => {
                let [offset, scale] = ["offset", "scale"].map(|name| attributes.reals(name));
                Self::Scaler { offset: row(offset?), scale: row(scale?) }
            }
            "LinearRegressor" => {
                attributes.only("post_transform", b"NONE")?;
                if attributes.int("targets", 1) != 1 {
                    return Err(attributes.refuse("targets"));
                }
                let coefficients = attributes.reals("coefficients")?;
                let column = vec![coefficients.len(), 1];
                let coefficients = Tensor::new(Element::Single, column, coefficients);
                let coefficients = coefficients.ok_or_else(|| attributes.refuse("coefficients"))?;
                let intercepts = match attributes.reals("intercepts")?[..] {
                    [] => 0.0,
                    [intercept] => intercept,
                    _ => return Err(attributes.refuse("intercepts")),
                };
                Self::Linear { coefficients, intercepts: row(vec![intercepts]) }
            }
            "TreeEnsembleRegressor" => Self::Trees(Box::new(Trees::of_regressor(attributes)?)),
            "TreeEnsemble" => Self::Trees(Box::new(Trees::of_ensemble(attributes)?)),
            _ => return Ok(None),
        }))
    }

    /// The output for `inputs`; `None` is one that is left out.
    pub(super) fn run(
        &self,
        inputs: &[Option<&Tensor>],
        budget: &mut Budget,
    ) -> Result<Tensor, Fault> {
        let given = |i: usize| inputs.get(i).copied().flatten();
        let first = given(0).ok_or(Fault::Inputs)?;
        let second = || given(1).ok_or(Fault::Inputs);
        let most = match self {
            Self::Zip { folds: true, .. } | Self::Mean | Self::Concat(_) => usize::MAX,
            Self::BatchNormalization(_) => 5,
            Self::Gemm { .. } | Self::Clip(..) => 3,
            Self::Zip { .. }
            | Self::MatMul
            | Self::Reshape { .. }
            | Self::Squeeze(_)
            | Self::Unsqueeze(_)
            | Self::Gather(_)
            | Self::Reduce { .. }
            | Self::ArrayFeatureExtractor => 2,
            _ => 1,
        };
        if inputs.len() > most {
            return Err(Fault::Inputs);
        }
        // What comes of a copy is paid for like what is made.
        let mut copy = || budget.copy(first);
        match self {
            Self::Map(f) => Ok(copy()?.map(f)),
            Self::LeakyRelu(alpha) => Ok(copy()?.map(|x| if x < 0.0 { alpha * x } else { x })),
            Self::Elu(alpha) => Ok(copy()?.map(|x| if x < 0.0 { alpha * x.exp_m1() } else { x })),
            Self::Clip(least, most) => {
                let limit =
                    |i: usize, or: f64| given(i).and_then(|t| t.data().first()).map_or(or, |l| *l);
                let (least, most) = (limit(1, *least), limit(2, *most));
                Ok(copy()?.map(|x| x.max(least).min(most)))
            }
            Self::Zip { f, folds: false } => first.zip(second()?, budget, f),
            Self::Zip { f, folds: true } => fold(inputs, budget, f),
            Self::Mean => {
                let sum = fold(inputs, budget, &|a, b| a + b)?;
                Ok(sum.map(|x| x / inputs.len() as f64))
            }
            Self::MatMul => first.matmul(second()?, false, budget),
            Self::Gemm { alpha, beta, transposed } => {
                let product = if transposed[0] {
                    first.transposed(budget)?.matmul(second()?, transposed[1], budget)?
                } else {
                    first.matmul(second()?, transposed[1], budget)?
                };
                match given(2) {
                    Some(c) => product.zip(c, budget, |p, c| alpha * p + beta * c),
                    None => Ok(product.map(|p| alpha * p)),
                }
            }
            Self::BatchNormalization(epsilon) => {
                let mut with = |x: Tensor, i: usize, f: fn(f64, f64) -> f64| {
                    x.zip(given(i).ok_or(Fault::Inputs)?, budget, f)
                };
                // Along the second dimension, which is the last of a row.
                let &[_, _] = first.shape() else { return Err(Fault::Shape) };
                let variance = given(4).ok_or(Fault::Inputs)?.clone();
                let deviation = variance.map(|v| (v + epsilon).sqrt());
                let centred = with(first.clone(), 3, |x, mean| x - mean)?;
                let scaled = with(centred, 1, |x, scale| x * scale)?;
                let scaled = scaled.zip(&deviation, budget, |x, d| x / d)?;
                scaled.zip(given(2).ok_or(Fault::Inputs)?, budget, |x, b| x + b)
            }
            Self::Cast(element) => Ok(copy()?.cast(*element)),
            Self::Reshape { zero_is_zero } => {
                let shape = reshape(first, second()?, *zero_is_zero)?;
                copy()?.reshaped(shape)
            }
            Self::Flatten(axis) => {
                // It may lie behind the last dimension, but is counted from there if it is negative.
                let axis = first.axis(*axis, usize::from(*axis >= 0))?;
                let (rows, columns) = first.shape().split_at(axis);
                let shape = vec![rows.iter().product(), columns.iter().product()];
                copy()?.reshaped(shape)
            }
            Self::Squeeze(axes) => {
                let axes = self::axes(axes, given(1))?;
                let axes = axes.iter().map(|&a| first.axis(a, 0)).collect::<Result<Vec<_>, _>>()?;
                let goes = |i: usize, size: usize| {
                    if axes.is_empty() { size == 1 } else { axes.contains(&i) }
                };
                let shape = first.shape().iter().enumerate();
                let shape = shape.filter(|&(i, &size)| !goes(i, size)).map(|(_, &size)| size);
                let shape = shape.collect();
                copy()?.reshaped(shape)
            }
            Self::Unsqueeze(axes) => {
                let axes = self::axes(axes, given(1))?;
                let new = axes.iter().map(|&a| first.axis(a, axes.len()));
                let mut new = new.collect::<Result<Vec<_>, _>>()?;
                new.sort_unstable();
                let mut shape = first.shape().to_vec();
                for axis in new {
                    if axis > shape.len() {
                        return Err(Fault::Index);
                    }
                    shape.insert(axis, 1);
                }
                copy()?.reshaped(shape)
            }
            Self::Shape => {
                let shape: Vec<f64> = first.shape().iter().map(|&d| d as f64).collect();
                Tensor::new(Element::Int, vec![shape.len()], shape).ok_or(Fault::Shape)
            }
            Self::Transpose => first.transposed(budget),
            Self::Concat(axis) => {
                let parts: Option<Vec<&Tensor>> = inputs.iter().copied().collect();
                Tensor::concat(&parts.ok_or(Fault::Inputs)?, first.axis(*axis, 0)?, budget)
            }
            Self::Gather(axis) => {
                let (axis, indices) = (first.axis(*axis, 0)?, second()?);
                let mut shape = first.shape().to_vec();
                shape.splice(axis..=axis, indices.shape().iter().copied());
                first.select(axis, indices.data(), budget)?.reshaped(shape)
            }
            Self::Reduce { mean, axes, keeps, none_is_none } => {
                let axes = self::axes(axes, given(1))?;
                if axes.is_empty() && *none_is_none {
                    return copy();
                }
                let all = || (0..first.shape().len()).collect();
                let axes = axes.iter().map(|&a| first.axis(a, 0)).collect::<Result<Vec<_>, _>>()?;
                let axes = if axes.is_empty() { all() } else { axes };
                let mut sum = copy()?;
                for &axis in &axes {
                    sum = sum.sum(axis, budget)?;
                }
                if *mean {
                    // By the elements: an axis may stand twice.
                    let of = first.data().len() / sum.data().len();
                    sum = sum.map(|x| x / of as f64);
                }
                if *keeps {
                    return Ok(sum);
                }
                let shape = first.shape().iter().enumerate();
                let shape = shape.filter(|(i, _)| !axes.contains(i)).map(|(_, &d)| d).collect();
                sum.reshaped(shape)
            }
            Self::ArrayFeatureExtractor => {
                first.select(first.axis(-1, 0)?, second()?.data(), budget)
            }
            Self::Scaler { offset, scale } => {
                let centred = first.zip(offset, budget, |x, o| x - o)?;
                centred.zip(scale, budget, |x, s| x * s)
            }
            Self::Linear { coefficients, intercepts } => {
                first.matmul(coefficients, false, budget)?.zip(intercepts, budget, |x, b| x + b)
            }
            Self::Trees(trees) => trees.run(first, budget),
        }
    }
}

fn fold(
    inputs: &[Option<&Tensor>],
    budget: &mut Budget,
    f: &impl Fn(f64, f64) -> f64,
) -> Result<Tensor, Fault> {
    let [Some(first), others @ ..] = inputs else { return Err(Fault::Inputs) };
    let mut all = budget.copy(first)?;
    for other in others {
        all = all.zip(other.ok_or(Fault::Inputs)?, budget, f)?;
    }
    Ok(all)
}

/// Axes from the input if there is one, else from the attribute. No tensor has more than [`MAX_RANK`], and a file
/// has room for millions, whose cost no budget counts.
fn axes(attribute: &[i64], input: Option<&Tensor>) -> Result<Vec<i64>, Fault> {
    let count = input.map_or(attribute.len(), |input| input.data().len());
    if count > MAX_RANK {
        return Err(Fault::Index);
    }
    Ok(input.map_or_else(
        || attribute.to_vec(),
        |input| input.data().iter().map(|&axis| axis as i64).collect(),
    ))
}

/// The shape that `to` asks for: 0 is the input's own dimension, one −1 what is left.
fn reshape(input: &Tensor, to: &Tensor, zero_is_zero: bool) -> Result<Vec<usize>, Fault> {
    let mut shape = Vec::new();
    let mut left = None;
    for (i, &size) in to.data().iter().enumerate() {
        shape.push(match size as i64 {
            -1 if left.is_none() => {
                left = Some(i);
                1
            }
            0 if !zero_is_zero => *input.shape().get(i).ok_or(Fault::Shape)?,
            size => usize::try_from(size).map_err(|_| Fault::Shape)?,
        });
    }
    if let Some(i) = left {
        let others = shape.iter().try_fold(1, |n: usize, &size| n.checked_mul(size));
        let others = others.filter(|&n| n > 0).ok_or(Fault::Shape)?;
        shape[i] = input.data().len() / others;
    }
    Ok(shape)
}
