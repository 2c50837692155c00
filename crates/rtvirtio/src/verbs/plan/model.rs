//! `plan --model`: which model predicts, and where its file is.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use rtvirtio_model::learned::Learned;
use rtvirtio_planner::Model;
use rtvirtio_spec::profile::Profile;

use crate::input;

/// What `--model` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ModelChoice {
    Structural,
    Analytical,
    /// The learned model of each device's profile.
    Mlp,
    /// One file for all devices.
    File(PathBuf),
}

impl FromStr for ModelChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = Path::new(text);
        match text {
            "structural" => Ok(Self::Structural),
            "analytical" => Ok(Self::Analytical),
            "mlp" => Ok(Self::Mlp),
            _ if path.extension().is_some_and(|e| e == "onnx") => Ok(Self::File(path.to_owned())),
            _ => Err("neither structural, analytical or mlp nor a file that ends in .onnx"),
        }
    }
}

impl ModelChoice {
    /// The model in the file that it names, if it names one.
    pub(super) fn file(&self) -> Result<Option<Learned>> {
        match self {
            Self::File(path) => Ok(Some(input::learned(path)?)),
            _ => Ok(None),
        }
    }

    pub(super) fn of<'a>(&self, learned: Option<&'a Learned>) -> Model<'a> {
        match (self, learned) {
            (_, Some(learned)) => Model::Learned(learned),
            (Self::Analytical, None) => Model::Analytical,
            // On a device without the kernel path no model is asked.
            (_, None) => Model::Structural,
        }
    }
}

/// The learned model of a profile: the file that it names, or one of its own name beside it.
pub(super) fn of_profile(path: &Path, profile: &Profile) -> Result<Learned> {
    let beside = path.with_extension("onnx");
    let file = match &profile.learned {
        Some(named) => path.parent().unwrap_or(Path::new(".")).join(named),
        None if beside.exists() => beside,
        None => bail!(
            "the profile {} has no learned model: neither does it name one nor is there {} (train \
             one, docs/learned-models.md, or name a file: --model FILE.onnx)",
            path.display(),
            beside.display()
        ),
    };
    let learned = input::learned(&file)?;
    let trained = learned.description().map(|d| &d.device);
    ensure!(
        trained.is_none_or(|device| *device == profile.device),
        "{}: trained on another device than that of the profile {} (train one on this device, or \
         let it fall back where it must: --model {})",
        file.display(),
        path.display(),
        file.display()
    );
    Ok(learned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_is_named_or_a_file() {
        let of = str::parse::<ModelChoice>;
        assert_eq!(of("structural"), Ok(ModelChoice::Structural));
        assert_eq!(of("analytical"), Ok(ModelChoice::Analytical));
        assert_eq!(of("mlp"), Ok(ModelChoice::Mlp));
        assert_eq!(of("m/a.onnx"), Ok(ModelChoice::File("m/a.onnx".into())));
        assert!(of("linear").is_err());
        assert!(of(".onnx").is_err());
    }
}
