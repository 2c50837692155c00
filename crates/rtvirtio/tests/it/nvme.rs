//! NVMe namespaces served by passthrough commands, in a guest whose device QEMU emulates: nothing here
//! needs root or an NVMe device.
//!
//! The guest runs the engine crate's own tests on its namespaces, then `rtvirtio serve`, confined and
//! without capabilities, with a vhost-user client that verifies what it reads.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_testbed::guests::COMMAND_LINE;
use serde_json::Value;

use crate::archive::GuestFile;
use crate::in_guest::{Machine, Said, crate_tests, image, program};
use crate::scratch_disk::{RTVIRTIO, alone, lab};

/// Of a sparse file: beyond what 32 bits count, in bytes and in blocks of 512.
const NAMESPACE_BYTES: u64 = 3 << 40;
const LOGICAL_BLOCKS: [u32; 2] = [512, 4096];

/// The engine crate's tests on a namespace.
const ENGINE_TESTS: [&str; 14] = [
    "every_engine::discarded_range_is_old_or_zero_and_its_neighbours_stay",
    "every_engine::fixed_buffer_reads_and_writes_its_part",
    "every_engine::flush_and_durable_write_succeed_with_and_without_a_registered_file",
    "every_engine::many_requests_in_flight_each_reach_their_place_and_end_once",
    "every_engine::misaligned_memory_is_read_and_written_all_the_same",
    "every_engine::random_requests_leave_what_a_vector_holds",
    "every_engine::read_returns_what_was_written_in_any_segments",
    "every_engine::zeroed_range_reads_zero_and_its_neighbours_stay",
    "nvme::nvme_data_is_the_block_devices_in_both_directions",
    "nvme::nvme_in_use_or_served_already_is_refused",
    "nvme::nvme_opened_for_reading_reads_and_takes_no_write",
    "nvme::nvme_polled_requests_end_without_interrupts_and_others_with",
    "nvme::nvme_request_beyond_the_end_fails_and_later_ones_do_not",
    "nvme::nvme_size_is_asked_for_again_and_not_set",
];

/// One IOThread sleeps between requests, the other polls drivers too.
const CONFIGURATION: &str = r#"
version = 1
[control]
socket = "/run/control.sock"
[[iothread]]
name = "iot0"
completion = "interrupt"
[[iothread]]
name = "iot1"
[[schedule]]
name = "device"
channels = 64
request_ns = 1000
kib_ns = 10
[[device]]
name = "interrupted"
vm = "a"
socket = "/run/interrupted.sock"
queues = 2
engine = { type = "nvme", path = "/dev/ng0n1" }
[[device]]
name = "polled"
vm = "b"
socket = "/run/polled.sock"
queues = 2
engine = { type = "nvme", path = "/dev/ng0n2", poll = true }
qos = { schedule = "device" }
"#;

/// Interrupts of the device's queues so far; queue 0 is for administration.
const INTERRUPTS: &str =
    "grep 'nvme.q[1-9]' /proc/interrupts | awk '{ n += $2 } END { print n + 0 }'";

#[test]
fn nvme_in_a_guest_holds_what_was_written_with_interrupts_and_polled() {
    const NAME: &str = "nvme_in_a_guest_holds_what_was_written_with_interrupts_and_polled";
    let Some(image) = image(NAME) else { return };
    let files = match files() {
        Ok(files) => files,
        Err(why) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED {NAME}: {why}");
            return;
        }
    };
    let _host = alone();
    let directory = tempfile::tempdir().unwrap();
    // Its transfers are limited to 64 KiB, less than what a guest asks for.
    let mut arguments = vec!["-device".to_owned(), "nvme,id=nvme0,serial=test,mdts=4".to_owned()];
    for (number, block) in (1..).zip(LOGICAL_BLOCKS) {
        let path = directory.path().join(format!("namespace{number}"));
        std::fs::File::create(&path).unwrap().set_len(NAMESPACE_BYTES).unwrap();
        let (path, node) = (path.display(), format!("node{number}"));
        arguments.extend([
            "-blockdev".to_owned(),
            format!("driver=file,node-name={node},filename={path},discard=unmap,aio=threads"),
            "-device".to_owned(),
            format!(
                "nvme-ns,bus=nvme0,drive={node},nsid={number},logical_block_size={block},physical_block_size=4096"
            ),
        ]);
    }
    // The last ones count. Half of the memory is for files, which three binaries take.
    arguments.extend(["-append".to_owned(), format!("{COMMAND_LINE} nvme.poll_queues=1")]);
    arguments.extend(["-m", "768"].map(str::to_owned));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let machine = Machine::boot(&image, &files, &arguments);

    engine_tests_pass(&machine);
    served_is_verified(&machine);
    served_is_served_once(&machine);
    without_queues_to_poll_is_refused(&machine);
}

/// The binaries and the engine crate's tests.
fn files() -> Result<Vec<GuestFile>, String> {
    let tests = crate_tests("engine");
    let lab = PathBuf::from(lab());
    let programs: [(&Path, &str); 3] = [
        (Path::new(RTVIRTIO), "/usr/bin/rtvirtio"),
        (&lab, "/usr/bin/rtvirtio-lab"),
        (&tests, "/usr/bin/engine-tests"),
    ];
    let mut files = BTreeMap::new();
    for (source, path) in programs {
        files.extend(program(source, path)?.into_iter().map(|f| (f.path.clone(), f)));
    }
    Ok(files.into_values().collect())
}

