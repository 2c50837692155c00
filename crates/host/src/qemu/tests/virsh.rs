//! Monitor and agent through libvirt, with programs that play `virsh`.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use super::*;
use crate::interrupt::{Interrupt, Interrupted};
use crate::qemu::virsh::Virsh;
use crate::qemu::{Agent, Domain, ExecStatus, Monitor};

/// A `virsh` that writes its arguments to a file and then does as `script` says.
struct Played {
    directory: TempDir,
}

impl Played {
    fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("virsh");
        let log = directory.path().join("arguments");
        let text = format!("#!/bin/sh\nprintf '%s\\n' \"$@\" >>{}\n{script}\n", log.display());
        // By another process: a child of another test must not inherit the open
        // file, which could not be executed then.
        let mut writer = Command::new("sh");
        writer.args(["-c", "printf '%s' \"$1\" >\"$2\" && chmod 755 \"$2\"", "sh", &text]);
        assert!(writer.arg(&program).status().unwrap().success());
        Self { directory }
    }

    fn virsh(&self, domain: &str) -> Virsh {
        Virsh { program: self.directory.path().join("virsh"), ..Virsh::new(domain.into()) }
    }

    fn arguments(&self) -> Vec<String> {
        let text = fs::read_to_string(self.directory.path().join("arguments")).unwrap();
        text.lines().map(str::to_owned).collect()
    }
}

