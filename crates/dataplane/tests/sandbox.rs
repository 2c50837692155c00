//! The sandbox, on real processes: this test's program starts itself again, confines itself and
//! does one thing.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};

use rtvirtio_dataplane::{sandbox, vcpus};

/// Names what the child does.
const DEED: &str = "RTVIRTIO_SANDBOX_DEED";

/// Where it may make files.
const DIRECTORY: &str = "RTVIRTIO_SANDBOX_DIRECTORY";
/// How it ends if it lives.
const LIVED: i32 = 42;

type Deed = (&'static str, fn());

/// None of these may be survived.
const FORBIDDEN: &[Deed] = &[
    ("fork", || {
        // SAFETY: the child, if there were one, would leave at once.
        if unsafe { libc::fork() } == 0 {
            std::process::exit(0);
        }
    }),
    ("execve", || {
        let (path, end) = (c"/bin/true", std::ptr::null());
        let arguments = [path.as_ptr(), end];
        // SAFETY: a path and a list that ends in null.
        let _ = unsafe { libc::execv(path.as_ptr(), arguments.as_ptr()) };
    }),
    ("network socket", || {
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0) };
    }),
    ("netlink socket", || {
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0) };
    }),
    ("ptrace", || {
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
    }),
    ("executable memory", || _ = map(libc::PROT_READ | libc::PROT_EXEC)),
    ("memory made executable", || {
        let page = map(libc::PROT_READ);
        // SAFETY: the page is this function's own, and nothing is in it.
        let _ = unsafe { libc::mprotect(page, 4096, libc::PROT_EXEC) };
    }),
    ("terminal's ioctl", || {
        // SAFETY: TIOCSTI reads the byte that it gets.
        let _ = unsafe { libc::ioctl(0, libc::TIOCSTI, c"x".as_ptr()) };
    }),
    ("signal to another process", || {
        // SAFETY: no memory is involved; signal 0 does nothing.
        let _ = unsafe { libc::kill(1, 0) };
    }),
    ("user's name space", || {
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
    }),
    ("higher limit", || {
        let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        // SAFETY: the limit outlives the call.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }),
    ("another user", || {
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::syscall(libc::SYS_setresuid, 0, 0, 0) };
    }),
    ("forbidden call of a thread", || {
        let thread = std::thread::spawn(|| {
            // SAFETY: no memory is involved.
            let _ = unsafe { libc::personality(0xffff_ffff) };
        });
        let _ = thread.join();
    }),
];

/// What a data plane does.
const ALLOWED: &[Deed] = &[
    ("thread", || {
        let thread = std::thread::Builder::new().name("named".to_owned());
        assert_eq!(thread.spawn(|| 7).unwrap().join().unwrap(), 7);
    }),
    ("io_uring", || {
        let mut ring = io_uring::IoUring::new(8).unwrap();
        // SAFETY: a request without memory.
        unsafe { ring.submission().push(&io_uring::opcode::Nop::new().build()).unwrap() };
        assert_eq!(ring.submit_and_wait(1).unwrap(), 1);
    }),
    ("unix socket", || {
        let directory = std::env::var_os(DIRECTORY).unwrap();
        let path = std::path::Path::new(&directory).join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut one = UnixStream::connect(&path).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        one.write_all(b"x").unwrap();
        let mut byte = [0];
        other.read_exact(&mut byte).unwrap();
        std::fs::remove_file(path).unwrap();
    }),
    ("memory", || {
        let page = map(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: the page is this function's own.
        assert_eq!(unsafe { libc::munmap(page, 4096) }, 0);
    }),
    ("reading of a file", || {
        assert!(std::fs::read_to_string("/proc/self/status").unwrap().contains("Seccomp:\t2"));
    }),
    ("threads and their times", || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let times = tasks.flatten().map(|task| std::fs::read(task.path().join("schedstat")));
        assert!(times.count() > 0);
        rustix::thread::sched_getaffinity(None).unwrap();
    }),
    ("panic", || {
        assert!(std::panic::catch_unwind(|| panic!("caught")).is_err());
    }),
];

/// What the guard of vCPUs may not do, beside all that a data plane may not.
const FORBIDDEN_TO_GUARD: &[Deed] = &[
    ("file to write", || _ = std::fs::OpenOptions::new().write(true).open("/dev/null")),
    ("guard's thread", || _ = std::thread::Builder::new().spawn(|| ())),
    ("guard's socket", || _ = UnixStream::pair()),
];

