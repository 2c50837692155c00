//! An operator's attributes, each taken once: what is left over is not supported.

use super::onnx::{Attribute, Element, Node};
use super::tensor::Tensor;
use super::{LearnedError, clipped};

pub(super) struct Attributes<'n, 'a> {
    operator: &'a str,
    left: Vec<&'n Attribute<'a>>,
}

impl<'n, 'a> Attributes<'n, 'a> {
    pub(super) fn of(node: &'n Node<'a>) -> Self {
        Self { operator: node.operator, left: node.attributes.iter().collect() }
    }

    fn take(&mut self, name: &str) -> Option<&'n Attribute<'a>> {
        let place = self.left.iter().position(|a| a.name == name)?;
        Some(self.left.swap_remove(place))
    }

    /// The error that names an attribute of this operator.
    pub(super) fn refuse(&self, attribute: &str) -> LearnedError {
        LearnedError::Attribute { operator: clipped(self.operator), attribute: clipped(attribute) }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.left.iter().any(|a| a.name == name)
    }

    pub(super) fn ignore(&mut self, name: &str) {
        self.take(name);
    }

    pub(super) fn int(&mut self, name: &str, default: i64) -> i64 {
        self.take(name).map_or(default, |a| a.int)
    }

    pub(super) fn float(&mut self, name: &str, default: f64) -> f64 {
        self.take(name).map_or(default, |a| f64::from(a.float))
    }

    pub(super) fn text(&mut self, name: &str, default: &'static [u8]) -> &'a [u8] {
        self.take(name).map_or(default, |a| a.text)
    }

    /// Refuses any other value than `supported`.
    pub(super) fn only(
        &mut self,
        name: &str,
        supported: &'static [u8],
    ) -> Result<(), LearnedError> {
        if self.text(name, supported) == supported { Ok(()) } else { Err(self.refuse(name)) }
    }

    pub(super) fn ints(&mut self, name: &str) -> Vec<i64> {
        self.take(name).map_or_else(Vec::new, |a| a.ints.clone())
    }

    pub(super) fn texts(&mut self, name: &str) -> Vec<&'a [u8]> {
        self.take(name).map_or_else(Vec::new, |a| a.texts.clone())
    }

    /// Real numbers: `name` in single precision, or the tensor `name_as_tensor`.
    pub(super) fn reals(&mut self, name: &str) -> Result<Vec<f64>, LearnedError> {
        let as_tensor = format!("{name}_as_tensor");
        if let Some(attribute) = self.take(&as_tensor) {
            let tensor = attribute.tensor.as_ref().ok_or_else(|| self.refuse(&as_tensor))?;
            let elements = tensor.elements()?.ok_or_else(|| self.refuse(&as_tensor))?;
            self.ignore(name);
            return Ok(elements.1);
        }
        let floats = self.take(name).map_or(&[][..], |a| &a.floats);
        Ok(floats.iter().copied().map(f64::from).collect())
    }

    /// Real numbers of a tensor, and their type.
    pub(super) fn real_tensor(&mut self, name: &str) -> Result<(Element, Vec<f64>), LearnedError> {
        let tensor = self.take(name).and_then(|attribute| attribute.tensor.as_ref());
        let elements = tensor.map(|tensor| tensor.elements()).transpose()?.flatten();
        let elements = elements.filter(|(element, _)| *element != Element::Int);
        elements.ok_or_else(|| self.refuse(name))
    }

    /// Bytes of a tensor.
    pub(super) fn octets(&mut self, name: &str) -> Result<Vec<u8>, LearnedError> {
        let tensor = self.take(name).and_then(|attribute| attribute.tensor.as_ref());
        tensor.and_then(|tensor| tensor.octets()).ok_or_else(|| self.refuse(name))
    }

    pub(super) fn tensor(&mut self, name: &str) -> Result<Option<Tensor>, LearnedError> {
        let Some(attribute) = self.take(name) else { return Ok(None) };
        let tensor = attribute.tensor.as_ref().ok_or_else(|| self.refuse(name))?;
        super::graph::constant(tensor).map(Some)
    }

    /// Refuses what was not taken.
    pub(super) fn finish(self) -> Result<(), LearnedError> {
        self.left.first().map_or(Ok(()), |a| Err(self.refuse(a.name)))
    }
}
