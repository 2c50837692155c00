//! `ai.onnx.ml.TreeEnsembleRegressor`, and `TreeEnsemble` in its place since version 5 of that set of
//! operators: what random forests and gradient boosting become.
//!
//! A walk from a root cannot go in circles: each node is the child of at most
//! one other, which is checked, and a root of none.

use std::collections::BTreeMap;

use super::LearnedError;
use super::attributes::Attributes;
use super::onnx::Element;
use super::tensor::{Budget, Fault, Tensor};

#[derive(Debug, Clone, Copy)]
enum Node {
    Branch { feature: usize, test: fn(&f64, &f64) -> bool, threshold: f64, yes: usize, no: usize },
    Leaf(f64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Aggregate {
    Sum,
    Average,
    Min,
    Max,
}

/// An ensemble with one target.
#[derive(Debug, Clone)]
pub(super) struct Trees {
    nodes: Vec<Node>,
    roots: Vec<usize>,
    aggregate: Aggregate,
    base: f64,
    /// Of the answer.
    element: Element,
}

/// The branches of `TreeEnsemble` by number; 6 is BRANCH_MEMBER.
const MODES: [&[u8]; 6] =
    [b"BRANCH_LEQ", b"BRANCH_LT", b"BRANCH_GTE", b"BRANCH_GT", b"BRANCH_EQ", b"BRANCH_NEQ"];

fn test(mode: &[u8]) -> Option<fn(&f64, &f64) -> bool> {
    Some(match mode {
        b"BRANCH_LEQ" => f64::le,
        b"BRANCH_LT" => f64::lt,
        b"BRANCH_GTE" => f64::ge,
        b"BRANCH_GT" => f64::gt,
        b"BRANCH_EQ" => f64::eq,
        b"BRANCH_NEQ" => f64::ne,
        _ => return None,
    })
}

impl Trees {
    pub(super) fn of_regressor(attributes: &mut Attributes<'_, '_>) -> Result<Self, LearnedError> {
        attributes.ignore("nodes_hitrates");
        attributes.ignore("nodes_hitrates_as_tensor");
        // What way a missing value goes: none is missing.
        attributes.ignore("nodes_missing_value_tracks_true");
        attributes.only("post_transform", b"NONE")?;
        let aggregate = match attributes.text("aggregate_function", b"SUM") {
            b"SUM" => Aggregate::Sum,
            b"AVERAGE" => Aggregate::Average,
            b"MIN" => Aggregate::Min,
            b"MAX" => Aggregate::Max,
            _ => return Err(attributes.refuse("aggregate_function")),
        };
        let base = match attributes.reals("base_values")?[..] {
            [] => 0.0,
            [base] => base,
            _ => return Err(attributes.refuse("base_values")),
        };
        if attributes.int("n_targets", 1) != 1 {
            return Err(attributes.refuse("n_targets"));
        }
        let (nodes, roots) = Self::nodes(attributes)?;
        Ok(Self { nodes, roots, aggregate, base, element: Element::Single })
    }

    /// Branches and leaves have lists of their own there, and say which of the two a child is in. A branch that
    /// asks for membership in a set is not supported.
    pub(super) fn of_ensemble(attributes: &mut Attributes<'_, '_>) -> Result<Self, LearnedError> {
        attributes.ignore("nodes_hitrates");
        attributes.ignore("nodes_missing_value_tracks_true");
        if attributes.int("post_transform", 0) != 0 {
            return Err(attributes.refuse("post_transform"));
        }
        let aggregate = match attributes.int("aggregate_function", 1) {
            0 => Aggregate::Average,
            1 => Aggregate::Sum,
            2 => Aggregate::Min,
            3 => Aggregate::Max,
            _ => return Err(attributes.refuse("aggregate_function")),
        };
        if attributes.int("n_targets", 1) != 1 {
            return Err(attributes.refuse("n_targets"));
        }
        let targets = attributes.ints("leaf_targetids");
        let weights = attributes.real_tensor("leaf_weights")?.1;
        if targets != vec![0; weights.len()] {
            return Err(attributes.refuse("leaf_targetids"));
        }
        let (element, splits) = attributes.real_tensor("nodes_splits")?;
        let modes = attributes.octets("nodes_modes")?;
        let features = attributes.ints("nodes_featureids");
        let [yes, no] = ["nodes_truenodeids", "nodes_falsenodeids"].map(|n| attributes.ints(n));
        let leaves = ["nodes_trueleafs", "nodes_falseleafs"].map(|name| attributes.ints(name));
        let count = splits.len();
        let lengths =
            [modes.len(), features.len(), yes.len(), no.len(), leaves[0].len(), leaves[1].len()];
        if count == 0 || lengths != [count; 6] {
            return Err(attributes.refuse("nodes_splits"));
        }
        // Branches first. A leaf may be the child of several, a branch of one at most.
        let mut is_child = vec![false; count];
        let mut nodes = Vec::with_capacity(count + weights.len());
        for i in 0..count {
            let mut child = |id: i64, is_leaf: i64| {
                let id = usize::try_from(id).ok()?;
                match is_leaf {
                    0 => {
                        let seen = is_child.get_mut(id)?;
                        (!std::mem::replace(seen, true)).then_some(id)
                    }
                    _ => (id < weights.len()).then_some(count + id),
                }
            };
            let children = child(yes[i], leaves[0][i]).zip(child(no[i], leaves[1][i]));
            let (yes, no) = children.ok_or_else(|| attributes.refuse("nodes_truenodeids"))?;
            let feature = usize::try_from(features[i]);
            let feature = feature.map_err(|_| attributes.refuse("nodes_featureids"))?;
            let test = MODES.get(usize::from(modes[i])).copied().and_then(test);
            let test = test.ok_or_else(|| attributes.refuse("nodes_modes"))?;
            nodes.push(Node::Branch { feature, test, threshold: splits[i], yes, no });
        }
        nodes.extend(weights.into_iter().map(Node::Leaf));
        let mut roots = Vec::new();
        for root in attributes.ints("tree_roots") {
            let root = usize::try_from(root).ok().filter(|&root| root < count && !is_child[root]);
            roots.push(root.ok_or_else(|| attributes.refuse("tree_roots"))?);
        }
        let mut all = roots.clone();
        all.sort_unstable();
        if all != (0..count).filter(|&i| !is_child[i]).collect::<Vec<_>>() || all.is_empty() {
            return Err(attributes.refuse("tree_roots"));
        }
        // What no root leads to goes in a circle.
        let (mut reached, mut ahead) = (0, roots.clone());
        while let Some(here) = ahead.pop() {
            if let Node::Branch { yes, no, .. } = nodes[here] {
                reached += 1;
                ahead.extend([yes, no]);
            }
        }
        if reached != count {
            return Err(attributes.refuse("nodes_falsenodeids"));
        }
        Ok(Self { nodes, roots, aggregate, base: 0.0, element })
    }

    /// All nodes, and which of them are roots.
    fn nodes(attributes: &mut Attributes<'_, '_>) -> Result<(Vec<Node>, Vec<usize>), LearnedError> {
        let trees = attributes.ints("nodes_treeids");
        let ids = attributes.ints("nodes_nodeids");
        let modes = attributes.texts("nodes_modes");
        let features = attributes.ints("nodes_featureids");
        let [yes, no] = ["nodes_truenodeids", "nodes_falsenodeids"].map(|n| attributes.ints(n));
        let thresholds = attributes.reals("nodes_values")?;
        let count = trees.len();
        let lengths =
            [ids.len(), modes.len(), features.len(), yes.len(), no.len(), thresholds.len()];
        if count == 0 || lengths != [count; 6] {
            return Err(attributes.refuse("nodes_treeids"));
        }
        let keys = trees.iter().copied().zip(ids.iter().copied());
        let places: BTreeMap<(i64, i64), usize> = keys.zip(0..).collect();
        if places.len() != count {
            return Err(attributes.refuse("nodes_nodeids"));
        }
        let weights = Self::weights(attributes, &places)?;
        let mut is_child = vec![false; count];
        let mut nodes = Vec::with_capacity(count);
        for i in 0..count {
            if modes[i] == b"LEAF" {
                nodes.push(Node::Leaf(weights[i]));
                continue;
            }
            let mut child = |id| {
                let place = *places.get(&(trees[i], id))?;
                (!std::mem::replace(&mut is_child[place], true)).then_some(place)
            };
            let children = child(yes[i]).zip(child(no[i]));
            let (yes, no) = children.ok_or_else(|| attributes.refuse("nodes_truenodeids"))?;
            let feature = usize::try_from(features[i]);
            let feature = feature.map_err(|_| attributes.refuse("nodes_featureids"))?;
            let test = test(modes[i]).ok_or_else(|| attributes.refuse("nodes_modes"))?;
            nodes.push(Node::Branch { feature, test, threshold: thresholds[i], yes, no });
        }
        // From the roots each node is reached at most once, and not at all in a circle.
        let roots: Vec<usize> = (0..count).filter(|&i| !is_child[i]).collect();
        let mut with_root: Vec<i64> = roots.iter().map(|&i| trees[i]).collect();
        with_root.sort_unstable();
        let mut all = trees;
        all.sort_unstable();
        all.dedup();
        let (mut reached, mut ahead) = (0, roots.clone());
        while let Some(here) = ahead.pop() {
            reached += 1;
            if let Node::Branch { yes, no, .. } = nodes[here] {
                ahead.extend([yes, no]);
            }
        }
        if with_root != all || reached != count {
            return Err(attributes.refuse("nodes_falsenodeids"));
        }
        Ok((nodes, roots))
    }

    /// What each node adds if it is a leaf.
    fn weights(
        attributes: &mut Attributes<'_, '_>,
        places: &BTreeMap<(i64, i64), usize>,
    ) -> Result<Vec<f64>, LearnedError> {
        let [trees, nodes, targets] =
            ["target_treeids", "target_nodeids", "target_ids"].map(|name| attributes.ints(name));
        let of_target = attributes.reals("target_weights")?;
        if [trees.len(), nodes.len(), targets.len()] != [of_target.len(); 3] {
            return Err(attributes.refuse("target_weights"));
        }
        let mut weights = vec![0.0; places.len()];
        for i in 0..of_target.len() {
            let place = places.get(&(trees[i], nodes[i])).filter(|_| targets[i] == 0);
            let place = place.ok_or_else(|| attributes.refuse("target_nodeids"))?;
            weights[*place] += of_target[i];
        }
        Ok(weights)
    }

    fn walk(&self, row: &[f64], root: usize, budget: &mut Budget) -> Result<f64, Fault> {
        let mut here = root;
        loop {
            budget.steps(1)?;
            match self.nodes[here] {
                Node::Leaf(weight) => return Ok(weight),
                Node::Branch { feature, test, threshold, yes, no } => {
                    let value = row.get(feature).ok_or(Fault::Index)?;
                    here = if test(value, &threshold) { yes } else { no };
                }
            }
        }
    }

    /// One number for each row of a matrix.
    pub(super) fn run(&self, input: &Tensor, budget: &mut Budget) -> Result<Tensor, Fault> {
        let &[rows, columns] = input.shape() else { return Err(Fault::Shape) };
        let mut data = Vec::new();
        for row in 0..rows {
            let row = &input.data()[row * columns..][..columns];
            let (mut sum, mut least, mut most) = (0.0, f64::INFINITY, f64::NEG_INFINITY);
            for &root in &self.roots {
                let weight = self.walk(row, root, budget)?;
                sum += weight;
                least = least.min(weight);
                most = most.max(weight);
            }
            let all = match self.aggregate {
                Aggregate::Sum => sum,
                Aggregate::Average => sum / self.roots.len() as f64,
                Aggregate::Min => least,
                Aggregate::Max => most,
            };
            data.push(all + self.base);
        }
        Tensor::new(self.element, vec![rows, 1], data).ok_or(Fault::Shape)
    }
}
