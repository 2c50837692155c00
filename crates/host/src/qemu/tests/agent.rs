//! [`Agent`] over a socket.

use std::sync::{Arc, Mutex, mpsc};

use super::*;
use crate::interrupt::{Interrupt, Interrupted};
use crate::qemu::{Address, Agent, ExecStatus, GuestDisk, PciAddress};

/// A command's answer; `None`: the agent says nothing.
type Answer = Option<Value>;

/// The commands that an agent was given, in order, without its syncs.
type Log = Arc<Mutex<Vec<(String, Value)>>>;

/// An agent that syncs as `qemu-ga` does and gives every other command to `answer`.
fn serve(answer: impl FnMut(&str, &Value) -> Answer + Send + 'static) -> (Place, Log) {
    serve_after(Vec::new(), answer)
}

/// The same, which begins with `stale` bytes of an earlier client's.
fn serve_after(
    stale: Vec<u8>,
    mut answer: impl FnMut(&str, &Value) -> Answer + Send + 'static,
) -> (Place, Log) {
    let log = Log::default();
    let written = Arc::clone(&log);
    let place = peer(move |wire| {
        wire.say(stale);
        while let Some(request) = wire.hear() {
            let (command, arguments) =
                (request["execute"].as_str().unwrap(), &request["arguments"]);
            assert_eq!(request["id"], json!(null), "agents before QEMU 4 refuse an id");
            if command == "guest-sync-delimited" {
                wire.say(b"\xff");
                wire.say_json(&json!({"return": arguments["id"]}));
                continue;
            }
            written.lock().unwrap().push((command.to_owned(), arguments.clone()));
            if let Some(answer) = answer(command, arguments) {
                wire.say_json(&answer);
            }
        }
    });
    (place, log)
}

fn connect(place: &Place) -> Agent {
    Agent::connect(&place.socket, ENOUGH).unwrap()
}

fn commands(log: &Log) -> Vec<String> {
    log.lock().unwrap().iter().map(|(command, _)| command.clone()).collect()
}

/// Waits until the agent was given `count` commands.
fn wait_for(log: &Log, count: usize) -> Vec<String> {
    let start = Instant::now();
    while commands(log).len() < count && start.elapsed() < ENOUGH {
        thread::sleep(Duration::from_millis(5));
    }
    commands(log)
}

fn ok(value: Value) -> Answer {
    Some(json!({"return": value}))
}

#[test]
fn file_is_written_flushed_and_closed() {
    let (place, log) = serve(|command, _| match command {
        "guest-file-open" => ok(json!(1000)),
        "guest-file-write" => ok(json!({"count": 5, "eof": false})),
        _ => ok(json!({})),
    });
    let path = "/sys/block/vda/queue/scheduler";
    connect(&place).write_file(path, "none\n", ENOUGH).unwrap();
    let log = log.lock().unwrap();
    let expected = [
        ("guest-file-open", json!({"path": path, "mode": "w"})),
        ("guest-file-write", json!({"handle": 1000, "buf-b64": "bm9uZQo="})),
        ("guest-file-flush", json!({"handle": 1000})),
        ("guest-file-close", json!({"handle": 1000})),
    ];
    let expected = expected.map(|(command, arguments)| (command.to_owned(), arguments));
    assert_eq!(*log, expected);
}

#[test]
fn write_file_closes_the_handle_on_error() {
    // A kernel's file refuses a value when the agent flushes; a full disk takes less.
    let (place, log) = serve(|command, _| match command {
        "guest-file-open" => ok(json!(7)),
        "guest-file-write" => ok(json!({"count": 5, "eof": false})),
        "guest-file-flush" => {
            Some(refusal("GenericError", "failed to flush file: Invalid argument"))
        }
        _ => ok(json!({})),
    });
    let error = connect(&place).write_file("/sys/knob", "bogus", ENOUGH).unwrap_err();
    assert_eq!(error.command, "guest-file-flush");
    assert!(matches!(error.fault, Fault::Refused { .. }), "{error}");
    assert_eq!(commands(&log).last().unwrap(), "guest-file-close");

    let (place, log) = serve(|command, _| match command {
        "guest-file-open" => ok(json!(7)),
        "guest-file-write" => ok(json!({"count": 3, "eof": false})),
        _ => ok(json!({})),
    });
    let error = connect(&place).write_file("/tmp/full", "bogus", ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Unexpected { .. }), "{error}");
    assert_eq!(commands(&log), ["guest-file-open", "guest-file-write", "guest-file-close"]);
}

