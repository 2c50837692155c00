//! Data that is written and must be found again, in a guest.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::vm::Shell;

/// Beyond the file system's part of the disk. fio stamps each block with its place, its number
/// and a checksum, so a block that is lost, old or misplaced is seen. `pass` writes all of its
/// part, then reads all of it, again and again: what it wrote before an accident it reads after
/// one (with `time_based` it would write for ever). `trim` discards each block, writes it, and reads it soon; `mixed` reads between.
const JOBS: &str = "[global]
filename=/dev/vda
ioengine=libaio
direct=1
thread=1
runtime=86400
iodepth=8
verify=crc32c
verify_fatal=1
verify_dump=1
[pass]
rw=randwrite
bs=4k
offset=512m
size=4m
fsync=32
loops=1000000
[trim]
time_based=1
rw=randtrimwrite
bs=4k
offset=576m
size=16m
verify_backlog=64
[mixed]
time_based=1
rw=randrw
bssplit=4k/60:16k/30:64k/10
bs_unaligned=0
offset=640m
size=32m
verify_backlog=32
fsync=16
";

/// fio at work in a guest until it is stopped.
pub(crate) struct Verify {
    started: u64,
}

/// What it did. No error is in it: there was none.
#[derive(Debug)]
pub(crate) struct Verified {
    pub(crate) reads: u64,
    /// Of these, the ones of `pass`.
    pub(crate) read_late: u64,
    pub(crate) writes: u64,
    pub(crate) discards: u64,
    /// The longest that a request took.
    pub(crate) longest: Duration,
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reads, read_late, writes, discards, longest } = self;
        let longest = longest.as_millis();
        write!(
            f,
            "{reads} verified reads ({read_late} late), {writes} writes, {discards} discards, none failed, longest \
             {longest} ms"
        )
    }
}

impl Verify {
    /// Returns when it does I/O.
    pub(crate) fn start(shell: &mut Shell) -> Self {
        shell.write("/tmp/verify.fio", JOBS);
        let started = shell.completed();
        shell.expect(
            "rm -f /tmp/verify.json /tmp/verify.code; cd /tmp; (fio --output-format=json \
             --output=verify.json verify.fio; echo $? >verify.code) </dev/null >verify.log 2>&1 &",
        );
        let verify = Self { started };
        verify.goes_on(shell, 500, Duration::from_secs(60));
        verify
    }

    /// At least so many requests end within this time, from now.
    #[track_caller]
    pub(crate) fn goes_on(&self, shell: &mut Shell, requests: u64, within: Duration) {
        let (start, before) = (Instant::now(), shell.completed());
        while shell.completed() < before + requests {
            self.runs(shell);
            assert!(start.elapsed() < within, "fewer than {requests} requests in {within:?}");
        }
    }

    /// It has not found an error.
    #[track_caller]
    pub(crate) fn runs(&self, shell: &mut Shell) {
        if let Some(code) = shell.read("/tmp/verify.code") {
            panic!("fio ended, {}: {}", code.trim(), said(shell));
        }
    }

    /// Ends it; what it did.
    #[track_caller]
    pub(crate) fn stop(self, shell: &mut Shell) -> Verified {
        self.runs(shell);
        let ended = shell.completed() - self.started;
        shell.expect("killall -INT fio");
        let start = Instant::now();
        // fio ends by itself only when all of its requests have: one that hangs shows here.
        while shell.read("/tmp/verify.code").is_none_or(|code| code.is_empty()) {
            assert!(start.elapsed() < Duration::from_secs(60), "a request hangs: {}", said(shell));
            std::thread::sleep(Duration::from_millis(50));
        }
        let text = shell.read("/tmp/verify.json").unwrap_or_default();
        let json = text.find('{').map(|at| serde_json::from_str::<Value>(&text[at..]));
        let Some(Ok(report)) = json else { panic!("{text}: {}", said(shell)) };
        let jobs = report["jobs"].as_array().unwrap();
        assert_eq!(jobs.len(), 3, "{text}");
        assert!(jobs.iter().all(|job| job["error"] == 0), "{}", said(shell));
        let sum = |kind: &str| jobs.iter().map(|j| j[kind]["total_ios"].as_u64().unwrap()).sum();
        let longest = |job: &Value| {
            let one = |kind| job[kind]["clat_ns"]["max"].as_u64().unwrap_or(0);
            ["read", "write", "trim"].map(one).into_iter().max().unwrap()
        };
        let longest = jobs.iter().map(longest).max().unwrap();
        let (reads, writes, discards) = (sum("read"), sum("write"), sum("trim"));
        assert!(reads > 0 && writes > 0 && ended > 0, "{text}");
        let read_late = jobs[0]["read"]["total_ios"].as_u64().unwrap();
        Verified { reads, read_late, writes, discards, longest: Duration::from_nanos(longest) }
    }

