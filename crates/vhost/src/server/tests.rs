use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::VhostBackend as _;
use vhost::vhost_user::Frontend;

use super::*;
use crate::protocol::{Message, Request, VringAddress, VringFd, VringState};
use crate::session::testing::{Host, device, memory, region};
use crate::session::{Refused, SessionError};

struct Rig {
    server: Server,
    directory: tempfile::TempDir,
    reports: mpsc::Receiver<Ended>,
}

impl Rig {
    fn new() -> Self {
        let (sender, reports) = mpsc::channel();
        let sender = Mutex::new(sender);
        let report = move |_: &str, ended: &Ended| lock(&sender).send(*ended).unwrap();
        Self {
            server: Server::new(Arc::new(report)).unwrap(),
            directory: tempfile::tempdir().unwrap(),
            reports,
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("disk.sock")
    }

    fn add(&self) -> (SocketId, Arc<dyn Backend>, Arc<Host>) {
        let listener = Listener::bind(&self.path(), 0o660).unwrap();
        let device: Arc<dyn Backend> = device();
        let host = Arc::new(Host::default());
        let id = self.server.add(listener, Arc::clone(&device), Arc::clone(&host)).unwrap();
        (id, device, host)
    }

    fn connect(&self) -> Frontend {
        Frontend::connect(self.path(), 64).unwrap()
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn front_ends_that_come_again_at_once_are_all_served() {
    let rig = Rig::new();
    let (id, ..) = rig.add();
    for _ in 0..200 {
        let front = rig.connect();
        assert_ne!(front.get_features().unwrap(), 0);
    }
    wait_until(|| !rig.server.is_connected(id));
    assert!(rig.reports.try_recv().is_err());
}

#[test]
fn second_front_end_waits_until_the_first_has_left() {
    let rig = Rig::new();
    let (id, ..) = rig.add();
    let first = rig.connect();
    first.get_features().unwrap();
    assert!(rig.server.is_connected(id));
    let second = rig.connect();
    let (sender, answered) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        sender.send(second.get_features().unwrap()).unwrap();
    });
    let waits = answered.recv_timeout(Duration::from_millis(100));
    assert_eq!(waits, Err(mpsc::RecvTimeoutError::Timeout));
    drop(first);
    assert_ne!(answered.recv_timeout(Duration::from_secs(20)), Ok(0));
    thread.join().unwrap();
}

#[test]
fn front_end_comes_in_while_the_last_ones_requests_drain_but_its_rings_wait() {
    let rig = Rig::new();
    let (_, device, host) = rig.add();
    let mut old = Session::new(Arc::clone(&device), Arc::clone(&host));
    set_up(&mut old);
    assert_eq!(host.log(), ["start 0 enabled=true base=0"]);
    host.set_stuck(true);
    let old = std::thread::spawn(move || drop(old));

    let front = rig.connect();
    front.get_features().unwrap();
    let rings = std::thread::spawn({
        let host = Arc::clone(&host);
        move || set_up(&mut Session::new(device, host))
    });
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(host.log(), [""; 0]);
    host.set_stuck(false);
    old.join().unwrap();
    rings.join().unwrap();
    assert_eq!(host.log(), ["stop 0", "start 0 enabled=true base=0", "stop 0"]);
}

/// Makes ring 0 run.
fn set_up(session: &mut Session<Host>) {
    let address = VringAddress {
        index: 0,
        descriptors: 1 << 30,
        available: (1 << 30) + 0x1000,
        used: (1 << 30) + 0x2000,
        log: None,
    };
    for (message, fds) in [
        (Message::AddMemReg(region(0)), vec![memory(0x1_0000)]),
        (Message::SetVringNum(VringState { index: 0, num: 16 }), vec![]),
        (Message::SetVringAddr(address), vec![]),
        (Message::SetVringKick(VringFd { index: 0, fd: false }), vec![]),
    ] {
        session.handle(message, fds).unwrap();
    }
}

#[test]
fn session_that_fails_is_reported_by_name_but_not_each_time() {
    let rig = Rig::new();
    rig.add();
    for _ in 0..50 {
        let front = rig.connect();
        front.set_vring_num(63, 16).unwrap();
        assert!(front.get_features().is_err());
    }
    let ended = rig.reports.recv_timeout(Duration::from_secs(20)).unwrap();
    let (request, source) = (Request::SetVringNum, Refused::NoQueue(63));
    assert_eq!(ended.error, Some(SessionError::Refused { request, source }));
    assert!(rig.reports.try_iter().count() < 10);
}

#[test]
fn device_removed_ends_its_session_and_its_socket() {
    let rig = Rig::new();
    let (id, ..) = rig.add();
    let front = rig.connect();
    front.get_features().unwrap();
    assert!(rig.server.remove(id));
    assert!(front.get_features().is_err());
    assert!(!rig.path().exists());
    assert!(!rig.server.remove(id));
    assert!(!rig.server.is_connected(id));
    // The name is free at once.
    rig.add();
    rig.connect().get_features().unwrap();
}

#[test]
fn server_dropped_ends_all_sessions() {
    let rig = Rig::new();
    rig.add();
    let front = rig.connect();
    front.get_features().unwrap();
    let (path, server) = (rig.path(), rig.server);
    drop(server);
    assert!(front.get_features().is_err());
    assert!(!path.exists());
}

#[test]
fn socket_handed_over_is_served_and_left_where_it_is() {
    let rig = Rig::new();
    let theirs = UnixListener::bind(rig.path()).unwrap();
    let listener = Listener::from_fd(theirs.into()).unwrap();
    let id = rig.server.add(listener, device(), Arc::new(Host::default())).unwrap();
    rig.connect().get_features().unwrap();
    rig.server.remove(id);
    assert!(rig.path().exists());
}

#[test]
fn socket_handed_over_goes_from_its_own_path_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let handed = |at: &Path| {
        let theirs = UnixListener::bind(at).unwrap();
        Listener::from_fd(theirs.into()).unwrap()
    };
    drop(handed(&path("a")).removing(&path("a")));
    assert!(!path("a").exists());
    // Another's, and what has come to its place since.
    let other = UnixListener::bind(path("other")).unwrap();
    drop(handed(&path("b")).removing(&path("other")));
    assert!(path("b").exists() && path("other").exists());
    let listener = handed(&path("c")).removing(&path("c"));
    std::fs::remove_file(path("c")).unwrap();
    std::fs::write(path("c"), "kept").unwrap();
    drop(listener);
    assert!(path("c").exists());
    let moved = handed(&path("d"));
    std::fs::rename(path("d"), path("e")).unwrap();
    std::fs::write(path("d"), "kept").unwrap();
    drop(moved.removing(&path("d")));
    assert!(path("d").exists());
    drop(other);
}

