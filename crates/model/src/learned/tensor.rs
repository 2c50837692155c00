//! Small dense tensors, as one row of features needs them.
//!
//! Numbers are f64; what ONNX calls `float` is rounded to it after each
//! operation, so that a tree's threshold is met by the very number that the
//! training's runtime compares. Integers (shapes, indices) are exact to 2^53.

use super::onnx::Element;

/// Most dimensions.
pub(super) const MAX_RANK: usize = 8;

/// What one evaluation may still cost. A graph cannot loop, but a few operators in a row can ask for
/// far more than their file is large.
#[derive(Debug)]
pub(super) struct Budget {
    /// Elements that may still be made.
    pub(super) elements: usize,
    /// Multiplications of matrices and comparisons in trees that may still be done.
    pub(super) steps: usize,
}

/// Why an operator cannot be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The shapes of its inputs do not go together.
    #[error("the shapes of its inputs do not go together")]
    Shape,
    /// It has fewer inputs than it needs, or more.
    #[error("it has too few inputs, or too many")]
    Inputs,
    /// An index or axis is out of range.
    #[error("an index is out of range")]
    Index,
    /// The whole evaluation costs more than is allowed.
    #[error("an answer costs more than a model may take")]
    Budget,
}

impl Budget {
    fn take(left: &mut usize, count: usize) -> Result<(), Fault> {
        *left = left.checked_sub(count).ok_or(Fault::Budget)?;
        Ok(())
    }

    pub(super) fn steps(&mut self, count: usize) -> Result<(), Fault> {
        Self::take(&mut self.steps, count)
    }

    /// A copy, which is paid for.
    pub(super) fn copy(&mut self, tensor: &Tensor) -> Result<Tensor, Fault> {
        self.elements(&tensor.shape)?;
        Ok(tensor.clone())
    }

    /// The number of elements of `shape`, which are paid for.
    fn elements(&mut self, shape: &[usize]) -> Result<usize, Fault> {
        let count = count(shape).ok_or(Fault::Budget)?;
        Self::take(&mut self.elements, count)?;
        Ok(count)
    }
}

/// Elements of a tensor of this shape; `None` if there are none or too many to count. A dimension of 0 is
/// refused: beside one of 2^62 it makes a tensor of no elements, whose loops would run for ever all the same.
fn count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1, |count: usize, &d| count.checked_mul(d)).filter(|&count| count > 0)
}

/// A tensor, its last dimension contiguous.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tensor {
    pub(super) element: Element,
    shape: Vec<usize>,
    data: Vec<f64>,
}

impl Tensor {
    /// `None` if `data` is not what `shape` holds.
    pub(super) fn new(element: Element, shape: Vec<usize>, data: Vec<f64>) -> Option<Self> {
        let fits = shape.len() <= MAX_RANK && count(&shape) == Some(data.len());
        fits.then(|| Self { element, shape, data }.rounded())
    }