#[test]
fn file_is_closed_after_the_users_signal() {
    let interrupted = Arc::new(Interrupted::new(false));
    let signal = Arc::clone(&interrupted);
    let (place, log) = serve(move |command, _| match command {
        "guest-file-open" => ok(json!(7)),
        // The answer does not come, and the user does not wait for it.
        "guest-file-write" => {
            signal.store(true, Ordering::Relaxed);
            None
        }
        _ => ok(json!({})),
    });
    let interrupt = Interrupt::new(Some(interrupted), Duration::ZERO);
    let address = Address::Socket(place.socket.clone());
    let mut agent = Agent::at_until(&address, ENOUGH, &interrupt).unwrap();
    let start = Instant::now();
    let error = agent.write_file("/sys/knob", "1", ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Interrupted), "{error}");
    assert!(start.elapsed() < ENOUGH / 2, "{:?}", start.elapsed());
    let expected = ["guest-file-open", "guest-file-write", "guest-file-close"];
    assert_eq!(wait_for(&log, 3), expected);
    // No request is begun after it.
    let error = agent.time(ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Interrupted), "{error}");
    assert_eq!(commands(&log), expected);
}

#[test]
fn file_is_closed_by_an_agent_that_wakes_up_late() {
    let (proceed, wait) = mpsc::channel::<()>();
    let (place, log) = serve(move |command, _| match command {
        "guest-file-open" => ok(json!(7)),
        "guest-file-write" => {
            wait.recv().unwrap();
            ok(json!({"count": 1, "eof": false}))
        }
        "guest-get-time" => ok(json!(5)),
        _ => ok(json!({})),
    });
    let mut agent = connect(&place);
    late(|timeout| agent.write_file("/sys/knob", "1", timeout));
    assert_eq!(wait_for(&log, 2), ["guest-file-open", "guest-file-write"]);
    proceed.send(()).unwrap();
    assert_eq!(wait_for(&log, 3).last().unwrap(), "guest-file-close");
    // Neither late answer is taken for this one's.
    assert_eq!(agent.time(ENOUGH).unwrap(), 5);
}

/// An agent whose every file holds `text`.
fn file_of(text: &'static [u8], ends_late: bool) -> (Place, Log) {
    let mut at = 0;
    serve(move |command, arguments| match command {
        "guest-file-open" => ok(json!(1)),
        "guest-file-read" => {
            let count = arguments["count"].as_u64().unwrap() as usize;
            let part = &text[at..(at + count).min(text.len())];
            at += part.len();
            let eof = at == text.len() && !ends_late;
            let encoded: String = match part {
                b"" => String::new(),
                b"[none] mq-deadline\n" => "W25vbmVdIG1xLWRlYWRsaW5lCg==".to_owned(),
                b"[none]" => "W25vbmVd".to_owned(),
                other => panic!("{other:?}"),
            };
            ok(json!({"count": part.len(), "buf-b64": encoded, "eof": eof}))
        }
        _ => ok(json!({})),
    })
}

#[test]
fn file_is_read_to_its_end() {
    for ends_late in [false, true] {
        let (place, log) = file_of(b"[none] mq-deadline\n", ends_late);
        let path = "/sys/block/vda/queue/scheduler";
        let bytes = connect(&place).read_file(path, 4096, ENOUGH).unwrap();
        assert_eq!(bytes, b"[none] mq-deadline\n");
        assert_eq!(commands(&log).last().unwrap(), "guest-file-close");
    }
}

#[test]
fn file_larger_than_asked_for_is_refused() {
    let (place, log) = file_of(b"[none] mq-deadline\n", false);
    let error = connect(&place).read_file("/sys/knob", 5, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::TooLong { limit: 5 }), "{error}");
    assert_eq!(log.lock().unwrap()[1].1["count"], 6);
    assert_eq!(commands(&log).last().unwrap(), "guest-file-close");
}

#[test]
fn endless_file_keeps_limit_and_deadline() {
    let (place, _log) = serve(|command, _| match command {
        "guest-file-open" => ok(json!(1)),
        // More than was asked for, again and again.
        "guest-file-read" => ok(json!({"count": 3, "buf-b64": "eHh4", "eof": false})),
        _ => ok(json!({})),
    });
    let error = connect(&place).read_file("/dev/zero", 1000, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::TooLong { limit: 1000 }), "{error}");
    let (place, _log) = serve(|command, _| match command {
        "guest-file-open" => ok(json!(1)),
        "guest-file-read" => ok(json!({"count": 3, "buf-b64": "eHh4", "eof": false})),
        _ => ok(json!({})),
    });
    let mut agent = connect(&place);
    late(|timeout| agent.read_file("/dev/zero", usize::MAX, timeout));
}

