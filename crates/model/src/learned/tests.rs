use proptest::prelude::*;
use rtvirtio_spec::profile::Regime;
use rtvirtio_units::Confidence;

use super::*;

const MLP: &[u8] = include_bytes!("../../tests/data/mlp.onnx");
const BOOSTING: &[u8] = include_bytes!("../../tests/data/boosting.onnx");
const MANY_OPERATORS: &[u8] = include_bytes!("../../tests/data/many_operators.onnx");

/// What `tests/data/make.py` exports, by name.
const MODELS: [(&str, &[u8]); 8] = [
    ("mlp", MLP),
    ("double", include_bytes!("../../tests/data/double.onnx")),
    ("ensemble", include_bytes!("../../tests/data/ensemble.onnx")),
    ("boosting", BOOSTING),
    ("histogram", include_bytes!("../../tests/data/histogram.onnx")),
    ("forest", include_bytes!("../../tests/data/forest.onnx")),
    ("linear", include_bytes!("../../tests/data/linear.onnx")),
    ("many_operators", MANY_OPERATORS),
];

type Row = [f64; FEATURES.len()];

/// Rows, and what onnxruntime answers to them.
fn asked() -> (Vec<Row>, serde_json::Value) {
    let text = include_str!("../../tests/data/expected.json");
    let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
    let rows = serde_json::from_value::<Vec<Vec<f64>>>(json["rows"].take()).unwrap();
    let rows = rows.into_iter().map(|row| row.try_into().unwrap()).collect();
    (rows, json["expected"].take())
}

fn learned(bytes: &[u8]) -> Learned {
    Learned::from_bytes(bytes).unwrap()
}

fn refused(bytes: &[u8]) -> String {
    let error = Learned::from_bytes(bytes).unwrap_err();
    let source = std::error::Error::source(&error);
    source.map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

/// A message's field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        field.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(bytes);
    field
}

fn int(number: u8, value: u8) -> Vec<u8> {
    vec![number << 3, value]
}

/// A graph's input or output: `float`, of any shape.
fn end(number: u8, name: &str) -> Vec<u8> {
    field(number, &[field(1, name.as_bytes()), field(2, &field(1, &int(1, 1)))].concat())
}

fn node(operator: &str, inputs: &[&str], output: &str, attributes: &[Vec<u8>]) -> Vec<u8> {
    let mut node: Vec<u8> = inputs.iter().flat_map(|name| field(1, name.as_bytes())).collect();
    node.extend(field(2, output.as_bytes()));
    node.extend(field(4, operator.as_bytes()));
    node.extend(attributes.iter().flat_map(|a| field(5, a)));
    field(1, &node)
}

/// A node that is one of `ai.onnx.ml`, and has 128 bytes to 16 KiB: its message's length is its second and
/// third byte.
fn of_learning(mut node: Vec<u8>) -> Vec<u8> {
    let domain = field(7, b"ai.onnx.ml");
    let length = node.len() - 3 + domain.len();
    node.extend(domain);
    node[1] = (length & 0x7f) as u8 | 0x80;
    node[2] = (length >> 7) as u8;
    node
}

/// A model of `x` to `y`, of operator set 17.
fn model(graph: &[Vec<u8>]) -> Vec<u8> {
    let graph = [graph.concat(), end(11, "x"), end(12, "y")].concat();
    [field(7, &graph), field(8, &int(2, 17))].concat()
}

#[test]
fn answers_are_those_of_the_trainings_runtime() {
    let (rows, expected) = asked();
    for (name, bytes) in MODELS {
        let model = learned(bytes);
        let expected: Vec<f64> = serde_json::from_value(expected[name].clone()).unwrap();
        assert_eq!((rows.len(), expected.len()), (40, 40));
        for (row, expected) in rows.iter().zip(expected) {
            let (answer, high) = model.graph.run(row).unwrap();
            assert_eq!(high, None);
            let error = (answer - expected).abs();
            assert!(error <= 1e-4 * expected.abs(), "{name}: {answer}, not {expected}");
        }
    }
}

#[test]
fn tail_is_what_the_output_means() {
    let (rows, expected) = asked();
    let log10_s = expected["mlp"][0].as_f64().unwrap();
    let seconds = learned(MLP).predict(&rows[0]).unwrap().tail.as_secs_f64();
    assert!((seconds.log10() - log10_s).abs() < 1e-4 * log10_s.abs());
    // The same file, said to be of milliseconds: its answer is negative, and no time.
    let mut model = learned(MLP);
    model.description.as_mut().unwrap().output = Output::Milliseconds;
    let refused = model.predict(&rows[0]).unwrap_err();
    assert!(matches!(refused, NoAnswer::NoLatency(s) if (s - log10_s / 1e3).abs() < 1e-6));
}

