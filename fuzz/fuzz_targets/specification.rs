//! Any bytes as a specification: no panic, errors with a place and a hint, and
//! what parses is written and read back as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rtvirtio_spec::specification::{parse, to_toml};

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match parse("spec.toml", text) {
        Ok(specification) => {
            let written = to_toml(&specification);
            match parse("written.toml", &written) {
                Ok(again) => assert_eq!(again, specification, "{written}"),
                Err(error) => panic!("{error}\n{written}"),
            }
        }
        Err(error) => {
            assert!(error.line >= 1 && error.column >= 1);
            assert!(!error.to_string().contains('\n'));
            assert!(!error.hint().is_empty());
        }
    }
});