#[test]
fn program_is_run_to_its_end() {
    let mut looks = 0;
    let (place, log) = serve(move |command, _| match command {
        "guest-exec" => ok(json!({"pid": 314})),
        _ => {
            looks += 1;
            ok(if looks < 3 {
                json!({"exited": false})
            } else {
                json!({"exited": true, "exitcode": 3, "out-data": "b3V0Cg==", "err-data": "ZXJyCg=="})
            })
        }
    });
    let output = connect(&place).run("/bin/sh", &["-c", "exit 3"], ENOUGH).unwrap();
    assert_eq!((output.code, output.stdout), (Some(3), b"out\n".to_vec()));
    assert_eq!(output.stderr, b"err\n");
    let log = log.lock().unwrap();
    let expected = json!({"path": "/bin/sh", "arg": ["-c", "exit 3"], "capture-output": true});
    assert_eq!(log[0].1, expected);
    assert_eq!(log[1].1, json!({"pid": 314}));
    assert_eq!(log.len(), 4);
}

#[test]
fn program_that_runs_on_keeps_the_deadline() {
    let (place, _log) = serve(|command, _| match command {
        "guest-exec" => ok(json!({"pid": 1})),
        _ => ok(json!({"exited": false})),
    });
    let mut agent = connect(&place);
    assert_eq!(agent.exec_status(1, ENOUGH).unwrap(), ExecStatus::Running);
    late(|timeout| agent.run("/bin/sleep", &["600"], timeout));
}

#[test]
fn program_ended_by_a_signal_has_no_code() {
    let (place, _log) = serve(|_, _| ok(json!({"exited": true, "signal": 9})));
    let expected = ExecStatus::Exited { code: None, stdout: Vec::new(), stderr: Vec::new() };
    assert_eq!(connect(&place).exec_status(1, ENOUGH).unwrap(), expected);
}

#[test]
fn disabled_command_has_a_fault_of_its_own() {
    for refused in [
        refusal(
            "CommandNotFound",
            "Command guest-exec has been disabled: the command is not allowed",
        ),
        refusal("GenericError", "The command guest-exec has been disabled for this instance"),
    ] {
        let (place, _log) = serve(move |command, _| match command {
            "guest-exec" => Some(refused.clone()),
            "guest-info" => ok(json!({"version": "9.2.4", "supported_commands": [
                {"name": "guest-exec", "enabled": false, "success-response": true},
                {"name": "guest-info", "enabled": true, "success-response": true},
            ]})),
            _ => None,
        });
        let mut agent = connect(&place);
        let error = agent.exec("/bin/true", &[], ENOUGH).unwrap_err();
        assert!(matches!(error.fault, Fault::Disabled { .. }), "{error}");
        assert!(error.hint().unwrap().contains("the host's knobs are set without it"));
        // A refusal is an answer: the conversation goes on.
        let enabled = agent.enabled_commands(ENOUGH).unwrap();
        assert_eq!(enabled.into_iter().collect::<Vec<_>>(), ["guest-info"]);
    }
}

#[test]
fn clock_and_disks_are_asked_for() {
    let (place, _log) = serve(|command, _| match command {
        "guest-get-time" => ok(json!(1_700_000_000_000_000_000_i64)),
        "guest-get-disks" => ok(json!([
            {"name": "/dev/vda1", "partition": true, "dependencies": ["/dev/vda"]},
            {"name": "/dev/vda", "partition": false, "address": {
                "bus-type": "a new one", "bus": 0, "target": 0, "unit": 0, "serial": "root",
                "dev": "/dev/vda", "pci-controller": {"domain": -1, "bus": 0, "slot": 4, "function": 0}}},
        ])),
        _ => ok(json!({})),
    });
    let mut agent = connect(&place);
    assert_eq!(agent.time(ENOUGH).unwrap(), 1_700_000_000_000_000_000);
    let disk = |node: &str, is_partition, serial: Option<&str>, pci| GuestDisk {
        node: node.to_owned(),
        is_partition,
        serial: serial.map(str::to_owned),
        pci,
    };
    let pci = PciAddress { domain: -1, bus: 0, slot: 4, function: 0 };
    let expected =
        [disk("/dev/vda1", true, None, None), disk("/dev/vda", false, Some("root"), Some(pci))];
    assert_eq!(agent.disks(ENOUGH).unwrap(), expected);
}

