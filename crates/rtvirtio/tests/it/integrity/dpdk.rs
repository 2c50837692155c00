//! DPDK's virtio-user as the other guest of a network: testpmd sends back what it gets, with the addresses swapped.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;

use super::End;
use super::port::Port;

/// testpmd with a port at this socket, on two CPUs and huge pages; killed when dropped.
pub(super) struct Testpmd(Child);

impl Testpmd {
    pub(super) fn start(socket: &Path, mac: &str, packed: bool) -> Self {
        let port = format!(
            "--vdev=net_virtio_user0,path={},queues=1,queue_size=256,packed_vq={},mac={mac}",
            socket.display(),
            u8::from(packed)
        );
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "dpdk-testpmd", "--lcores", "0@0,1@1"]);
        command.args(["--main-lcore", "0", "--iova-mode=va", "--no-pci", "--in-memory"]);
        command.args(["--single-file-segments", "-m", "128", &port, "--"]);
        command.args(["--total-num-mbufs=8192", "--forward-mode=macswap", "--auto-start"]);
        command.arg("--port-topology=loop");
        // It ends with its standard input.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    pub(super) fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A device as the end from which frames go.
pub(super) struct Sends(Rc<RefCell<Port>>);

/// The same device as the end to which they come back.
pub(super) struct Receives(Rc<RefCell<Port>>);

pub(super) fn both(port: Port) -> [Box<dyn End>; 2] {
    let port = Rc::new(RefCell::new(port));
    [Box::new(Sends(Rc::clone(&port))), Box::new(Receives(port))]
}

impl End for Sends {
    fn connect(&mut self) {
        self.0.borrow_mut().connect();
    }

    fn start_sending(&mut self) {
        self.0.borrow_mut().start_sending();
    }

    fn send(&mut self, frame: &[u8]) -> bool {
        self.0.borrow_mut().send(frame)
    }

    fn returned(&mut self) -> u64 {
        self.0.borrow_mut().returned()
    }

    fn repeats(&self) -> bool {
        true
    }

    fn receive(&mut self, _: &mut Vec<u8>) -> bool {
        false
    }

    fn flush(&mut self) {
        self.0.borrow_mut().flush();
    }

    fn changes(&self) -> u64 {
        self.0.borrow().changes()
    }
}

impl End for Receives {
    fn connect(&mut self) {}

    fn send(&mut self, _: &[u8]) -> bool {
        false
    }

    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        self.0.borrow_mut().receive(frame)
    }
}
