//! Between Python's values and the crates' types.

use std::error::Error;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pythonize::Depythonizer;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value of Python as the type that it is to be; else a `ValueError` with the field's path.
pub(crate) fn from_python<T: DeserializeOwned>(value: &Bound<'_, PyAny>) -> PyResult<T> {
    serde_path_to_error::deserialize(&mut Depythonizer::from_object(value)).map_err(|e| {
        let path = e.path().to_string();
        let wrong = e.into_inner();
        PyValueError::new_err(format!("{path}: {wrong}"))
    })
}

/// A value as Python's dicts, lists and numbers.
pub(crate) fn to_python<'py, T: Serialize>(
    py: Python<'py>,
    value: &T,
) -> PyResult<Bound<'py, PyAny>> {
    Ok(pythonize::pythonize(py, value)?)
}

/// A crate's error as a `ValueError`, with its causes.
pub(crate) fn refused(error: impl Error) -> PyErr {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    PyValueError::new_err(text)
}