#[test]
fn stale_answer_before_the_sync_is_dropped() {
    for stale in [
        // An answer that its client did not wait for, half of one, and an earlier sync.
        &b"{\"return\": {\"exited\": true, \"exitcode\": 99}}\n"[..],
        b"{\"return\": {\"exi",
        b"\xff{\"return\": 5}\n",
        b"\xff{\"return\": 5\xff{\"ret",
        b"\xff\xff\xff\n\xff{}\n\xffnull\n",
    ] {
        let answer = |_: &str, _: &Value| ok(json!({"exited": false}));
        let (place, _log) = serve_after(stale.to_vec(), answer);
        let status = connect(&place).exec_status(1, ENOUGH).unwrap();
        assert_eq!(status, ExecStatus::Running, "{stale:?}");
    }
}

#[test]
fn late_answer_is_not_the_next_ones() {
    let (proceed, wait) = mpsc::channel::<()>();
    let (place, _log) = serve(move |_, arguments| {
        if arguments["pid"] == 1 {
            wait.recv().unwrap();
            return ok(json!({"exited": true, "exitcode": 1}));
        }
        ok(json!({"exited": true, "exitcode": 2}))
    });
    let mut agent = connect(&place);
    late(|timeout| agent.exec_status(1, timeout));
    late(|timeout| agent.exec_status(2, timeout));
    proceed.send(()).unwrap();
    let ExecStatus::Exited { code, .. } = agent.exec_status(2, ENOUGH).unwrap() else { panic!() };
    assert_eq!(code, Some(2));
}

#[test]
fn agent_that_does_not_run_keeps_the_deadline() {
    // QEMU takes the bytes although nobody in the guest reads them.
    let place = peer(|_| thread::sleep(ENOUGH));
    late(|timeout| Agent::connect(&place.socket, timeout));
}

#[test]
fn hostile_answers_are_refused() {
    type Play = fn(&mut Wire);
    type Expected = fn(&Fault) -> bool;
    let plays: [(Play, Expected); 6] = [
        (
            |wire| {
                wire.say("{\"return\": \"");
                wire.say_without_end([b'x'; 1 << 16])
            },
            |fault| matches!(fault, Fault::TooLong { .. }),
        ),
        (
            |wire| wire.say("[".repeat(1 << 20) + "\n"),
            |fault| matches!(fault, Fault::NotAnAnswer { .. }),
        ),
        (
            |wire| wire.say(b"{\"return\": {\"exited\": \"\xc3\x28\"}}\n"),
            |fault| matches!(fault, Fault::NotAnAnswer { .. }),
        ),
        (
            |wire| wire.say("{\"return\": {\"exited\": true, \"out-data\": \"!\"}}\n"),
            |fault| matches!(fault, Fault::NotAnAnswer { .. }),
        ),
        (|wire| wire.say("{}\n"), |fault| matches!(fault, Fault::Unexpected { .. })),
        (|wire| wire.say("{\"return\": {"), |fault| matches!(fault, Fault::Closed)),
    ];
    for (index, (play, expected)) in plays.into_iter().enumerate() {
        let place = peer(move |wire| {
            let id = wire.hear().unwrap()["arguments"]["id"].clone();
            wire.say(b"\xff");
            wire.say_json(&json!({"return": id}));
            wire.hear();
            play(wire);
        });
        let error = connect(&place).exec_status(1, ENOUGH).unwrap_err();
        assert!(expected(&error.fault), "{index}: {error}");
    }
}

#[test]
fn endless_bytes_without_a_sentinel_are_refused() {
    let place = peer(|wire| wire.say_without_end([b'x'; 1 << 16]));
    let error = Agent::connect(&place.socket, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::TooLong { .. }), "{error}");
    let place = peer(|wire| wire.say_without_end(b"\xff\n"));
    let error = Agent::connect(&place.socket, ENOUGH).unwrap_err();
    assert!(matches!(error.fault, Fault::Flood { .. }), "{error}");
}

#[test]
fn replayed_bytes_are_read_without_a_socket() {
    let mut agent =
        Agent::replay(b"\xff{\"return\": 1}\n{\"return\": {\"exited\": false}}\n").unwrap();
    assert_eq!(agent.exec_status(1, ENOUGH).unwrap(), ExecStatus::Running);
    assert!(Agent::replay(b"\xff{\"return\": 2}\n").is_err());
}
