//! The system calls of a data plane that serves.
//!
//! Two programs, of which the stricter answer counts: one answers ENOSYS to what the C library
//! does in another way then, which can be looked into; the other kills the process at all that is
//! not on the list. Calls that come with every batch of requests are allowed whatever their
//! arguments: the kernel remembers that, and runs no program for them.

use libc::c_long;
use seccompiler::{
    BackendError as Error, BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Is,
    SeccompCondition, SeccompFilter, SeccompRule,
};

/// Allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Requests: rings, calls, engines.
    libc::SYS_io_uring_enter,
    libc::SYS_write,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads and time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    // Of the calibration of wake-ups, where the vDSO does not say it.
    libc::SYS_getcpu,
    // Of a panic, with RUST_BACKTRACE.
    libc::SYS_getcwd,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_geteuid,
    libc::SYS_getpriority,
    libc::SYS_getuid,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_setpriority,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    // Descriptors.
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_lseek,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_writev,
    // Sockets.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_listen,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Files, with the service user's rights.
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    // The threads of front ends, of which some are vCPUs.
    libc::SYS_getdents64,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    // Of alarm(2).
    libc::SYS_setitimer,
    libc::SYS_umask,
    libc::SYS_unlinkat,
];

/// The same, where an architecture has them beside those above.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[c_long] = &[
    libc::SYS_alarm,
    libc::SYS_chmod,
    libc::SYS_epoll_wait,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[c_long] = &[];

/// All that the guard of vCPUs does.
const GUARD: &[c_long] = &[
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_clock_nanosleep,
    // The socket.
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_write,
    libc::SYS_sendto,
    libc::SYS_fcntl,
    // /proc.
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    // Memory, signals, the end.
    libc::SYS_brk,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
];

/// `BLKDISCARD`, `BLKGETSIZE64`, `BLKSSZGET` and `BLKPBSZGET` of `linux/fs.h`, `FIONBIO`,
/// `TUNSETOFFLOAD`, `TUNSETQUEUE` and what is asked of a TAP's queue that is handed over (`TUNGETIFF`, `TUNSETVNETHDRSZ` and
/// `TUNSETVNETLE`) of `linux/if_tun.h`, and `NVME_IOCTL_ID` and `NVME_IOCTL_ADMIN_CMD` of `linux/nvme_ioctl.h`: without capabilities, which are
/// given up, the latter can only ask a device what it is.
const IOCTLS: [u32; 12] = [
    0x1277,
    0x8008_1272,
    0x1268,
    0x127b,
    libc::FIONBIO as u32,
    crate::tap::SET_OFFLOADS,
    crate::tap::SET_QUEUE,
    crate::tap::ADOPT[0],
    crate::tap::ADOPT[1],
    crate::tap::ADOPT[2],
    0x4e40,
    0xc048_4e41,
];

const FCNTLS: [i32; 9] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// `PR_GET_AUXV` and `PR_SET_VMA` of `linux/prctl.h`: what the processor can do, and names of
/// mappings.
const PRCTLS: [i32; 3] = [libc::PR_SET_NAME, 0x4155_5856, 0x5356_4d41];

/// A thread of this process, and no name space of its own.
const THREAD: i32 = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
const NAME_SPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// The programs, in any order.
pub(super) fn programs() -> Result<Vec<BpfProgram>, Error> {
    Ok(vec![refused()?, allowed()?])
}

/// A rule for one argument.
fn rule(argument: u8, is: Is, value: u64) -> Result<SeccompRule, Error> {
    SeccompRule::new(vec![SeccompCondition::new(argument, Len::Dword, is, value)?])
}

/// One rule for each value that an argument may have.
fn one_of(argument: u8, values: &[u32]) -> Result<Vec<SeccompRule>, Error> {
    values.iter().map(|&value| rule(argument, Is::Eq, value.into())).collect()
}

/// The flags of `clone3` lie in memory: the C library then takes `clone`.
fn refused() -> Result<BpfProgram, Error> {
    let rules = [(libc::SYS_clone3, Vec::new())].into_iter().collect();
    let refuse = SeccompAction::Errno(libc::ENOSYS as u32);
    let target = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::Allow, refuse, target)?.try_into()
}

fn allowed() -> Result<BpfProgram, Error> {
    let not_executable = || rule(2, Is::MaskedEq(libc::PROT_EXEC as u64), 0);
    let thread = Is::MaskedEq((THREAD | NAME_SPACES) as u32 as u64);
    // What a limit is, not what it shall be.
    let no_new_limit = SeccompCondition::new(2, Len::Qword, Is::Eq, 0)?;
    let unsigned = |values: &[i32]| values.iter().map(|&v| v as u32).collect::<Vec<_>>();
    let looked_into = [
        // Refused by the other program.
        (libc::SYS_clone3, Vec::new()),
        (libc::SYS_clone, vec![rule(0, thread, THREAD as u64)?]),
        (libc::SYS_fcntl, one_of(1, &unsigned(&FCNTLS))?),
        (libc::SYS_ioctl, one_of(1, &IOCTLS)?),
        (libc::SYS_mmap, vec![not_executable()?]),
        (libc::SYS_mprotect, vec![not_executable()?]),
        (libc::SYS_prctl, one_of(0, &unsigned(&PRCTLS))?),
        (libc::SYS_prlimit64, vec![SeccompRule::new(vec![no_new_limit])?]),
        (libc::SYS_socket, one_of(0, &[libc::AF_UNIX as u32])?),
        // To abort, of a panic in a panic.
        (libc::SYS_tgkill, one_of(0, &[std::process::id()])?),
    ];
    only(ALLOWED.iter().chain(ALLOWED_HERE), looked_into)
}

/// The guard's.
pub(super) fn guard() -> Result<BpfProgram, Error> {
    let not_executable = || rule(2, Is::MaskedEq(libc::PROT_EXEC as u64), 0);
    let looked_into = [
        (libc::SYS_mmap, vec![not_executable()?]),
        (libc::SYS_mprotect, vec![not_executable()?]),
        // To read.
        (
            libc::SYS_openat,
            vec![rule(2, Is::MaskedEq((libc::O_ACCMODE | libc::O_CREAT) as u64), 0)?],
        ),
    ];
    only(GUARD.iter(), looked_into)
}

/// Ends the process at all but these.
fn only<'a>(
    any: impl Iterator<Item = &'a c_long>,
    looked_into: impl IntoIterator<Item = (c_long, Vec<SeccompRule>)>,
) -> Result<BpfProgram, Error> {
    let any = any.map(|&call| (call, Vec::new()));
    let rules = any.chain(looked_into).collect();
    let target = std::env::consts::ARCH.try_into()?;
    SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, target)?.try_into()
}
