//! The data plane's packaged units under a real systemd: a socket that starts the service, which
//! serves it as its own user without rights, comes back after kill −9, and ends well.

use super::Guest;

const SERVICE: &str = include_str!("../../../../../packaging/rtvirtio-dataplane.service");
const SOCKET: &str = include_str!("../../../../../packaging/rtvirtio-dataplane@.socket");
/// A device by a socket of systemd's, and one by the service's own, on a file.
const CONFIGURATION: &str = "version = 1
[control]
socket = '/run/rtvirtio/control.sock'
[[iothread]]
name = 'iot0'
[[device]]
name = 'vm0-root'
vm = 'vm0'
queues = 2
socket_activation = 'vm0-root'
engine = { type = 'ram', size = '16M' }
[[device]]
name = 'vm0-log'
vm = 'vm0'
queues = 2
socket = '/run/rtvirtio/vm0-log.sock'
engine = { type = 'file', path = '/var/lib/rtvirtio/log.raw' }
";

#[test]
fn packaged_units_start_the_data_plane_by_its_socket_without_rights() {
    let test = "packaged_units_start_the_data_plane_by_its_socket_without_rights";
    let files = [
        ("etc/systemd/system/rtvirtio-dataplane.service", SERVICE),
        ("etc/systemd/system/rtvirtio-dataplane@.socket", SOCKET),
        ("dataplane.toml", CONFIGURATION),
    ];
    let files = files.map(|(path, text)| (path, text.as_bytes().to_vec()));
    let Some(mut guest) = Guest::boot(test, &files) else { return };

    // As sysusers.d and an operator do it (docs/operating.md).
    guest.expect(
        0,
        "echo rtvirtio:x:990:990::/:/bin/false >>/etc/passwd; echo rtvirtio:x:990: >>/etc/group
         mkdir -p /etc/rtvirtio /var/lib/rtvirtio /var/tmp; mv /dataplane.toml /etc/rtvirtio/
         truncate -s 16M /var/lib/rtvirtio/log.raw; chown -R rtvirtio:rtvirtio /var/lib/rtvirtio
         chmod 700 /var/lib/rtvirtio",
    );
    guest.expect(0, "systemctl daemon-reload");
    guest.expect(0, "systemctl start rtvirtio-dataplane@vm0-root.socket");
    let made = guest.expect(0, "stat -c '%U:%G %a' /run/rtvirtio-disks/vm0-root.sock");
    assert_eq!(made, "rtvirtio:rtvirtio 660\n");
    guest.expect(3, "systemctl is-active rtvirtio-dataplane");

    // A front end comes, and the service with it.
    guest.verifies("/run/rtvirtio-disks/vm0-root.sock");
    assert_eq!(guest.show("ActiveState"), "active");
    guest.verifies("/run/rtvirtio/vm0-log.sock");
    let listed = guest.expect(0, "rtvirtio ctl --socket /run/rtvirtio/control.sock snapshot");
    assert!(listed.contains("vm0-root") && listed.contains("iot0"), "{listed}");
    guest.has_no_rights();

    // What systemd starts again has the same sockets.
    let before = guest.show("MainPID");
    guest.expect(0, &format!("kill -9 {before}"));
    guest.verifies("/run/rtvirtio-disks/vm0-root.sock");
    guest.expect(
        0,
        "for try in $(seq 50); do [ -S /run/rtvirtio/control.sock ] && exit 0; sleep 0.2; done; exit 1",
    );
    guest.verifies("/run/rtvirtio/vm0-log.sock");
    assert_ne!(guest.show("MainPID"), before);
    assert_eq!(guest.show("NRestarts"), "1");
    guest.has_no_rights();

    // The socket's unit stays: without it systemd would forget how the service ended.
    guest.expect(0, "systemctl stop rtvirtio-dataplane");
    let ended = ["ActiveState", "Result", "ExecMainCode", "ExecMainStatus"].map(|p| guest.show(p));
    let exited = "1"; // CLD_EXITED
    assert_eq!(ended, ["inactive", "success", exited, "0"]);
    guest.expect(0, "systemctl stop rtvirtio-dataplane@vm0-root.socket");
    assert_eq!(
        guest.expect(0, "find /run/rtvirtio /run/rtvirtio-disks -type s 2>/dev/null || true"),
        ""
    );
}

impl Guest {
    /// A property of the service.
    fn show(&mut self, property: &str) -> String {
        let text =
            self.expect(0, &format!("systemctl show --value -p {property} rtvirtio-dataplane"));
        text.trim().to_owned()
    }

    /// A client writes, and finds what it wrote.
    #[track_caller]
    fn verifies(&mut self, socket: &str) {
        let verify = "rtvirtio-lab bench dataplane verify --queues 2 --seconds 0.5 --mebibytes 4";
        let output = self.run(&format!("{verify} --socket {socket}"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.code != Some(0) {
            let unit = self.run("systemctl status --no-pager rtvirtio-dataplane").stdout;
            panic!("{socket}: {said}\n{}\n{}", String::from_utf8_lossy(&unit), self.console());
        }
    }

    /// Every thread of the service is of its user, with no capability and a list of system calls.
    #[track_caller]
    fn has_no_rights(&mut self) {
        let pid = self.show("MainPID");
        let statuses = self.expect(0, &format!("cat /proc/{pid}/task/*/status"));
        let mut threads = 0;
        for line in statuses.lines() {
            let Some((field, value)) = line.split_once(':') else { continue };
            let expected = match field {
                "Uid" | "Gid" => "990\t990\t990\t990",
                "CapInh" | "CapPrm" | "CapEff" | "CapBnd" | "CapAmb" => "0000000000000000",
                "NoNewPrivs" => "1",
                "Seccomp" => "2",
                _ => continue,
            };
            assert_eq!(value.trim(), expected, "{field}: {statuses}");
            threads += u32::from(field == "Uid");
        }
        assert!(threads >= 2, "{statuses}");
    }
}
