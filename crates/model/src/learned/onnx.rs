//! The messages of ONNX that a regressor needs, borrowed from the file.
//!
//! Source of the field numbers: onnx/onnx.proto of ONNX 1.19 (IR version 12). Fields that are not
//! named here say nothing about what is computed (names of producers, documentation, inferred types),
//! or are refused: external data, sparse tensors.

use super::protobuf::{Fields, Malformed, Value, numbers};

/// Most nodes, initializers, and attributes of a node that are read.
const MAX_NODES: usize = 4096;
const MAX_ATTRIBUTES: usize = 32;

/// Most text entries of `metadata_props` that are read.
const MAX_METADATA: usize = 1_000;

/// Most inputs and outputs of a node or graph.
const MAX_ENDS: usize = 10_000;

/// A tensor's element type, as far as it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    /// `FLOAT`
    Single,
    /// `DOUBLE`
    Double,
    /// `INT32` and `INT64`
    Int,
}

impl Element {
    /// From `TensorProto.DataType`.
    pub(super) const fn of(data_type: i64) -> Option<Self> {
        match data_type {
            1 => Some(Self::Single),
            6 | 7 => Some(Self::Int),
            11 => Some(Self::Double),
            _ => None,
        }
    }
}

/// `ModelProto`
#[derive(Debug, Default)]
pub(super) struct Model<'a> {
    /// Version of the operator set of the default domain.
    pub(super) opset: i64,
    pub(super) graph: Graph<'a>,
    pub(super) metadata: Vec<(&'a str, &'a str)>,
}

/// `GraphProto`
#[derive(Debug, Default)]
pub(super) struct Graph<'a> {
    pub(super) nodes: Vec<Node<'a>>,
    pub(super) initializers: Vec<Tensor<'a>>,
    pub(super) inputs: Vec<End<'a>>,
    pub(super) outputs: Vec<End<'a>>,
}

/// `NodeProto`
#[derive(Debug, Default)]
pub(super) struct Node<'a> {
    pub(super) operator: &'a str,
    pub(super) domain: &'a str,
    pub(super) inputs: Vec<&'a str>,
    pub(super) outputs: Vec<&'a str>,
    pub(super) attributes: Vec<Attribute<'a>>,
}

/// `AttributeProto`
#[derive(Debug, Default)]
pub(super) struct Attribute<'a> {
    pub(super) name: &'a str,
    pub(super) float: f32,
    pub(super) int: i64,
    pub(super) text: &'a [u8],
    pub(super) tensor: Option<Tensor<'a>>,
    pub(super) floats: Vec<f32>,
    pub(super) ints: Vec<i64>,
    pub(super) texts: Vec<&'a [u8]>,
}

/// `TensorProto`
#[derive(Debug, Default)]
pub(super) struct Tensor<'a> {
    pub(super) name: &'a str,
    pub(super) data_type: i64,
    pub(super) dimensions: Vec<i64>,
    raw: Option<&'a [u8]>,
    floats: Vec<f32>,
    ints: Vec<i64>,
    doubles: Vec<f64>,
}

/// `ValueInfoProto` of a tensor
#[derive(Debug, Default)]
pub(super) struct End<'a> {
    pub(super) name: &'a str,
    pub(super) data_type: i64,
    /// `None`: of any shape. A dimension of `None`: left open.
    pub(super) shape: Option<Vec<Option<i64>>>,
}

fn push<T>(into: &mut Vec<T>, most: usize, what: &'static str, item: T) -> Result<(), Malformed> {
    if into.len() == most {
        return Err(Malformed::TooMany(what));
    }
    into.push(item);
    Ok(())
}

impl<'a> Model<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut model = Self::default();
        let mut graph = None;
        for field in Fields(bytes) {
            match field? {
                (7, value) if graph.is_none() => graph = Some(Graph::read(value.bytes()?)?),
                (7, _) => return Err(Malformed::NotOne("graph")),
                (8, value) => {
                    let (mut domain, mut version) = ("", 0);
                    for field in Fields(value.bytes()?) {
                        match field? {
                            (1, value) => domain = value.text()?,
                            (2, value) => version = value.int()?,
                            _ => {}
                        }
                    }
                    if matches!(domain, "" | "ai.onnx") {
                        model.opset = version;
                    }
                }
                (14, value) => {
                    let (mut key, mut text) = ("", "");
                    for field in Fields(value.bytes()?) {
                        match field? {
                            (1, value) => key = value.text()?,
                            (2, value) => text = value.text()?,
                            _ => {}
                        }
                    }
                    push(&mut model.metadata, MAX_METADATA, "metadata_props", (key, text))?;
                }
                _ => {}
            }
        }
        model.graph = graph.ok_or(Malformed::NotOne("graph"))?;
        Ok(model)
    }
}