    /// One row.
    pub(super) fn row(element: Element, data: Vec<f64>) -> Self {
        Self { element, shape: vec![1, data.len()], data }.rounded()
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(super) fn data(&self) -> &[f64] {
        &self.data
    }

    /// As the element type holds it: a quotient of integers is one too.
    fn rounded(mut self) -> Self {
        match self.element {
            Element::Single => self.data.iter_mut().for_each(|x| *x = f64::from(*x as f32)),
            Element::Int => self.data.iter_mut().for_each(|x| *x = x.trunc()),
            Element::Double => {}
        }
        self
    }

    pub(super) fn cast(mut self, element: Element) -> Self {
        self.element = element;
        self.rounded()
    }

    pub(super) fn map(mut self, f: impl Fn(f64) -> f64) -> Self {
        self.data.iter_mut().for_each(|x| *x = f(*x));
        self.rounded()
    }

    /// Element by element, each dimension of 1 stretched to the other's (ONNX, "Broadcasting").
    pub(super) fn zip(
        &self,
        other: &Self,
        budget: &mut Budget,
        f: impl Fn(f64, f64) -> f64,
    ) -> Result<Self, Fault> {
        let rank = self.shape.len().max(other.shape.len());
        let dimension = |t: &Self, axis: usize| {
            let missing = rank - t.shape.len();
            axis.checked_sub(missing).map_or(1, |i| t.shape[i])
        };
        let shape: Option<Vec<usize>> = (0..rank)
            .map(|axis| match (dimension(self, axis), dimension(other, axis)) {
                (a, b) if a == b || b == 1 => Some(a),
                (1, b) => Some(b),
                _ => None,
            })
            .collect();
        let shape = shape.ok_or(Fault::Shape)?;
        let elements = budget.elements(&shape)?;
        // How far one step along each axis goes in a tensor; 0 where it is stretched.
        let strides = |t: &Self| {
            let mut stride = 1;
            let mut strides = vec![0; rank];
            for axis in (0..rank).rev() {
                let size = dimension(t, axis);
                strides[axis] = if size == 1 { 0 } else { stride };
                stride *= size;
            }
            strides
        };
        let (of_self, of_other) = (strides(self), strides(other));
        let mut index = vec![0; rank];
        let (mut a, mut b) = (0, 0);
        let mut data = Vec::with_capacity(elements);
        for _ in 0..elements {
            data.push(f(self.data[a], other.data[b]));
            for axis in (0..rank).rev() {
                index[axis] += 1;
                a += of_self[axis];
                b += of_other[axis];
                if index[axis] < shape[axis] {
                    break;
                }
                a -= of_self[axis] * shape[axis];
                b -= of_other[axis] * shape[axis];
                index[axis] = 0;
            }
        }
        Ok(Self { element: self.element, shape, data }.rounded())
    }

    /// The product of two matrices, the second one possibly stored with rows and columns exchanged.
    pub(super) fn matmul(
        &self,
        other: &Self,
        is_transposed: bool,
        budget: &mut Budget,
    ) -> Result<Self, Fault> {
        let (&[rows, inner], &[height, width]) = (&self.shape[..], &other.shape[..]) else {
            return Err(Fault::Shape);
        };
        let (same, columns) = if is_transposed { (width, height) } else { (height, width) };
        if inner != same {
            return Err(Fault::Shape);
        }
        let shape = vec![rows, columns];
        let elements = budget.elements(&shape)?;
        budget.steps(elements.checked_mul(inner).ok_or(Fault::Budget)?)?;
        let mut data = vec![0.0; elements];
        for row in 0..rows {
            let into = &mut data[row * columns..][..columns];
            let from = &self.data[row * inner..][..inner];
            if is_transposed {
                for (j, sum) in into.iter_mut().enumerate() {
                    let weights = &other.data[j * inner..][..inner];
                    *sum = from.iter().zip(weights).map(|(x, w)| x * w).sum();
                }
                continue;
            }
            for (k, x) in from.iter().enumerate() {
                let weights = &other.data[k * columns..][..columns];
                into.iter_mut().zip(weights).for_each(|(sum, w)| *sum += x * w);
            }
        }
        Ok(Self { element: self.element, shape, data }.rounded())
    }

    /// A matrix with rows and columns exchanged.
    pub(super) fn transposed(&self, budget: &mut Budget) -> Result<Self, Fault> {
        let &[rows, columns] = &self.shape[..] else { return Err(Fault::Shape) };
        budget.elements(&self.shape)?;
        let at = |i: usize| self.data[i % rows * columns + i / rows];
        let data = (0..self.data.len()).map(at).collect();
        Ok(Self { element: self.element, shape: vec![columns, rows], data })
    }

    /// The same elements in another shape.
    pub(super) fn reshaped(mut self, shape: Vec<usize>) -> Result<Self, Fault> {
        if shape.len() > MAX_RANK || count(&shape) != Some(self.data.len()) {
            return Err(Fault::Shape);
        }
        self.shape = shape;
        Ok(self)
    }

    /// `axis` as an index, counted from the end if it is negative; `extra` more axes are allowed.
    pub(super) fn axis(&self, axis: i64, extra: usize) -> Result<usize, Fault> {
        let rank = (self.shape.len() + extra) as i64;
        let axis = if axis < 0 { axis.checked_add(rank).ok_or(Fault::Index)? } else { axis };
        if (0..rank).contains(&axis) { Ok(axis as usize) } else { Err(Fault::Index) }
    }

    /// Elements before, along and after `axis`.
    fn split(&self, axis: usize) -> (usize, usize, usize) {
        let product = |s: &[usize]| s.iter().product();
        let (before, from) = self.shape.split_at(axis);
        (product(before), from[0], product(&from[1..]))
    }

    /// What `indices` select along `axis`.
    pub(super) fn select(
        &self,
        axis: usize,
        indices: &[f64],
        budget: &mut Budget,
    ) -> Result<Self, Fault> {
        let (before, along, after) = self.split(axis);
        let index = |&i: &f64| {
            let from_start = if i < 0.0 { i + along as f64 } else { i };
            let is_there = from_start >= 0.0 && from_start < along as f64;
            is_there.then_some(from_start as usize).ok_or(Fault::Index)
        };
        let indices: Vec<usize> = indices.iter().map(index).collect::<Result<_, _>>()?;
        let mut shape = self.shape.clone();
        shape[axis] = indices.len();
        let mut data = Vec::with_capacity(budget.elements(&shape)?);
        for outer in 0..before {
            for i in &indices {
                data.extend_from_slice(&self.data[(outer * along + i) * after..][..after]);
            }
        }
        Ok(Self { element: self.element, shape, data })
    }

    /// Tensors one after the other along `axis`.
    pub(super) fn concat(parts: &[&Self], axis: usize, budget: &mut Budget) -> Result<Self, Fault> {
        let first = parts.first().ok_or(Fault::Inputs)?;
        let mut shape = first.shape.clone();
        shape[axis] = 0;
        for part in parts {
            let mut other = part.shape.clone();
            let along = *other.get(axis).ok_or(Fault::Shape)?;
            other[axis] = shape[axis];
            if other != shape {
                return Err(Fault::Shape);
            }
            shape[axis] = shape[axis].checked_add(along).ok_or(Fault::Budget)?;
        }
        let mut data = Vec::with_capacity(budget.elements(&shape)?);
        let (before, _, _) = first.split(axis);
        for outer in 0..before {
            for part in parts {
                let (_, along, after) = part.split(axis);
                data.extend_from_slice(&part.data[outer * along * after..][..along * after]);
            }
        }
        Ok(Self { element: first.element, shape, data })
    }

    /// Sums along `axis`, which keeps length 1.
    pub(super) fn sum(&self, axis: usize, budget: &mut Budget) -> Result<Self, Fault> {
        let (before, along, after) = self.split(axis);
        let mut shape = self.shape.clone();
        shape[axis] = 1;
        let mut data = vec![0.0; budget.elements(&shape)?];
        for outer in 0..before {
            for i in 0..along {
                let from = &self.data[(outer * along + i) * after..][..after];
                let into = &mut data[outer * after..][..after];
                into.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(Self { element: self.element, shape, data }.rounded())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plenty() -> Budget {
        Budget { elements: 1000, steps: 1000 }
    }

    fn tensor(shape: &[usize], data: &[f64]) -> Tensor {
        Tensor::new(Element::Double, shape.to_vec(), data.to_vec()).unwrap()
    }

    #[test]
    fn shape_without_elements_is_refused_whatever_else_it_has() {
        let new = |shape: &[usize]| Tensor::new(Element::Double, shape.to_vec(), Vec::new());
        for shape in [&[0][..], &[1 << 62, 0], &[0, 1 << 62], &[0, 0], &[1 << 62, 0, 8]] {
            assert_eq!(new(shape), None, "{shape:?}");
        }
        let overflowing = [1 << 62, 4];
        assert_eq!(new(&overflowing), None);
        // None comes about by an operator either.
        let row = tensor(&[1, 3], &[1.0, 2.0, 3.0]);
        assert_eq!(row.select(1, &[], &mut plenty()), Err(Fault::Budget));
        assert_eq!(row.clone().reshaped(vec![1 << 62, 0]), Err(Fault::Shape));
    }

    #[test]
    fn broadcast_stretches_dimensions_of_one() {
        let column = tensor(&[2, 1], &[10.0, 20.0]);
        let row = tensor(&[3], &[1.0, 2.0, 3.0]);
        let sum = column.zip(&row, &mut plenty(), |a, b| a + b).unwrap();
        assert_eq!(sum, tensor(&[2, 3], &[11.0, 12.0, 13.0, 21.0, 22.0, 23.0]));
        let scalar = tensor(&[], &[1.0]);
        let less = row.zip(&scalar, &mut plenty(), |a, b| a - b).unwrap();
        assert_eq!(less, tensor(&[3], &[0.0, 1.0, 2.0]));
        let two = tensor(&[2], &[0.0; 2]);
        assert_eq!(row.zip(&two, &mut plenty(), |a, b| a + b), Err(Fault::Shape));
    }

    #[test]
    fn matmul_transpose_sum_select_and_concat_are_as_by_hand() {
        let m = tensor(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let t = m.transposed(&mut plenty()).unwrap();
        assert_eq!(t, tensor(&[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]));
        let product = m.matmul(&t, false, &mut plenty()).unwrap();
        assert_eq!(product, tensor(&[2, 2], &[14.0, 32.0, 32.0, 77.0]));
        assert_eq!(m.matmul(&m, true, &mut plenty()).unwrap(), product);
        assert_eq!(m.matmul(&m, false, &mut plenty()), Err(Fault::Shape));
        assert_eq!(m.sum(0, &mut plenty()).unwrap(), tensor(&[1, 3], &[5.0, 7.0, 9.0]));
        assert_eq!(m.sum(1, &mut plenty()).unwrap(), tensor(&[2, 1], &[6.0, 15.0]));
        let selected = m.select(1, &[-1.0, 0.0], &mut plenty()).unwrap();
        assert_eq!(selected, tensor(&[2, 2], &[3.0, 1.0, 6.0, 4.0]));
        assert_eq!(m.select(1, &[3.0], &mut plenty()), Err(Fault::Index));
        assert_eq!(m.select(1, &[f64::NAN], &mut plenty()), Err(Fault::Index));
        let both = Tensor::concat(&[&m, &selected], 1, &mut plenty()).unwrap();
        let expected = [1.0, 2.0, 3.0, 3.0, 1.0, 4.0, 5.0, 6.0, 6.0, 4.0];
        assert_eq!(both, tensor(&[2, 5], &expected));
        assert_eq!(Tensor::concat(&[&m, &t], 1, &mut plenty()), Err(Fault::Shape));
    }

    #[test]
    fn float_is_rounded_and_double_is_not() {
        let of = |element| Tensor::row(element, vec![0.1]).map(|x| x + 0.2).data()[0];
        assert_eq!(of(Element::Single), f64::from(0.3_f32));
        assert_eq!(of(Element::Double), 0.300_000_000_000_000_04);
        let cut = Tensor::row(Element::Double, vec![-1.7]).cast(Element::Int);
        assert_eq!(cut.data(), [-1.0]);
    }

    #[test]
    fn what_costs_more_than_its_budget_is_refused() {
        let wide = tensor(&[1, 600], &[1.0; 600]);
        let tall = tensor(&[600, 1], &[1.0; 600]);
        assert_eq!(wide.zip(&tall, &mut plenty(), |a, b| a + b), Err(Fault::Budget));
        let budget = &mut Budget { elements: 1000, steps: 599 };
        assert_eq!(wide.matmul(&tall, false, budget), Err(Fault::Budget));
        assert!(wide.matmul(&tall, false, &mut plenty()).is_ok());
        // A product that overflows.
        assert_eq!(count(&[usize::MAX, 2]), None);
        assert_eq!(Tensor::new(Element::Int, vec![2], vec![1.0]), None);
    }

    #[test]
    fn axes_count_from_either_end() {
        let m = tensor(&[2, 3], &[0.0; 6]);
        assert_eq!((m.axis(-1, 0), m.axis(1, 0)), (Ok(1), Ok(1)));
        assert_eq!((m.axis(2, 0), m.axis(-3, 0)), (Err(Fault::Index), Err(Fault::Index)));
        assert_eq!((m.axis(2, 1), m.axis(i64::MIN, 1)), (Ok(2), Err(Fault::Index)));
    }
}