#[test]
fn descriptor_that_does_not_listen_is_refused() {
    let (stream, _) = UnixStream::pair().unwrap();
    assert!(matches!(Listener::from_fd(stream.into()), Err(ListenError::NotListening)));
    assert!(matches!(Listener::from_fd(memory(1)), Err(ListenError::NotListening)));
    let internet = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(Listener::from_fd(internet.into()), Err(ListenError::NotListening)));
}

#[test]
fn stale_socket_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind(&path, 0o600).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::InUse(_))));
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn listener_that_accepts_nobody_is_in_use_and_not_waited_for() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    let socket = |flags| {
        let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
        rustix::net::socket_with(unix, stream, flags, None).unwrap()
    };
    let address = SocketAddrUnix::new(&path).unwrap();
    let theirs = socket(SocketFlags::CLOEXEC);
    rustix::net::bind(&theirs, &address).unwrap();
    rustix::net::listen(&theirs, 1).unwrap();
    // Until its backlog is full.
    let mut waiting = Vec::new();
    loop {
        let front = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        match rustix::net::connect(&front, &address) {
            Ok(()) => waiting.push(front),
            Err(error) => break assert_eq!(error, rustix::io::Errno::AGAIN),
        }
        assert!(waiting.len() < 1000);
    }
    assert!(matches!(Listener::bind(&path, 0o600), Err(ListenError::InUse(_))));
    assert!(path.exists());
}

#[test]
fn file_that_is_no_socket_is_never_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind(&path, 0o660), Err(ListenError::NotASocket(_))));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    let link = directory.path().join("link.sock");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(matches!(Listener::bind(&link, 0o660), Err(ListenError::NotASocket(_))));
    let long = Path::new("/tmp").join("x".repeat(200));
    assert!(matches!(Listener::bind(&long, 0o660), Err(ListenError::Path(_))));
}

#[test]
fn path_that_leads_elsewhere_by_now_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    let listener = Listener::bind(&path, 0o660).unwrap();
    std::fs::rename(&path, directory.path().join("moved.sock")).unwrap();
    let other = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(other);
    let refused = UnixStream::connect(&path).unwrap_err().kind();
    assert_eq!(refused, ErrorKind::ConnectionRefused);
}

/// A client takes the end of its connection for the end of its requests, and may ask for them in another way.
#[test]
fn client_hears_of_the_end_when_what_it_has_in_flight_has_ended() {
    let rig = Rig::new();
    let listener = Listener::bind(&rig.path(), 0o660).unwrap();
    let (said, hears) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let released = Mutex::new(released);
    let serve = move |stream: &UnixStream, _| {
        let mut state = [PollFd::new(stream, PollFlags::IN)];
        poll(&mut state, None).unwrap();
        said.send(()).unwrap();
        // Its requests end.
        lock(&released).recv().unwrap();
    };
    let id = rig.server.add_clients(listener, serve).unwrap();
    let client = UnixStream::connect(rig.path()).unwrap();
    let has_ended = |wait| {
        let mut state = [PollFd::new(&client, PollFlags::empty())];
        poll(&mut state, Some(&wait)).unwrap() == 1
    };
    wait_until(|| rig.server.is_connected(id));
    rig.server.shut_down();
    hears.recv_timeout(Duration::from_secs(20)).unwrap();
    assert!(!has_ended(Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
    release.send(()).unwrap();
    assert!(has_ended(Timespec { tv_sec: 20, tv_nsec: 0 }));
}