    /// It has ended, as it must without its disk.
    #[track_caller]
    pub(crate) fn fails(self, shell: &mut Shell) {
        shell.expect("for i in $(seq 300); do [ -s /tmp/verify.code ] && exit 0; usleep 100000; done; exit 1");
        // What it says it read then is worth nothing: without a disk, reads end with no bytes, and fio
        // verifies what the buffer held before. `misplaced` looks at the image itself.
    }
}

/// Blocks of fio's in the image that are not where fio put them.
pub(crate) fn misplaced(image: &Path) -> Vec<(u64, u64)> {
    const MAGIC: u16 = 0xacca;
    const BLOCK: usize = 4096;
    let file = File::open(image).expect("the image is there");
    let (mut found, mut headers) = (Vec::new(), 0);
    let mut block = [0; BLOCK];
    // The jobs' part of the disk.
    for at in (512 << 20..672 << 20).step_by(BLOCK) {
        file.read_exact_at(&mut block, at).expect("the image is as large");
        // struct verify_header of fio 3.33: magic, type, length, seed, offset.
        let word = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().unwrap());
        let offset = u64::from_le_bytes(block[16..24].try_into().unwrap());
        let is_header = u16::from_le_bytes([block[0], block[1]]) == MAGIC
            && [4096, 16_384, 65_536].contains(&word(4));
        headers += u32::from(is_header);
        if is_header && offset != at {
            found.push((at, offset));
        }
    }
    assert!(headers > 100, "only {headers} blocks of fio's");
    found
}

/// What fio said.
fn said(shell: &mut Shell) -> String {
    let lines = "tail -n 30 /tmp/verify.log; head -c 2000 /tmp/verify.json; dmesg | tail -n 20";
    let said = shell.run(lines, Duration::from_secs(30));
    said.stdout + &said.stderr
}

/// A file system with files in the disk's first quarter.
pub(crate) struct FileSystem;

impl FileSystem {
    /// Makes ext4, and files in it under fio's verify, with discards.
    pub(crate) fn make(shell: &mut Shell) -> Self {
        shell.expect("mkfs.ext4 -q -F /dev/vda 256M");
        shell.expect(
            "mount -t ext4 -o discard /dev/vda /mnt && grep -q '/mnt ext4 .*discard' /proc/mounts",
        );
        shell.expect(
            "fio --name=files --directory=/mnt --size=8m --nrfiles=8 --rw=randrw --bs=4k \
             --ioengine=libaio --direct=1 --iodepth=16 --fsync=32 --verify=crc32c \
             --verify_fatal=1 --thread=1",
        );
        shell.expect(
            "cd /mnt && mkdir kept && for i in 1 2 3 4; do dd if=/dev/urandom of=kept/$i bs=64k \
             count=$((i * 8)); done && md5sum kept/* >sums && cd / && rm /mnt/files* && sync && \
             umount /mnt",
        );
        Self::check(shell);
        Self
    }

    /// e2fsck finds nothing to repair.
    pub(crate) fn check(shell: &mut Shell) {
        shell.expect("e2fsck -f -n /dev/vda");
    }

    /// The files are as they were; leaves it mounted, with something unwritten.
    pub(crate) fn is_intact(&self, shell: &mut Shell) {
        shell.expect(
            "mount -t ext4 -o discard /dev/vda /mnt && cd /mnt && md5sum -c sums && \
             { cat seen 2>/dev/null; echo again; } >seen.new && mv seen.new seen",
        );
    }

    /// As often as it was found intact before.
    pub(crate) fn unmount(&self, shell: &mut Shell) {
        shell.expect("umount /mnt");
        Self::check(shell);
    }
}