#[test]
fn row_out_of_range_is_refused_by_feature() {
    let (rows, _) = asked();
    let mut row = rows[0];
    let iops = FEATURES.iter().position(|f| *f == "task_iops").unwrap();
    row[iops] = 1501.0;
    let refused = learned(BOOSTING).predict(&row).unwrap_err();
    assert_eq!(refused.to_string(), "task_iops is 1501, its training had 100 to 1500");
    row[iops] = f64::NAN;
    assert!(matches!(learned(BOOSTING).predict(&row), Err(NoAnswer::OutOfRange { .. })));
}

#[test]
fn bound_is_by_the_scores_of_the_rows_regime() {
    let (rows, _) = asked();
    let mut model = learned(MLP);
    let scores = (0..59).map(|i| f64::from(i) / 100.0).collect();
    let regime = features::regime(&rows[0]);
    model.description.as_mut().unwrap().scores = [(regime, scores)].into();
    let (second, confidence) = (Nanos::from_millis(1000), Confidence::new(0.95).unwrap());
    let predicted = Prediction { tail: Nanos::from_millis(1), high: second };
    let bound = |tasks| model.bound(&rows[0], predicted, confidence, tasks);
    // One of 59 may lie above at 0.95 (P(Bin(59, 0.05) <= 1) = 0.2 is above 0.1, <= 0 is 0.05): none.
    assert_eq!(bound(1), Some(second.scale(0.58_f64.exp())));
    // Three tasks need rank 59 of 59, four have too few.
    assert_eq!(bound(3), Some(second.scale(0.58_f64.exp())));
    assert_eq!(bound(4), None);
    let other = Regime::ALL.into_iter().find(|r| *r != regime).unwrap();
    model.description.as_mut().unwrap().scores = [(other, vec![0.0; 100])].into();
    assert_eq!(model.bound(&rows[0], predicted, confidence, 1), None);
}

#[test]
fn second_number_is_what_scores_refer_to() {
    let axis = [field(1, b"axis"), int(3, 1)].concat();
    let two = |second: &str| {
        let graph = [
            node("ReduceSum", &["x"], "sum", &[]),
            node("Neg", &["sum"], "tail", &[]),
            node("Concat", &["tail", second], "y", std::slice::from_ref(&axis)),
        ];
        learned(&model(&graph))
    };
    let mut row = [0.0; FEATURES.len()];
    row[0] = 2.0;
    let ms = Nanos::from_millis;
    // 10^-2 s, and 10^2 s.
    assert_eq!(two("sum").predict(&row), Ok(Prediction { tail: ms(10), high: ms(100_000) }));
    row[0] = 4.0;
    // 10^4 s is no latency, whichever of the two it is.
    assert_eq!(two("sum").predict(&row), Err(NoAnswer::NoLatency(1e4)));
    let three = [
        node("ReduceSum", &["x"], "sum", &[]),
        node("Concat", &["sum", "sum", "sum"], "y", std::slice::from_ref(&axis)),
    ];
    assert!(refused(&model(&three)).contains("no answer"));
}

#[test]
fn bound_is_not_below_the_prediction() {
    let (rows, _) = asked();
    let mut model = learned(MLP);
    let regime = features::regime(&rows[0]);
    model.description.as_mut().unwrap().scores = [(regime, vec![-1.0; 100])].into();
    let predicted = Prediction { tail: Nanos::from_millis(9), high: Nanos::from_millis(10) };
    let bound = model.bound(&rows[0], predicted, Confidence::new(0.95).unwrap(), 1);
    assert_eq!(bound, Some(Nanos::from_millis(9)));
}

#[test]
fn file_without_a_description_is_taken_as_it_is() {
    let (rows, expected) = asked();
    let model = learned(MANY_OPERATORS);
    assert_eq!(model.description(), None);
    let mut row = rows[0];
    let tail = model.predict(&row).unwrap().tail.as_secs_f64();
    assert!((tail.log10() - expected["many_operators"][0].as_f64().unwrap()).abs() < 1e-3);
    row[0] = 1000.0;
    assert!(!matches!(model.predict(&row), Err(NoAnswer::OutOfRange { .. })));
    let second = Nanos::from_millis(1000);
    let predicted = Prediction { tail: second, high: second };
    assert_eq!(model.bound(&row, predicted, Confidence::new(0.9).unwrap(), 1), None);
}