#[test]
fn monitor_is_asked_through_libvirt() {
    let played =
        Played::new(r#"echo '{"return":{"running":true,"status":"running"},"id":"libvirt-12"}'"#);
    let mut monitor = Monitor::through(played.virsh("plc"));
    assert!(monitor.status(ENOUGH).unwrap().running);
    let expected = [
        "--quiet",
        "--connect",
        "qemu:///system",
        "qemu-monitor-command",
        "--domain",
        "plc",
        r#"{"execute":"query-status","arguments":{}}"#,
    ];
    assert_eq!(played.arguments(), expected);
}

#[test]
fn agent_is_asked_through_libvirt() {
    let played = Played::new(r#"echo '{"return":{"exited":false}}'"#);
    let mut agent = Agent::through(played.virsh("plc"));
    assert_eq!(agent.exec_status(1, SHORT * 10).unwrap(), ExecStatus::Running);
    let arguments = played.arguments();
    assert_eq!(arguments[3], "qemu-agent-command");
    assert_eq!(arguments[6..8], ["--timeout", "2"]);
    assert_eq!(arguments[8], r#"{"execute":"guest-exec-status","arguments":{"pid":1}}"#);
}

/// A terminal's signal goes to all of a process group: what puts settings back through libvirt is to go on.
#[test]
fn virsh_has_a_process_group_of_its_own() {
    let played = Played::new(
        r#"[ "$(cut -d' ' -f5 /proc/$$/stat)" = $$ ] && echo '{"return":{"exited":false}}'"#,
    );
    let mut agent = Agent::through(played.virsh("plc"));
    assert_eq!(agent.exec_status(1, SHORT * 10).unwrap(), ExecStatus::Running);
}

#[test]
fn domain_name_is_never_an_option() {
    let played = Played::new("echo '{}'");
    let mut monitor = Monitor::through(played.virsh("--help"));
    let error = monitor.status(ENOUGH).unwrap_err();
    assert!(error.to_string().starts_with(r#"libvirt domain "--help": query-status"#), "{error}");
    // virsh takes whatever follows `--domain` as its value.
    assert_eq!(played.arguments()[4..6], ["--domain", "--help"]);
    let nul = Monitor::through(played.virsh("a\0b")).status(ENOUGH).unwrap_err();
    assert!(matches!(nul.fault, Fault::Connect(_)), "{nul}");
}

#[test]
fn domain_is_asked_for_by_its_uuid() {
    let uuid = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
    let played = Played::new(r#"echo '{"return":{"running":true,"status":"running"}}'"#);
    let domain = Domain { name: "7".to_owned(), uuid: Some(uuid.to_owned()) };
    let by_uuid = Virsh { domain, ..played.virsh("") };
    assert!(Monitor::through(by_uuid).status(ENOUGH).unwrap().running);
    assert_eq!(played.arguments()[4..6], ["--domain", uuid]);
    // Without one, virsh would be asked for the domain with the id 7.
    let played = Played::new("echo '{}'");
    for error in [
        Monitor::through(played.virsh("7")).status(ENOUGH).unwrap_err(),
        Agent::through(played.virsh("7")).time(ENOUGH).unwrap_err(),
    ] {
        assert!(matches!(error.fault, Fault::NumericName), "{error}");
        assert!(error.to_string().starts_with(r#"libvirt domain "7": "#), "{error}");
    }
    assert!(!played.directory.path().join("arguments").exists(), "it was not run");
}

#[test]
fn refusal_of_the_agent_is_told_apart_from_virshs_own() {
    // As libvirt 9 passes them on.
    let fault = |said: &str| {
        let command = "error: internal error: unable to execute QEMU agent command";
        let played = Played::new(&format!("echo \"{command} 'guest-exec': {said}\" >&2; exit 1"));
        let mut agent = Agent::through(played.virsh("plc"));
        agent.exec("/bin/true", &[], ENOUGH).unwrap_err().fault
    };
    let disabled = fault("Command guest-exec has been disabled: the command is not allowed");
    assert!(matches!(disabled, Fault::Disabled { .. }), "{disabled:?}");
    let Fault::Refused { description, .. } = fault("failed to flush file: Invalid argument") else {
        panic!()
    };
    assert_eq!(description, "failed to flush file: Invalid argument");
}

#[test]
fn missing_domain_and_missing_virsh_are_faults() {
    let played = Played::new(
        "echo \"error: failed to get domain 'plc'\" >&2; \
         echo \"error: Domain not found: no domain with matching name 'plc'\" >&2; exit 1",
    );
    let error = Monitor::through(played.virsh("plc")).status(ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Virsh { ref message } if message.contains("not found")));
    assert!(error.hint().unwrap().contains("list --all"));
    // As libvirt 11 says it while the guest boots.
    let not_connected = "error: Guest agent is not responding: QEMU guest agent is not connected";
    let played = Played::new(&format!("echo '{not_connected}' >&2; exit 1"));
    let error = Agent::through(played.virsh("plc")).time(ENOUGH).unwrap_err();
    assert!(error.hint().unwrap().contains("org.qemu.guest_agent.0"));
    let absent = Virsh { program: "/nonexistent/virsh".into(), ..Virsh::new("plc".into()) };
    let error = Monitor::through(absent).status(ENOUGH).unwrap_err();
    assert!(error.hint().unwrap().contains("install virsh"));
}

#[test]
fn virsh_that_hangs_is_killed() {
    let played = Played::new("echo $$ >>\"$0.pid\"; exec sleep 600");
    let mut monitor = Monitor::through(played.virsh("plc"));
    late(|timeout| monitor.status(timeout));
    // It closes its output and stays.
    let stays = Played::new("echo $$ >>\"$0.pid\"; exec sleep 600 >&- 2>&-");
    let mut monitor = Monitor::through(stays.virsh("plc"));
    late(|timeout| monitor.status(timeout));
    for directory in [played.directory, stays.directory] {
        let pid = fs::read_to_string(directory.path().join("virsh.pid")).unwrap();
        assert!(!fs::exists(format!("/proc/{}", pid.trim())).unwrap(), "{pid} lives");
    }
}

#[test]
fn virsh_is_killed_by_the_users_signal() {
    let played = Played::new("echo $$ >>\"$0.pid\"; exec sleep 600");
    let interrupted = Arc::new(Interrupted::new(false));
    let interrupt = Interrupt::new(Some(Arc::clone(&interrupted)), Duration::ZERO);
    let mut monitor = Monitor::through(played.virsh("plc").until(&interrupt));
    let file = played.directory.path().join("virsh.pid");
    let pid = || fs::read_to_string(&file).unwrap_or_default();
    let start = Instant::now();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            while !pid().ends_with('\n') && start.elapsed() < ENOUGH / 2 {
                thread::sleep(Duration::from_millis(5));
            }
            interrupted.store(true, Ordering::Relaxed);
        });
        monitor.status(ENOUGH).unwrap_err()
    });
    assert!(matches!(error.fault, Fault::Interrupted), "{error}");
    assert!(start.elapsed() < ENOUGH, "{:?}", start.elapsed());
    let pid = pid();
    assert!(!fs::exists(format!("/proc/{}", pid.trim())).unwrap(), "{pid} lives");
    // None is started after it.
    let error = monitor.status(ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Interrupted), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), pid);
}

#[test]
fn endless_output_is_refused() {
    let played = Played::new("exec cat /dev/zero");
    let error = Monitor::through(played.virsh("plc")).status(ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::TooLong { .. }), "{error}");
}

#[test]
fn file_is_closed_through_libvirt_after_the_deadline() {
    let played = Played::new(
        "case \"$*\" in\n\
         *guest-file-open*) echo '{\"return\":7}';;\n\
         *guest-file-write*) exec sleep 600;;\n\
         *) echo '{\"return\":{}}';;\nesac",
    );
    let mut agent = Agent::through(played.virsh("plc"));
    // Closing has a deadline of its own.
    let error = keeps_deadline(|| agent.write_file("/sys/knob", "1", SHORT)).unwrap_err();
    assert!(matches!(error.fault, Fault::Late { timeout: SHORT }), "{error}");
    assert!(played.arguments().last().unwrap().contains("guest-file-close"));
}
