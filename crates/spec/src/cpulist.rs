//! Lists of CPUs, as the kernel writes them (`Documentation/admin-guide/cputopology.rst`).

use rtvirtio_units::CpuId;

use crate::serve::MAX_CPU;

/// The CPUs of `0,2-3`, in order and each once; `any`: none.
///
/// # Errors
/// What to write, if it is no such list or has a CPU above [`MAX_CPU`].
pub fn parse(text: &str) -> Result<Vec<CpuId>, String> {
    if text == "any" {
        return Ok(Vec::new());
    }
    // `parse` alone would take a sign.
    let is_digits = |text: &&str| text.bytes().all(|b| b.is_ascii_digit());
    let number = |text| {
        let digits = Some(text).filter(is_digits)?;
        digits.parse().ok().filter(|cpu| *cpu <= MAX_CPU)
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = number(first).zip(number(last)).filter(|(first, last)| first <= last);
        let Some((first, last)) = range else {
            return Err(format!("write CPUs from 0 to {MAX_CPU} as 0,2-3, or `any`"));
        };
        cpus.extend((first..=last).map(CpuId::new));
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_numbers_and_ranges_or_any() {
        let read = |text: &str| {
            parse(text).ok().map(|cpus| cpus.iter().map(|cpu| cpu.get()).collect::<Vec<_>>())
        };
        assert_eq!(read("any"), Some(vec![]));
        assert_eq!(read("4,0-2,1"), Some(vec![0, 1, 2, 4]));
        for wrong in ["", "-", "1-", "2-1", "a", "1024", "0-4294967295", "1,,2", "+1", "0-+1"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