#[test]
fn unsupported_is_refused_by_name() {
    let of = |graph: &[Vec<u8>]| refused(&model(graph));
    let lstm = of(&[node("LSTM", &["x"], "y", &[])]);
    assert_eq!(lstm, "operator LSTM (\"\") is not supported");
    let axis = field(1, b"axis");
    let other = of(&[node("Relu", &["x"], "y", &[axis])]);
    assert_eq!(other, "operator Relu: attribute axis is not supported, or damaged");
    let later = of(&[node("Relu", &["z"], "y", &[])]);
    assert_eq!(later, "value \"z\" is used before it is computed");
    // What the output does not need may be anything.
    let graph = [node("LSTM", &["x"], "z", &[]), node("ReduceSum", &["x"], "y", &[])];
    assert!(Learned::from_bytes(&model(&graph)).is_ok());
    // 25 numbers are no answer.
    let wide = of(&[node("Relu", &["x"], "y", &[])]);
    assert!(wide.contains("no answer") && wide.contains("shapes"), "{wide}");
    let two = [model(&[node("Relu", &["x"], "y", &[])]), field(8, &int(2, 6))].concat();
    assert_eq!(refused(&two), "operator set 6; 7 and later are read");
}

#[test]
fn ends_that_are_no_regressors_are_refused() {
    let relu = node("ReduceSum", &["x"], "y", &[]);
    let two = model(&[relu.clone(), end(11, "x2")]);
    assert_eq!(refused(&two), "2 inputs, not one");
    let two = model(&[relu.clone(), end(12, "y2")]);
    assert_eq!(refused(&two), "2 outputs, not one");
    let shaped = |rows: u8, columns: u8| {
        let dimensions = [field(1, &int(1, rows)), field(1, &int(1, columns))].concat();
        let tensor = [int(1, 1), field(2, &dimensions)].concat();
        let input = field(11, &[field(1, b"x"), field(2, &field(1, &tensor))].concat());
        let graph = [relu.clone(), input, end(12, "y")].concat();
        [field(7, &graph), field(8, &int(2, 17))].concat()
    };
    assert!(Learned::from_bytes(&shaped(1, 25)).is_ok());
    let shape = |found: &str| {
        format!("its input has the shape {found}, not one open dimension and 25 features")
    };
    assert_eq!(refused(&shaped(1, 24)), shape("[Some(1), Some(24)]"));
    assert_eq!(refused(&shaped(32, 25)), shape("[Some(32), Some(25)]"));
}

#[test]
fn description_that_does_not_fit_is_refused() {
    let described = |json: &str| {
        let entry = [field(1, DESCRIPTION.as_bytes()), field(2, json.as_bytes())].concat();
        let graph = model(&[node("ReduceSum", &["x"], "y", &[])]);
        refused(&[graph, field(14, &entry)].concat())
    };
    assert!(described("{").starts_with("its metadata \"rtvirtio\" is no description: EOF"));
    let mut description = learned(MLP).description.unwrap();
    description.features[2] = "iops".to_owned();
    assert_eq!(
        described(&serde_json::to_string(&description).unwrap()),
        "its description: feature 2 is \"iops\", this rtvirtio computes \"task_iops\" there"
    );
    description.features[2] = "task_iops".to_owned();
    // The sum of the middles of all ranges is no logarithm of a latency.
    let silent = described(&serde_json::to_string(&description).unwrap());
    assert!(silent.starts_with("it gives no answer to a row of its own range"), "{silent}");
}

#[test]
fn what_costs_too_much_is_refused() {
    // Each step doubles the row: 25 × 2^20 numbers after twenty.
    let mut graph = Vec::new();
    let names: Vec<String> = (0..=20).map(|i| format!("v{i}")).collect();
    graph.push(node("Identity", &["x"], "v0", &[]));
    let axis = [field(1, b"axis"), int(3, 1)].concat();
    for pair in names.windows(2) {
        graph.push(node("Concat", &[&pair[0], &pair[0]], &pair[1], std::slice::from_ref(&axis)));
    }
    graph.push(node("ReduceSum", &["v20"], "y", &[]));
    let dear = refused(&model(&graph));
    assert!(dear.contains("costs more"), "{dear}");
    assert!(matches!(
        Learned::from_bytes(&vec![0; MAX_MODEL_BYTES + 1]),
        Err(LearnedError::TooLarge)
    ));
}

