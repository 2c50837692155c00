//! Threads without which the process is of no use to anybody.

use std::io::Write as _;

/// Ends the process at once if the thread that has it panics.
///
/// A thread of the data path that has panicked leaves queues that nobody serves in a process that looks
/// healthy: front ends would wait for ever. When the process ends they reconnect, and its successor
/// does again what was in flight.
#[derive(Debug)]
pub struct AbortOnPanic(());

impl AbortOnPanic {
    /// For the thread that calls this, as long as it keeps the value.
    #[must_use = "it holds as long as it is kept"]
    pub const fn new() -> Self {
        Self(())
    }
}

impl Default for AbortOnPanic {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("?");
            let mut out = std::io::stderr();
            let _ =
                writeln!(out, "thread {name} of the data path has panicked: ending the process");
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "RTVIRTIO_TEST_PANICS";

    #[test]
    fn panic_of_a_thread_of_the_data_path_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            let thread = std::thread::Builder::new().name("iot0".to_owned());
            let thread = thread.spawn(|| {
                let _fatal = AbortOnPanic::new();
                let nothing: &[u8] = &[];
                assert_eq!(nothing.first(), Some(&1), "a bug");
            });
            let _ = thread.unwrap().join();
            // Without it the process would live on and pass.
            return;
        }
        let test = "fatal::tests::panic_of_a_thread_of_the_data_path_ends_the_process";
        let output = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{said}");
        assert!(said.contains("thread iot0 of the data path has panicked"), "{said}");
    }

    #[test]
    fn thread_that_ends_without_a_panic_ends_alone() {
        std::thread::spawn(|| drop(AbortOnPanic::new())).join().unwrap();
    }
}
