//! Targets as an operator types them.

use std::str::FromStr;

use rtvirtio_units::{Nanos, Percentile};

/// A target as it is typed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Wish {
    pub(crate) vm: String,
    pub(crate) disk: Option<String>,
    pub(crate) percentile: Percentile,
    pub(crate) latency: Nanos,
}

impl FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = || format!("{text:?} is not VM[/DISK]=pPERCENTILE:TIME, such as db=p99.9:5ms");
        let (name, target) = text.split_once('=').ok_or_else(form)?;
        let (vm, disk) = match name.split_once('/') {
            Some((vm, disk)) => (vm, Some(disk.to_owned())),
            None => (name, None),
        };
        let (percentile, latency) = goal(target)?.ok_or_else(form)?;
        if vm.is_empty() {
            return Err(form());
        }
        Ok(Self { vm: vm.to_owned(), disk, percentile, latency })
    }
}

/// What is behind the name: `p99.9:5ms`; `None`: it has another form.
pub(crate) fn goal(text: &str) -> Result<Option<(Percentile, Nanos)>, String> {
    let form = text.strip_prefix('p').and_then(|t| t.split_once(':'));
    let Some((percentile, time)) = form else { return Ok(None) };
    let Ok(percentile) = percentile.parse::<f64>() else { return Ok(None) };
    let percentile = Percentile::new(percentile).map_err(|e| format!("{text:?}: {e}"))?;
    let latency = duration(time)
        .ok_or_else(|| format!("{text:?}: {time:?} is no time (write 800us, 5ms or 0.5s)"))?;
    Ok(Some((percentile, latency)))
}

/// A time with its unit; `None`: it is none, or nothing takes so long.
fn duration(text: &str) -> Option<Nanos> {
    let units = [("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    let (number, unit) =
        units.iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, unit)))?;
    let seconds: f64 = number.trim().parse::<f64>().ok()? * unit;
    let is_time = seconds.is_finite() && seconds <= 3600.0;
    // Less than half a nanosecond is none, and negative times are none either.
    is_time.then(|| Nanos::from_secs_f64(seconds)).filter(|time| *time > Nanos::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(text: &str) -> Result<Wish, String> {
        text.parse()
    }

    #[test]
    fn target_is_read_as_it_is_typed() {
        let found = wish("db/vdb=p99.9:5ms").unwrap();
        assert_eq!((found.vm.as_str(), found.disk.as_deref()), ("db", Some("vdb")));
        assert_eq!((found.percentile.get(), found.latency), (99.9, Nanos::from_millis(5)));
        assert_eq!(wish("db=p99:800us").unwrap().latency, Nanos::from_micros(800));
        assert_eq!(wish("db=p50:0.5s").unwrap().latency, Nanos::from_millis(500));
        for bad in [
            "db",
            "db=",
            "=p99:5ms",
            "db=99:5ms",
            "db=p99",
            "db=p99:5",
            "db=p99:-5ms",
            "db=p101:5ms",
            "db=p99:0ms",
            "db=p99:0.0001us",
            "db=p99:nanms",
            "db=p99:9e99s",
        ] {
            assert!(wish(bad).is_err(), "{bad}");
        }
    }
}