#[test]
fn millions_of_axes_are_refused_at_once() {
    // 2^21 zeros, a byte each in the file: each would move all that were inserted before it.
    let count = 1 << 21;
    let zeros = field(7, &vec![0; count]);
    let tensor = [field(8, b"axes"), int(2, 7), field(1, &[0x80, 0x80, 0x80, 1]), zeros].concat();
    for operator in ["Unsqueeze", "Squeeze", "ReduceSum"] {
        let graph = [field(5, &tensor), node(operator, &["x", "axes"], "y", &[])];
        let many = refused(&model(&graph));
        assert!(many.ends_with(&format!("{operator}: an index is out of range")), "{many}");
    }
}

#[test]
fn axes_from_the_end_axes_that_stand_twice_and_quotients_of_integers_are_as_in_onnx() {
    let tail = |nodes: &[Vec<u8>]| {
        let mut row = [0.0; FEATURES.len()];
        row[0] = 50.0;
        learned(&model(nodes)).predict(&row).unwrap().tail
    };
    let ms = Nanos::from_millis;
    let neg = node("Neg", &["number"], "y", &[]);
    let ints = |name: &str, values: &[u8]| [field(1, name.as_bytes()), field(8, values)].concat();
    let number = |name: &str, value: u8| [field(1, name.as_bytes()), int(3, value)].concat();
    // The mean of 25 numbers is 2, however often their axis is named.
    let mean = node("ReduceMean", &["x"], "number", &[ints("axes", &[1, 1])]);
    assert_eq!(tail(&[mean, neg.clone()]), ms(10));
    // Before the last dimension: still one row of 25, along which the mean is one number.
    let minus_one: Vec<u8> = [&[3_u8 << 3][..], &[0xff; 9], &[1]].concat();
    let last = [field(1, b"axis"), minus_one].concat();
    let flat = node("Flatten", &["x"], "flat", &[last]);
    let mean = node("ReduceMean", &["flat"], "number", &[ints("axes", &[1])]);
    assert_eq!(tail(&[flat, mean, neg.clone()]), ms(10));
    // 5 / 2 is 2.
    let constant =
        |value, output: &str| node("Constant", &[], output, &[number("value_int", value)]);
    let quotient = node("Div", &["five", "two"], "quotient", &[]);
    let real = node("Cast", &["quotient"], "number", &[number("to", 1)]);
    assert_eq!(tail(&[constant(5, "five"), constant(2, "two"), quotient, real, neg]), ms(10));
}

#[test]
fn external_data_is_refused() {
    let tensor = [field(8, b"w"), int(2, 1), int(14, 1)].concat();
    let graph = [field(5, &tensor), node("Add", &["x", "w"], "y", &[])];
    assert!(refused(&model(&graph)).contains("external data"));
}

/// A tree whose branch has itself for a child.
#[test]
fn tree_that_goes_in_circles_is_refused() {
    let ints = |name: &str, values: &[u8]| [field(1, name.as_bytes()), field(8, values)].concat();
    let texts = |name: &str, values: &[&str]| {
        let texts = values.iter().flat_map(|t| field(9, t.as_bytes()));
        [field(1, name.as_bytes()), texts.collect()].concat()
    };
    let floats = |name: &str, values: &[f32]| {
        let packed: Vec<u8> = values.iter().flat_map(|f| f.to_le_bytes()).collect();
        [field(1, name.as_bytes()), field(7, &packed)].concat()
    };
    let tree = |yes: u8| {
        let attributes = [
            ints("nodes_treeids", &[0, 0, 0]),
            ints("nodes_nodeids", &[0, 1, 2]),
            ints("nodes_featureids", &[0, 0, 0]),
            ints("nodes_truenodeids", &[yes, 0, 0]),
            ints("nodes_falsenodeids", &[2, 0, 0]),
            texts("nodes_modes", &["BRANCH_LEQ", "LEAF", "LEAF"]),
            floats("nodes_values", &[3.0, 0.0, 0.0]),
            ints("target_treeids", &[0, 0]),
            ints("target_nodeids", &[1, 2]),
            ints("target_ids", &[0, 0]),
            floats("target_weights", &[-2.0, -3.0]),
        ];
        let tree = node("TreeEnsembleRegressor", &["x"], "y", &attributes);
        model(&[of_learning(tree)])
    };
    let good = learned(&tree(1));
    let tail = |vms: f64| {
        let mut row = [0.0; FEATURES.len()];
        row[0] = vms;
        good.predict(&row).unwrap().tail
    };
    assert_eq!((tail(3.0), tail(4.0)), (Nanos::from_millis(10), Nanos::from_millis(1)));
    for yes in [0, 2, 7] {
        let circle = refused(&tree(yes));
        assert!(circle.starts_with("operator TreeEnsembleRegressor: attribute nodes_"), "{circle}");
    }
}

