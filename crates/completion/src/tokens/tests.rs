use std::fs::{create_dir_all, write};

use super::*;

const MS: u64 = 1_000_000;

/// A machine of four CPUs, as files.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        files.write("sys/devices/system/cpu/online", "0-3\n");
        files.running(1);
        files
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        create_dir_all(path.parent().unwrap()).unwrap();
        write(path, text).unwrap();
    }

    fn running(&self, tasks: u32) {
        self.write("proc/loadavg", &format!("0.50 0.40 0.30 {tasks}/400 1234\n"));
    }

    /// Idle ticks of each CPU.
    fn idle(&self, ticks: [u64; 4]) {
        let lines: String =
            (0..4).map(|cpu| format!("cpu{cpu} 5 0 5 {} 0 0 0\n", ticks[cpu])).collect();
        self.write("proc/stat", &format!("cpu  1 1 1 1 1\n{lines}intr 1 2 3\n"));
    }

    fn tokens(&self, cpus: &[u32]) -> Tokens {
        let cpus: Vec<_> = cpus.iter().copied().map(CpuId::new).collect();
        Tokens::under(self.root(), &cpus).unwrap()
    }
}

/// Takes as many as there are.
fn take_all(tokens: &Tokens, now: u64) -> u32 {
    (0..100).take_while(|_| tokens.take(now, 0.0)).count() as u32
}

fn give_all(tokens: &Tokens, spun: u64) {
    while tokens.spinners() > 0 {
        tokens.give(spun);
    }
}

#[test]
fn there_are_as_many_tokens_as_idle_cpus() {
    let files = Files::new();
    let tokens = files.tokens(&[0, 1, 2, 3]);
    let mut now = 1_000 * MS;
    // Who asks is alone.
    assert_eq!(take_all(&tokens, now), 4);
    give_all(&tokens, 0);
    // Three others: within some ms there is one CPU left.
    files.running(4);
    let mut left = Vec::new();
    for _ in 0..8 {
        now += 2 * MS;
        left.push(take_all(&tokens, now));
        give_all(&tokens, 0);
    }
    assert!(left.is_sorted_by(|a, b| a >= b) && left[7] == 1, "{left:?}");
    // A spinner is no work: of the four that run there are three others.
    now += 100 * MS;
    assert!(tokens.take(now, 0.0));
    now += 100 * MS;
    assert!(tokens.keeps(now));
    assert_eq!(tokens.idle_cpus(), 1);
    assert!(!tokens.take(now, 0.0), "the one that is left is spun on");
}

#[test]
fn token_that_is_not_there_any_more_is_not_kept() {
    let files = Files::new();
    let tokens = files.tokens(&[0, 1, 2, 3]);
    assert!(tokens.take(1_000 * MS, 0.0));
    assert!(tokens.keeps(1_000 * MS));
    files.running(9);
    assert!(!tokens.keeps(1_100 * MS));
    tokens.give(0);
    assert!(!tokens.take(1_101 * MS, 0.0));
    assert_eq!(tokens.spinners(), 0);
}

#[test]
fn what_a_thread_works_itself_does_not_keep_it_from_spinning() {
    let files = Files::new();
    let tokens = files.tokens(&[0, 1, 2, 3]);
    let now = 1_000 * MS;
    // Four run: the one that asks, two that compute, and one that waits at times and is to spin too.
    files.running(4);
    for later in 0..50 {
        let _ = tokens.take(now + 2 * later * MS, 0.0);
        give_all(&tokens, 0);
    }
    let now = now + 100 * MS;
    assert!(tokens.take(now, 0.0) && !tokens.take(now, 0.9), "it was no spinner that looked");
    // The spinner looks: of the four it is one, and three work.
    assert!(tokens.keeps(now + 2 * MS));
    assert!(!tokens.take(now + 2 * MS, 0.4), "not half a CPU");
    assert!(tokens.take(now + 2 * MS, 0.9));
    assert!(!tokens.take(now + 2 * MS, 0.9), "it counts for who asks alone");
}

#[test]
fn old_estimate_is_none() {
    let files = Files::new();
    let tokens = files.tokens(&[0, 1, 2, 3]);
    assert!(tokens.take(1_000 * MS, 0.0));
    // Whoever was to renew it holds the lock and has no CPU.
    let held = tokens.machine.lock().unwrap();
    assert!(tokens.take(1_019 * MS, 0.0));
    assert!(!tokens.take(1_021 * MS, 0.0) && !tokens.keeps(1_021 * MS));
    drop(held);
    assert!(tokens.take(1_021 * MS, 0.0));
}