fn engine_tests_pass(machine: &Machine) {
    let script = "cat /sys/block/nvme0n?/queue/io_poll
        RTVIRTIO_TEST_NVME='/dev/ng0n1 /dev/ng0n2' \
            engine-tests every_engine:: nvme:: --test-threads 1 2>&1";
    let Said { code, stdout, .. } = machine.shell(script, Duration::from_secs(300));
    assert_eq!(code, Some(0), "{stdout}");
    assert!(stdout.starts_with("1\n1\n") && !stdout.contains("SKIPPED"), "{stdout}");
    for test in ENGINE_TESTS {
        assert!(stdout.contains(&format!("test {test} ... ok")), "{test}: {stdout}");
    }
    assert!(stdout.contains(&format!("{} passed; 0 failed", ENGINE_TESTS.len())), "{stdout}");
}

/// A load that is verified, on queues that move between IOThreads meanwhile.
fn served_is_verified(machine: &Machine) {
    machine.write("/tmp/serve.toml", CONFIGURATION);
    machine.expect(
        0,
        "rtvirtio serve /tmp/serve.toml >/tmp/serve.log 2>&1 &
        echo $! >/run/serve.pid
        until grep -q '^serving 2' /tmp/serve.log; do
            kill -0 $! || { cat /tmp/serve.log; exit 1; }
            sleep 0.1
        done
        grep -q '^CapEff:.0*$' /proc/$!/status && grep -q '^Seccomp:.2$' /proc/$!/status",
    );
    for device in ["interrupted", "polled"] {
        let script = format!(
            "{INTERRUPTS}
            rtvirtio-lab bench dataplane verify --socket /run/{device}.sock --seconds 8 --queues 2 \
                >/tmp/report.json 2>/tmp/verify.log &
            verify=$! moves=0
            while kill -0 $verify 2>/dev/null; do
                for thread in iot1 iot0; do
                    rtvirtio ctl --socket /run/control.sock mapping move {device} 0 $thread \
                        >/dev/null && moves=$((moves + 1))
                done
            done
            wait $verify || {{ cat /tmp/verify.log /tmp/serve.log; exit 1; }}
            {INTERRUPTS}
            echo $moves
            cat /tmp/report.json"
        );
        let Said { code, stdout, stderr } = machine.shell(&script, Duration::from_secs(90));
        assert_eq!(code, Some(0), "{device}: {stdout} {stderr}");
        let mut lines = stdout.splitn(4, '\n');
        let mut number = || lines.next().unwrap().parse::<u64>().unwrap();
        let (before, after, moves) = (number(), number(), number());
        let report: Value = serde_json::from_str(lines.next().unwrap()).unwrap();
        println!("{device}: {} interrupts, {moves} moves, {report}", after - before);
        assert!(moves >= 2, "{device}: {moves} moves");
        for done in ["reads", "writes", "zeroes", "discards", "flushes"] {
            assert!(report[done].as_u64().unwrap() > 0, "{device}: {report}");
        }
        assert_eq!(after == before, device == "polled", "{device}: {before}, {after}");
    }
}

/// Neither a second server nor a mount gets what is served, and the first one's end lets go of it.
fn served_is_served_once(machine: &Machine) {
    let second = CONFIGURATION.replace("/run/", "/tmp/");
    machine.write("/tmp/second.toml", &second);
    let refused = machine.expect(1, "rtvirtio serve /tmp/second.toml");
    assert!(refused.contains("claim /dev/nvme0n1"), "{refused}");
    assert!(refused.contains("served already"), "{refused}");
    // The claim is asked for before a file system is looked for.
    let busy = machine.shell("mount -t ext4 /dev/nvme0n1 /mnt", Duration::from_secs(20));
    assert_ne!(busy.code, Some(0));
    assert!(busy.stderr.contains("busy"), "{}", busy.stderr);
    machine.expect(
        0,
        "kill $(cat /run/serve.pid); while [ -d /proc/$(cat /run/serve.pid) ]; do sleep 0.1; done",
    );
    machine.expect(0, "mkfs.ext4 -q /dev/nvme0n1 64M && mount -t ext4 /dev/nvme0n1 /mnt");
    let refused = machine.expect(1, "rtvirtio serve /tmp/second.toml");
    assert!(refused.contains("is it mounted"), "{refused}");
    machine.expect(0, "umount /mnt");
}

/// The driver counts its queues anew when it finds the device anew.
fn without_queues_to_poll_is_refused(machine: &Machine) {
    machine.expect(
        0,
        "echo 0 >/sys/module/nvme/parameters/poll_queues
        echo 1 >$(readlink -f /sys/class/nvme/nvme0/device)/remove
        while [ -e /dev/ng0n2 ]; do sleep 0.1; done
        echo 1 >/sys/bus/pci/rescan
        while [ ! -e /dev/nvme0n1 ] || [ ! -e /dev/ng0n2 ]; do sleep 0.1; done",
    );
    let refused = machine.expect(1, "rtvirtio serve /tmp/second.toml");
    assert!(refused.contains("nvme.poll_queues="), "{refused}");
    let interrupted = CONFIGURATION.replace(", poll = true", "");
    machine.write("/tmp/serve.toml", &interrupted);
    machine.expect(
        0,
        "rtvirtio serve /tmp/serve.toml >/tmp/again.log 2>&1 & server=$!
        until grep -q '^serving 2' /tmp/again.log; do kill -0 $server || exit 1; sleep 0.1; done
        kill $server; wait $server",
    );
}