/// As onnx's reference has it (docs/Operators-ml.md, ai.onnx.ml.TreeEnsemble): a tree of one branch whose
/// leaves are -2 and -3.
#[test]
fn tree_ensemble_of_version_5_is_read_and_its_circles_are_refused() {
    let ints = |name: &str, values: &[u8]| [field(1, name.as_bytes()), field(8, values)].concat();
    let tensor = |name: &str, kind: u8, raw: &[u8]| {
        let tensor = [int(2, kind), field(9, raw)].concat();
        [field(1, name.as_bytes()), field(5, &tensor)].concat()
    };
    let floats = |name: &str, values: &[f32]| {
        tensor(name, 1, &values.iter().flat_map(|f| f.to_le_bytes()).collect::<Vec<_>>())
    };
    struct Shape {
        yes: [u8; 2],
        yes_leaf: [u8; 2],
        roots: Vec<u8>,
        mode: u8,
        target: u8,
    }
    let tree = |shape: &Shape| {
        let attributes = [
            ints("nodes_featureids", &[0, 0]),
            floats("nodes_splits", &[3.0, 1.0]),
            tensor("nodes_modes", 2, &[shape.mode, 1]),
            ints("nodes_truenodeids", &shape.yes),
            ints("nodes_trueleafs", &shape.yes_leaf),
            ints("nodes_falsenodeids", &[1, 0]),
            ints("nodes_falseleafs", &[1, 1]),
            ints("leaf_targetids", &[shape.target, 0]),
            floats("leaf_weights", &[-2.0, -3.0]),
            ints("tree_roots", &shape.roots),
        ];
        let tree = node("TreeEnsemble", &["x"], "y", &attributes);
        model(&[of_learning(tree)])
    };
    // If x <= 3: if x < 1 the second leaf, else the first; else the second.
    let good = || Shape { yes: [1, 1], yes_leaf: [0, 1], roots: vec![0], mode: 0, target: 0 };
    let learned = learned(&tree(&good()));
    let tail = |vms: f64| {
        let mut row = [0.0; FEATURES.len()];
        row[0] = vms;
        learned.predict(&row).unwrap().tail
    };
    let (first, second) = (Nanos::from_millis(10), Nanos::from_millis(1));
    assert_eq!([tail(0.5), tail(2.0), tail(3.0), tail(4.0)], [second, first, first, second]);
    for (shape, attribute) in [
        (Shape { yes: [0, 1], ..good() }, "tree_roots"),
        (Shape { yes: [1, 1], yes_leaf: [0, 0], ..good() }, "nodes_truenodeids"),
        (Shape { yes: [7, 1], ..good() }, "nodes_truenodeids"),
        (Shape { yes: [1, 7], ..good() }, "nodes_truenodeids"),
        (Shape { roots: vec![1], ..good() }, "tree_roots"),
        (Shape { roots: vec![0, 0], ..good() }, "tree_roots"),
        (Shape { roots: vec![], ..good() }, "tree_roots"),
        (Shape { mode: 6, ..good() }, "nodes_modes"),
        (Shape { target: 1, ..good() }, "leaf_targetids"),
    ] {
        let refused = refused(&tree(&shape));
        assert!(refused.starts_with("operator TreeEnsemble: attribute"), "{refused}");
        assert!(refused.contains(attribute), "{attribute}: {refused}");
    }
}

proptest! {
    /// A byte changed, bytes cut off, or anything at all.
    #[test]
    fn hostile_files_are_refused_without_a_panic(
        which in 0..MODELS.len(),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
        anything in proptest::collection::vec(any::<u8>(), 0..256),
    ) {
        let mut bytes = MODELS[which].1.to_vec();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        for bytes in [bytes, anything] {
            if let Ok(model) = Learned::from_bytes(&bytes) {
                let longest = Nanos::from_secs_f64(3600.0);
                if let Ok(said) = model.predict(&[1.0; FEATURES.len()]) {
                    prop_assert!(said.tail.max(said.high) <= longest);
                }
            }
        }
    }
}