impl<'a> Graph<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut graph = Self::default();
        for field in Fields(bytes) {
            match field? {
                (1, value) => {
                    push(&mut graph.nodes, MAX_NODES, "nodes", Node::read(value.bytes()?)?)?;
                }
                (5, value) => {
                    let tensor = Tensor::read(value.bytes()?)?;
                    push(&mut graph.initializers, MAX_NODES, "initializers", tensor)?;
                }
                (11, value) => {
                    push(&mut graph.inputs, MAX_ENDS, "inputs", End::read(value.bytes()?)?)?;
                }
                (12, value) => {
                    push(&mut graph.outputs, MAX_ENDS, "outputs", End::read(value.bytes()?)?)?;
                }
                (15, _) => return Err(Malformed::TooMany("sparse tensors")),
                _ => {}
            }
        }
        Ok(graph)
    }
}

impl<'a> Node<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut node = Self::default();
        for field in Fields(bytes) {
            match field? {
                (1, value) => push(&mut node.inputs, MAX_ENDS, "inputs", value.text()?)?,
                (2, value) => push(&mut node.outputs, MAX_ENDS, "outputs", value.text()?)?,
                (4, value) => node.operator = value.text()?,
                (5, value) => {
                    let attribute = Attribute::read(value.bytes()?)?;
                    push(&mut node.attributes, MAX_ATTRIBUTES, "attributes", attribute)?;
                }
                (7, value) => node.domain = value.text()?,
                _ => {}
            }
        }
        Ok(node)
    }
}

impl<'a> Attribute<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut attribute = Self::default();
        for field in Fields(bytes) {
            match field? {
                (1, value) => attribute.name = value.text()?,
                (2, value) => attribute.float = value.float()?,
                (3, value) => attribute.int = value.int()?,
                (4, value) => attribute.text = value.bytes()?,
                (5, value) => attribute.tensor = Some(Tensor::read(value.bytes()?)?),
                (7, value) => value.floats(&mut attribute.floats)?,
                (8, value) => value.ints(&mut attribute.ints)?,
                (9, value) => attribute.texts.push(value.bytes()?),
                _ => {}
            }
        }
        Ok(attribute)
    }
}

impl<'a> Tensor<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut tensor = Self::default();
        for field in Fields(bytes) {
            match field? {
                (1, value) => value.ints(&mut tensor.dimensions)?,
                (2, value) => tensor.data_type = value.int()?,
                (4, value) => value.floats(&mut tensor.floats)?,
                // int32_data and int64_data
                (5 | 7, value) => value.ints(&mut tensor.ints)?,
                (8, value) => tensor.name = value.text()?,
                (9, value) => tensor.raw = Some(value.bytes()?),
                (10, value) => value.doubles(&mut tensor.doubles)?,
                // data_location
                (14, Value::Varint(0)) => {}
                (13 | 14, _) => return Err(Malformed::TooMany("files (external data)")),
                _ => {}
            }
        }
        Ok(tensor)
    }

    /// The elements, whichever field holds them; `None` of another type than [`Element`]'s.
    pub(super) fn elements(&self) -> Result<Option<(Element, Vec<f64>)>, Malformed> {
        let Some(element) = Element::of(self.data_type) else { return Ok(None) };
        let data = match (self.data_type, self.raw) {
            (1, Some(raw)) => numbers(raw, f32::from_le_bytes)?.map(f64::from).collect(),
            (6, Some(raw)) => numbers(raw, i32::from_le_bytes)?.map(f64::from).collect(),
            (7, Some(raw)) => numbers(raw, i64::from_le_bytes)?.map(|i| i as f64).collect(),
            (_, Some(raw)) => numbers(raw, f64::from_le_bytes)?.collect(),
            (1, None) => self.floats.iter().copied().map(f64::from).collect(),
            (6 | 7, None) => self.ints.iter().map(|&i| i as f64).collect(),
            (_, None) => self.doubles.clone(),
        };
        Ok(Some((element, data)))
    }
}

impl Tensor<'_> {
    /// The elements of a tensor of bytes (`UINT8`), which only an attribute may be; `None` of another type.
    pub(super) fn octets(&self) -> Option<Vec<u8>> {
        match (self.data_type, self.raw) {
            (2, Some(raw)) => Some(raw.to_vec()),
            (2, None) => self.ints.iter().map(|&i| u8::try_from(i).ok()).collect(),
            _ => None,
        }
    }
}

impl<'a> End<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut end = Self::default();
        for field in Fields(bytes) {
            match field? {
                (1, value) => end.name = value.text()?,
                (2, value) => {
                    for field in Fields(value.bytes()?) {
                        // TypeProto.tensor_type; another kind keeps data_type 0.
                        if let (1, value) = field? {
                            end.read_tensor(value.bytes()?)?;
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(end)
    }

    fn read_tensor(&mut self, bytes: &'a [u8]) -> Result<(), Malformed> {
        for field in Fields(bytes) {
            match field? {
                (1, value) => self.data_type = value.int()?,
                (2, value) => {
                    let shape = self.shape.get_or_insert_default();
                    for field in Fields(value.bytes()?) {
                        let (1, value) = field? else { continue };
                        let mut dimension = None;
                        for field in Fields(value.bytes()?) {
                            if let (1, value) = field? {
                                dimension = Some(value.int()?);
                            }
                        }
                        push(shape, MAX_ENDS, "dimensions", dimension)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}
