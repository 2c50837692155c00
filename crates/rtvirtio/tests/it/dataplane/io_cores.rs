//! IOThreads that come and go with the load, under the verifier.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rtvirtio_engine::testing::{has_io_uring, skipped};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::scratch_disk::{RTVIRTIO, eventually, lab};

/// Long enough for a policy on a busy machine.
const ENOUGH: Duration = Duration::from_secs(30);

/// A server of one disk of 4 queues on one IOThread; each request costs 100 µs of CPU time.
struct Served {
    directory: tempfile::TempDir,
    server: Child,
}

impl Served {
    /// None, and the test is skipped, where its IOThreads get no rings.
    fn start(iocores: &str) -> Option<Self> {
        if !has_io_uring() {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let text = format!(
            "version = 1\n[control]\nsocket = \"{}\"\n[iocores]\n{iocores}\n\
             [[iothread]]\nname = \"iot0\"\n\
             [[device]]\nname = \"a\"\nvm = \"a\"\nsocket = \"{}\"\nqueues = 4\n\
             engine = {{ type = \"ram\", size = \"64M\", cpu_us = 100 }}\n",
            path("control.sock"),
            path("a.sock"),
        );
        std::fs::write(path("serve.toml"), text).unwrap();
        let mut server = Command::new("setpriv");
        server.args(["--pdeathsig", "KILL", RTVIRTIO, "serve", &path("serve.toml")]);
        let server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let served = Self { server, directory };
        eventually("the control socket", ENOUGH, || served.path("control.sock").exists());
        Some(served)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    fn ctl(&self, arguments: &[&str]) -> Value {
        let mut command = Command::new(RTVIRTIO);
        command.arg("ctl").arg("--socket").arg(self.path("control.sock")).args(arguments);
        let output = command.arg("--json").output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// Numbers of the decisions of this kind that were carried out.
    fn done(&self, kind: &str) -> Vec<u64> {
        let decisions = self.ctl(&["decisions"]);
        let all = decisions.as_array().unwrap().iter();
        let done = all.filter(|d| d["action"]["kind"] == kind && d["outcome"] == "done");
        done.map(|decision| decision["number"].as_u64().unwrap()).collect()
    }

    /// The verifier on all four queues.
    fn verify(&self, seconds: &str) -> Child {
        let mut verify = Command::new(lab());
        verify.args(["bench", "dataplane", "verify", "--seconds", seconds, "--mebibytes", "1"]);
        verify.args(["--depth", "8", "--queues", "4", "--socket"]).arg(self.path("a.sock"));
        verify.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn iothreads(&self) -> usize {
        self.ctl(&["iothread", "list"]).as_array().unwrap().len()
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.server), Signal::TERM).unwrap();
        assert!(self.server.wait().unwrap().success());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// The verifier found every completion and every byte.
fn succeeds(verify: Child) {
    let output = verify.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Two CPUs of this process.
fn two_cpus() -> Option<[usize; 2]> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let mut cpus = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    let two = cpus.next().zip(cpus.next());
    if two.is_none() {
        skipped("there is one CPU");
    }
    two.map(Into::into)
}

#[test]
fn load_adds_an_iothread_and_its_end_removes_it() {
    let Some([first, second]) = two_cpus() else { return };
    let policy = format!("policy = \"dynamic\"\ncpus = [{first}, {second}]\n");
    let Some(served) = Served::start(&policy) else { return };
    assert_eq!(served.iothreads(), 1);
    let verify = served.verify("8");
    eventually("a further IOThread", ENOUGH, || !served.done("add_iothread").is_empty());
    succeeds(verify);
    let added = served.done("add_iothread")[0];
    let last_removed = || served.done("remove_iothread").last().copied();
    let is_one = || served.iothreads() == 1 && last_removed() > Some(added);
    eventually("the end of that IOThread", ENOUGH, is_one);
    let state = served.ctl(&["policy"]);
    assert_eq!((&state["policy"], &state["running"]), (&"dynamic".into(), &true.into()));
    // All queues are where the IOThread is that is left.
    let mapping = served.ctl(&["mapping", "get", "a"]);
    assert_eq!(mapping.as_array().unwrap().len(), 1, "{mapping}");
    // Its effect was measured, and it says why.
    let measured = || served.ctl(&["decisions"])[0]["after"]["iops"].as_f64().is_some();
    eventually("the effect of the first decision", ENOUGH, measured);
    let decision = &served.ctl(&["decisions"])[0];
    assert!(decision["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{decision}");
    served.end();
}

#[test]
fn policies_change_while_the_verifier_runs_and_static_leaves_all_where_it_is() {
    let Some(cpus) = two_cpus() else { return };
    let Some(served) = Served::start("") else { return };
    served.ctl(&["iothread", "create", "iot1"]);
    let verify = served.verify("4");
    assert_eq!(served.ctl(&["policy"])["running"], false);
    let spread = || served.ctl(&["mapping", "get", "a"]).as_array().unwrap().len() == 2;
    assert!(!spread());
    served.ctl(&["policy", "round-robin"]);
    eventually("queues on both IOThreads", ENOUGH, spread);
    let cpus = format!("{},{}", cpus[0], cpus[1]);
    for policy in ["iocm", "spdk", "advise", "dynamic", "round-robin"] {
        let state = served.ctl(&["policy", policy, "--cpus", &cpus, "--min-iothreads", "2"]);
        assert_eq!((&state["policy"], &state["running"]), (&policy.into(), &true.into()));
        std::thread::sleep(Duration::from_millis(100));
    }
    let state = served.ctl(&["policy", "static"]);
    assert_eq!((&state["policy"], &state["running"]), (&"static".into(), &false.into()));
    let last = state["last_decision"].clone();
    // The operator's word is the last.
    for queue in ["0", "1", "2", "3"] {
        served.ctl(&["mapping", "move", "a", queue, "iot1"]);
    }
    succeeds(verify);
    assert!(!spread());
    assert_eq!(served.ctl(&["policy"])["last_decision"], last);
    served.end();
}

/// Where a thread may run.
fn cpus_of(thread: Pid) -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(Some(thread)).unwrap();
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// A VM, as the data plane sees it: a process with a vCPU that is connected to its disk.
struct Vm {
    vcpu: Pid,
    _disk: UnixStream,
    _stop: mpsc::Sender<()>,
}

impl Vm {
    fn connect(socket: &Path) -> Self {
        let (tell, told) = mpsc::channel();
        let (_stop, stopped) = mpsc::channel::<()>();
        let vcpu = std::thread::Builder::new().name("CPU 0/KVM".to_owned());
        vcpu.spawn(move || {
            tell.send(rustix::thread::gettid()).unwrap();
            let _ = stopped.recv();
        })
        .unwrap();
        Self { vcpu: told.recv().unwrap(), _disk: UnixStream::connect(socket).unwrap(), _stop }
    }

    fn runs_on(&self, cpus: &[usize]) {
        eventually(&format!("a vCPU on {cpus:?}"), ENOUGH, || cpus_of(self.vcpu) == cpus);
    }
}

/// All ways in which a data plane that has borrowed a CPU can end, or end borrowing.
#[test]
fn borrowed_cpu_is_given_back_however_it_ends() {
    let Some([first, second]) = two_cpus() else { return };
    let all = cpus_of(rustix::thread::gettid());
    let left: Vec<usize> = all.iter().copied().filter(|&cpu| cpu != second).collect();
    // The IOThread that there is has no CPU of its own; of those that may be added on CPUs of the vCPUs,
    // the second comes at once.
    let settings = format!("cpus = [{second}, {first}]\nborrow = true\n");
    for end in ["static", "term", "kill"] {
        let Some(mut served) = Served::start(&settings) else { return };
        let vm = Vm::connect(&served.path("a.sock"));
        assert_eq!(cpus_of(vm.vcpu), all);
        let connected = || served.ctl(&["device", "list"])[0]["connected"] == true;
        eventually("the front end", ENOUGH, connected);
        served.ctl(&["policy", "dynamic", "--min-iothreads", "2"]);
        vm.runs_on(&left);
        let decisions = served.ctl(&["decisions"]);
        let is_set = |d: &Value| d["action"]["kind"] == "set_vcpu_cpus" && d["outcome"] == "done";
        assert!(decisions.as_array().unwrap().iter().any(is_set), "{decisions}");
        match end {
            "static" => assert_eq!(served.ctl(&["policy", "static"])["running"], false),
            "term" => kill_process(Pid::from_child(&served.server), Signal::TERM).unwrap(),
            _ => served.server.kill().unwrap(),
        }
        vm.runs_on(&all);
    }
}

#[test]
fn policy_borrows_only_with_a_guard_that_was_started_with_the_data_plane() {
    let Some(served) = Served::start("cpus = [0]\n") else { return };
    let mut ctl = Command::new(RTVIRTIO);
    ctl.arg("ctl").arg("--socket").arg(served.path("control.sock"));
    let output = ctl.args(["policy", "dynamic", "--borrow", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("CPUs cannot be borrowed"), "{said}");
    assert!(said.contains("hint: write borrow = true under [iocores]"), "{said}");
    assert_eq!(served.ctl(&["policy"])["policy"], "static");
    served.end();
}
