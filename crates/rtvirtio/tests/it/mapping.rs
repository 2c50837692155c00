//! `rtvirtio mapping` and `rtvirtio serve --check`: files in, text out; needs no root.

use std::path::Path;
use std::process::Output;

use crate::scratch_disk::{rtvirtio, said};

const NOWHERE: &str = "/nonexistent";
const JSON: &str = r#"[{"iothread":"iot0","vqs":[0,2]},{"iothread":"iot1","vqs":[1,3]}]"#;
const TOML: &str = "queues = 4\n\
                    mapping = [\n\
                    \x20 { iothread = \"iot0\", vqs = [0, 2] },\n\
                    \x20 { iothread = \"iot1\", vqs = [1, 3] },\n\
                    ]\n";
const CONFIGURATION: &str = r#"version = 1
[control]
socket = "/run/rtvirtio/control.sock"
[[iothread]]
name = "iot0"
cpus = [0, 1]
[[iothread]]
name = "iot1"
poll_max_us = 0
[[device]]
name = "vm0-root"
vm = "vm0"
socket = "/run/rtvirtio/vm0-root.sock"
queues = 4
engine = { type = "ram", size = "64M" }
[[device]]
name = "vm1-root"
vm = "vm1"
socket = "/run/rtvirtio/vm1-root.sock"
read_only = true
engine = { type = "file", path = "/img/vm1" }
"#;

/// Runs the binary on a file of this text.
fn with_file(text: &str, verb: &[&str], rest: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("input");
    std::fs::write(&path, text).unwrap();
    let arguments = [verb, &[path.to_str().unwrap()], rest].concat();
    rtvirtio(Path::new(NOWHERE), &arguments)
}

fn mapping(text: &str, rest: &[&str]) -> String {
    let output = with_file(text, &["mapping"], rest);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn mapping_of_each_format_is_printed_in_each_other() {
    assert_eq!(mapping(JSON, &[]), TOML);
    let qemu = mapping(TOML, &["--format", "qemu"]);
    let expected = format!(
        "-object iothread,id=iot0\n-object iothread,id=iot1\n-device '{{\"driver\":\"virtio-blk-pci\",\
         \"num-queues\":4,\"iothread-vq-mapping\":{JSON}}}'\n"
    );
    assert_eq!(qemu, expected);
    let libvirt = mapping(&qemu, &["--format", "libvirt"]);
    assert!(
        libvirt.starts_with("<!-- IOThread 1 is iot0 -->\n<!-- IOThread 2 is iot1 -->\n<driver"),
        "{libvirt}"
    );
    assert_eq!(mapping(&libvirt, &["--iothreads", "iot0,iot1"]), TOML);
    assert!(mapping(&libvirt, &[]).contains("iothread2"));
}

#[test]
fn mapping_without_a_file_goes_round_robin() {
    let arguments = ["mapping", "--iothreads", "iot0,iot1", "--queues", "4"];
    let output = rtvirtio(Path::new(NOWHERE), &arguments);
    assert_eq!(
        (output.status.code(), String::from_utf8_lossy(&output.stdout).as_ref()),
        (Some(0), TOML)
    );
    let output = rtvirtio(Path::new(NOWHERE), &["mapping"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
}

#[test]
fn mapping_that_qemu_refuses_is_refused_in_its_words_with_a_hint() {
    for (text, rest, words) in [
        (JSON, &["--iothreads", "iot0"] as &[_], "IOThread \"iot1\" object does not exist"),
        (JSON, &["--queues", "5"], "missing vq 4 IOThread assignment"),
        (JSON, &["--queues", "3"], "must be less than num_queues 3"),
        (
            "[{\"iothread\":\"a\"},{\"iothread\":\"a\"}]",
            &["--queues", "1"],
            "duplicate IOThread name",
        ),
        ("[{\"iothread\":\"a\"}]", &[], "does not say how many queues"),
        (
            "mapping = [{ iothread = \"a\", vqs = [0] }, { iothread = \"b\" }]",
            &[],
            "either all items",
        ),
        ("<domain/>", &[], "there is no <iothreads>"),
    ] {
        let output = with_file(text, &["mapping"], rest);
        let complaint = said(&output);
        assert_eq!(output.status.code(), Some(1), "{text}: {complaint}");
        assert!(complaint.contains(words) && complaint.contains("hint: "), "{text}: {complaint}");
    }
}

#[test]
fn device_of_a_configuration_is_printed_with_how_a_guest_attaches() {
    let device = ["--device", "vm0-root", "--format"];
    let libvirt = mapping(CONFIGURATION, &[&device as &[_], &["libvirt"]].concat());
    for line in [
        "<disk type='vhostuser' device='disk'>",
        "  <driver name='qemu' type='raw' queues='4'/>",
        "  <source type='unix' path='/run/rtvirtio/vm0-root.sock'>",
        "    <reconnect enabled='yes' timeout='1'/>",
        "  <access mode='shared'/>",
    ] {
        assert!(libvirt.lines().any(|l| l == line), "{line}: {libvirt}");
    }
    let qemu = mapping(CONFIGURATION, &[&device as &[_], &["qemu"]].concat());
    for line in [
        &format!("# {JSON}"),
        "-object memory-backend-memfd,id=mem,size=512M,share=on",
        "-chardev socket,id=char-vm0-root,path=/run/rtvirtio/vm0-root.sock,reconnect-ms=20",
        "-device vhost-user-blk-pci,id=disk-vm0-root,chardev=char-vm0-root,num-queues=4",
    ] {
        assert!(qemu.lines().any(|l| l == line), "{line}: {qemu}");
    }
    assert_eq!(mapping(CONFIGURATION, &["--device", "vm0-root"]), TOML);
    let output = with_file(CONFIGURATION, &["mapping"], &[]);
    assert!(said(&output).contains("choose one with --device"), "{}", said(&output));
}

#[test]
fn serve_check_prints_what_would_be_served() {
    let output = with_file(CONFIGURATION, &["serve", "--check"], &[]);
    let text = said(&output);
    // The file is right, and this host has not its image.
    assert_eq!(output.status.code(), Some(2), "{text}");
    for words in [
        "control.sock",
        "0-1",
        "never",
        "iot0 iot1 iot0 iot1",
        "RAM, 64 MiB",
        "/img/vm1, read-only",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn serve_refuses_a_wrong_configuration_with_place_and_hint() {
    let output = with_file(&CONFIGURATION.replace("queues = 4", "queues = 65"), &["serve"], &[]);
    let complaint = said(&output);
    assert_eq!(output.status.code(), Some(78), "{complaint}");
    assert!(complaint.contains("input:14:10: device \"vm0-root\": queues is 65"), "{complaint}");
    assert!(complaint.contains("hint: write queues = 4 (1 to 64)"), "{complaint}");
}