#[test]
fn tasks_of_other_cpus_do_not_count() {
    let files = Files::new();
    files.idle([100; 4]);
    // Others compute on CPUs 2 and 3 and more wait there; 0 and 1 are idle.
    files.running(9);
    let tokens = files.tokens(&[0, 1]);
    let now = 1_000 * MS;
    assert_eq!(take_all(&tokens, now), 0, "nothing is known of idle times yet");
    files.idle([101, 101, 100, 100]);
    assert_eq!(take_all(&tokens, now + 10 * MS), 2);
    // Both were spun on for 10 ms: still theirs.
    give_all(&tokens, 10 * MS);
    assert_eq!(take_all(&tokens, now + 20 * MS), 2);
    give_all(&tokens, 0);
    // Now somebody computes on both.
    for later in [30, 40, 50] {
        let _ = tokens.take(now + later * MS, 0.0);
        give_all(&tokens, 0);
    }
    assert_eq!(take_all(&tokens, now + 60 * MS), 0);
    // Nobody runs anywhere: seen at once, though no tick has passed.
    files.running(1);
    let now = now + 200 * MS;
    assert_eq!(take_all(&tokens, now), 2);
}

#[test]
fn quota_of_the_cgroup_bounds_tokens() {
    for v2 in [true, false] {
        let files = Files::new();
        let usage = |ms: u64| {
            if v2 {
                let text = format!("usage_usec {}\nuser_usec 1\n", ms * 1_000);
                files.write("sys/fs/cgroup/a/cpu.stat", &text);
            } else {
                files.write("sys/fs/cgroup/cpu/a/cpuacct.usage", &format!("{}\n", ms * MS));
            }
        };
        if v2 {
            files.write("proc/self/cgroup", "0::/a/b\n");
            files.write("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
            files.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        } else {
            files.write("proc/self/cgroup", "4:memory:/x\n1:cpu,cpuacct:/a/b\n");
            files.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000");
            files.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000");
            files.write("sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1");
        }
        usage(1_000);
        let tokens = files.tokens(&[0, 1, 2, 3]);
        let now = 1_000 * MS;
        assert_eq!(take_all(&tokens, now), 0, "nothing is known of the usage yet");
        usage(1_002);
        // 1.3 of 1.5 CPUs are left.
        assert_eq!(take_all(&tokens, now + 10 * MS), 1);
        give_all(&tokens, 5 * MS);
        // 1.2 CPUs were used, of which the spinner half a one: 0.8 are left.
        usage(1_014);
        assert_eq!(take_all(&tokens, now + 20 * MS), 1);
        give_all(&tokens, 0);
        usage(1_029);
        assert_eq!(take_all(&tokens, now + 30 * MS), 0);
    }
}

#[test]
fn usage_that_cannot_be_read_any_more_leaves_no_token() {
    let files = Files::new();
    files.write("proc/self/cgroup", "0::/a\n");
    files.write("sys/fs/cgroup/a/cpu.max", "200000 100000\n");
    let usage = |text: &str| files.write("sys/fs/cgroup/a/cpu.stat", text);
    usage("usage_usec 1000\n");
    let tokens = files.tokens(&[0, 1, 2, 3]);
    let now = 1_000 * MS;
    assert_eq!(take_all(&tokens, now), 0, "nothing is known of the usage yet");
    assert_eq!(take_all(&tokens, now + 10 * MS), 2);
    give_all(&tokens, 0);
    // The process has been moved to another group, and this one removed.
    usage("");
    assert_eq!(take_all(&tokens, now + 20 * MS), 0);
    usage("usage_usec 1000\n");
    assert_eq!(take_all(&tokens, now + 30 * MS), 0, "nothing is known of the usage again");
    assert_eq!(take_all(&tokens, now + 40 * MS), 2);
}

#[test]
fn renewed_tokens_are_all_there_and_know_nothing_of_the_time_before() {
    let files = Files::new();
    files.write("proc/self/cgroup", "0::/a\n");
    files.write("sys/fs/cgroup/a/cpu.max", "200000 100000\n");
    files.write("sys/fs/cgroup/a/cpu.stat", "usage_usec 1000\n");
    let tokens = files.tokens(&[0, 1, 2, 3]);
    let now = 1_000 * MS;
    assert_eq!(take_all(&tokens, now), 0);
    assert_eq!(take_all(&tokens, now + 10 * MS), 2);
    assert!(tokens.renew());
    assert_eq!((tokens.spinners(), tokens.idle_cpus()), (0, 0));
    assert_eq!(take_all(&tokens, now + 11 * MS), 0, "nothing is known of the usage yet");
    assert_eq!(take_all(&tokens, now + 21 * MS), 2);
    // A thread that is not in the child was looking.
    let held = tokens.machine.lock().unwrap();
    assert!(!tokens.renew());
    drop(held);
}

#[test]
fn without_proc_there_are_no_tokens_and_an_error_says_so() {
    let empty = tempfile::tempdir().unwrap();
    let error = Tokens::under(empty.path(), &[CpuId::new(0)]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
}

#[test]
fn this_machine_has_sources() {
    let tokens = Tokens::new().unwrap();
    let now = now();
    let taken = tokens.take(now, 0.0);
    assert!(tokens.seen.0.at.load(Relaxed) == now);
    assert_eq!(tokens.spinners(), u32::from(taken));
}

#[test]
fn threads_at_once_never_leave_a_token_behind() {
    let files = Files::new();
    let tokens = files.tokens(&[0, 1, 2, 3]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    if tokens.take(now(), 0.0) {
                        assert!(tokens.spinners() >= 1);
                        tokens.give(100);
                    }
                }
            });
        }
    });
    assert_eq!(tokens.spinners(), 0);
}
