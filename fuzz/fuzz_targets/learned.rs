//! Any bytes as a learned model: no panic, errors of one line with a hint, and what is taken answers
//! with a latency or the reason why it has none.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rtvirtio_model::features::FEATURES;
use rtvirtio_model::learned::Learned;
use rtvirtio_units::Nanos;

fuzz_target!(|data: &[u8]| {
    match Learned::from_bytes(data) {
        Ok(model) => {
            for value in [0.0, 1.0, 1e9] {
                if let Ok(said) = model.predict(&[value; FEATURES.len()]) {
                    let longest = Nanos::from_millis(3_600_000);
                    assert!([said.tail, said.high].iter().all(|&t| t > Nanos::ZERO && t <= longest));
                }
            }
        }
        Err(error) => {
            assert!(!error.to_string().contains(char::is_control), "{error}");
            assert!(!error.hint().is_empty());
        }
    }
});