/// A page; null where the kernel gives none.
fn map(protection: i32) -> *mut libc::c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) }
}

/// What a child is: confined, one deed, gone.
#[test]
#[ignore = "ends the process: the other tests start it"]
fn child() {
    let wanted = std::env::var(DEED).expect("started by another test");
    let (of_guard, name) = match wanted.strip_prefix("guard: ") {
        Some(name) => (true, name),
        None => (false, &wanted[..]),
    };
    let all = FORBIDDEN.iter().chain(ALLOWED).chain(FORBIDDEN_TO_GUARD);
    let (_, deed) = all.clone().find(|(of, _)| *of == name).expect("a deed");
    rustix::process::setrlimit(
        rustix::process::Resource::Core,
        rustix::process::Rlimit { current: Some(0), maximum: Some(0) },
    )
    .unwrap();
    if of_guard {
        sandbox::confine_guard().unwrap();
    } else {
        sandbox::confine().unwrap();
    }
    deed();
    std::process::exit(LIVED);
}

/// A guard with a vCPU that is its own thread: confined, asked twice, gone.
#[test]
#[ignore = "ends the process: another test starts it"]
fn guard_child() {
    let (mut one, other) = UnixStream::pair().unwrap();
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    let cpus: Vec<usize> = cpus.collect();
    let (cpu, process) = (cpus[0], std::process::id());
    for asked in [format!("[{cpu}],\"processes\":[{process}]"), "[],\"processes\":[]".to_owned()] {
        one.write_all(format!("{{\"cpus\":{asked}}}\n").as_bytes()).unwrap();
    }
    one.shutdown(std::net::Shutdown::Write).unwrap();
    rustix::thread::set_name(c"vcpu0").unwrap();
    sandbox::confine_guard().unwrap();
    vcpus::guard(other).unwrap();
    let mut said = String::new();
    one.read_to_string(&mut said).unwrap();
    assert!(!said.contains("error"), "{said}");
    let moved = said.matches("\"changed\":1").count();
    assert_eq!(moved, if cpus.len() > 1 { 2 } else { 0 }, "{said}");
    std::process::exit(LIVED);
}

/// How a child ended: a signal, or a code.
fn end_of(deed: &str) -> (Option<i32>, Option<i32>, String) {
    end_of_child("child", deed)
}

fn end_of_child(child: &str, deed: &str) -> (Option<i32>, Option<i32>, String) {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", child, "--ignored", "--nocapture"]);
    command
        .env(DEED, deed)
        .env(DIRECTORY, directory.path())
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.signal(), output.status.code(), said)
}

#[test]
fn forbidden_system_call_ends_the_process() {
    for (deed, _) in FORBIDDEN {
        let (signal, code, said) = end_of(deed);
        assert_eq!((signal, code), (Some(libc::SIGSYS), None), "{deed}: {said}");
    }
}

#[test]
fn allowed_system_calls_pass() {
    for (deed, _) in ALLOWED {
        if *deed == "io_uring" && !rtvirtio_engine::testing::has_io_uring() {
            continue;
        }
        let (signal, code, said) = end_of(deed);
        assert_eq!((signal, code), (None, Some(LIVED)), "{deed}: {said}");
    }
}

#[test]
fn guard_may_move_vcpus_and_little_else() {
    let (signal, code, said) = end_of_child("guard_child", "");
    assert_eq!((signal, code), (None, Some(LIVED)), "{said}");
    for (deed, _) in FORBIDDEN.iter().chain(FORBIDDEN_TO_GUARD) {
        let (signal, code, said) = end_of(&format!("guard: {deed}"));
        assert_eq!((signal, code), (Some(libc::SIGSYS), None), "{deed}: {said}");
    }
}

#[test]
fn write_beyond_the_limit_on_files_is_an_error_and_not_the_end() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use std::os::unix::fs::FileExt as _;
    // No other test's file comes near.
    const LIMIT: u64 = 8 << 40;
    let file = tempfile::tempfile().unwrap();
    sandbox::raise_limits(false);
    let before = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), ..before }).unwrap();
    let error = file.write_at(b"x", LIMIT).unwrap_err();
    setrlimit(Resource::Fsize, before).unwrap();
    assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
}
