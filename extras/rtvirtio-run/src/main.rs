//! The `rtvirtio-run` binary.
//!
//! Exit codes: the program's; 127 if it is not found, 126 if it cannot be run; 1 if there is something wrong before
//! it is tried.

// Its macros take the place of the standard library's, which panic where they cannot print.
#[macro_use]
extern crate rtvirtio_cli;

mod run;

use std::process::ExitCode;

fn main() -> ExitCode {
    rtvirtio_cli::main::<run::Args>()
}
