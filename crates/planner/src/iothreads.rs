//! How many IOThreads serve a VM's disks, which queue goes to which, and where they run.
//!
//! Problem: QEMU serves all virtqueues of a disk in one IOThread unless told
//! otherwise (`iothread-vq-mapping`). One thread can be too few for a fast disk;
//! more than the load needs cost CPUs that guests could use, and an IOThread
//! that waits for a CPU behind a vCPU makes a tail.
//!
//! Terms: a *pool* is the IOThreads that the disks of one VM share: one pool for
//! disks with a target, one for disks without. Its *demand* is the declared
//! requests per second of its disks. CPUs are *left* when each vCPU has one to
//! itself; a VM that does not say how many it has counts as one.
//!
//! Rule:
//! 1. A pool has an IOThread for each [`REQUESTS_PER_IOTHREAD`] of its demand, at
//!    least one; no more than it has queues in use (a Linux guest uses at most one
//!    for each vCPU of a disk: drivers/block/virtio_blk.c, init_vq), no more than
//!    CPUs left.
//! 2. Queues go to the pool's IOThreads in turn: queue q to thread q mod n, as
//!    QEMU does without a list (hw/virtio/iothread-vq-mapping.c); a pool's next
//!    disk goes on where the last one ended.
//! 3. IOThreads take the CPUs left from the highest down, pools with a target
//!    first. Those with and without a target do not share a CPU; those of a kind
//!    share one, also across VMs, up to [`REQUESTS_PER_IOTHREAD`]. vCPUs get the CPUs not
//!    taken. If too few are left, IOThreads share those beyond that or are not
//!    pinned, and a reason says so.
//!
//! A rate that is not declared counts as one IOThread's worth for a disk with a
//! target, and as nothing for one without: background gets what is left.
//!
//! Not looked at: request sizes, NUMA nodes, SMT siblings, and how evenly a guest
//! uses its queues.
//!
//! Pure: same input, same mapping.
//!
//! Properties (tests of the same name): `every_queue_has_one_iothread`,
//! `every_iothread_has_a_queue`, `small_rate_gets_one_iothread`,
//! `iothreads_suffice_for_the_rate`, `never_more_iothreads_than_queues_or_cpus_left`,
//! `background_shares_no_iothread_with_a_target`, `iothreads_stay_off_the_vcpus`,
//! `small_vms_share_a_cpu`, `too_few_cpus_are_named`,
//! `mapping_is_the_same_for_the_same_input`.

use rtvirtio_spec::plan::{DiskIoThreads, IoThread, IoThreads, Reason, VmIoThreads};
use rtvirtio_spec::specification::{Backend, Disk, Specification, Vm};
use rtvirtio_units::{CpuId, IoThreadId, Iops};

/// Requests per second that one IOThread is given: 60 % of 50,000.
///
/// 50,000 are 20 µs of CPU for each request, above the 4 to 17 µs of one QEMU thread in published
/// measurements (qemu-devel, 2022-07-25, "block: add vhost-blk backend": 57,500 random reads of
/// 4 KiB a second on an SSD, 123,000 to 253,000 on a RAM disk, all at depth 128; a synchronous
/// task lets nothing be batched). At 60 % a request waits 1.5 times its own 20 µs on average
/// (M/M/1), little beside a target of a millisecond.
pub const REQUESTS_PER_IOTHREAD: f64 = 30_000.0;

/// The IOThreads of all kernel-path VMs whose queues are known, on a host with the CPUs `cpus`
/// (ascending), and for people what is not as it should be.
#[must_use]
pub fn assign(specification: &Specification, cpus: &[CpuId]) -> (IoThreads, Vec<Reason>) {
    let vms = &specification.vms;
    let mut planned: Vec<_> = vms
        .iter()
        .map(|vm| VmIoThreads {
            vm: vm.name.clone(),
            vcpus: vm.vcpus,
            threads: Vec::new(),
            disks: Vec::new(),
        })
        .collect();
    let vcpus: usize = vms.iter().map(|vm| vm.vcpus.unwrap_or(1) as usize).sum();
    let left = cpus.len().saturating_sub(vcpus);
    let mut places = Places { free: cpus[cpus.len() - left..].to_vec(), ..Places::default() };
    let mut reasons = Vec::new();
    for has_target in [true, false] {
        for (vm, planned) in vms.iter().zip(&mut planned) {
            if let Some(pool) = Pool::of(vm, has_target) {
                reasons.extend(pool.caveats(left));
                pool.place(left, &mut places, planned);
            }
        }
    }
    planned.retain(|vm| !vm.disks.is_empty());
    if planned.is_empty() {
        return (IoThreads::default(), reasons);
    }
    if left == 0 {
        reasons.push(Reason::NoCpuLeft { cpus: cpus.len(), vcpus });
    } else if places.crowded {
        let per_iothread = REQUESTS_PER_IOTHREAD;
        reasons.push(Reason::TooFewCpus { cpus: cpus.len(), vcpus, left, per_iothread });
    }
    let silent = vms.iter().filter(|vm| vm.vcpus.is_none()).count();
    if silent > 0 {
        reasons.push(Reason::VcpusUnknown { vms: silent, of: vms.len() });
    }
    let vcpu_cpus = match places.taken.len() {
        0 => Vec::new(),
        taken => cpus[..cpus.len() - taken].to_vec(),
    };
    (IoThreads { vcpu_cpus, vms: planned }, reasons)
}

/// The disks of a VM that share IOThreads.
struct Pool<'a> {
    vm: &'a Vm,
    has_target: bool,
    /// Each with its number of queues.
    disks: Vec<(&'a Disk, u32)>,
    /// Requests per second.
    demand: f64,
    /// Whether a task of a disk with a target declares no rate.
    is_open: bool,
}

impl<'a> Pool<'a> {
    fn of(vm: &'a Vm, has_target: bool) -> Option<Self> {
        // The data plane's IOThreads are its own.
        if vm.backend != Backend::Kernel {
            return None;
        }
        let tasks_of = |disk: &'a Disk| vm.tasks.iter().filter(move |t| t.disk == disk.name);
        let mut disks = Vec::new();
        let mut declared = 0.0;
        let mut is_open = false;
        for disk in &vm.disks {
            let is_of_kind = tasks_of(disk).any(|t| t.target.is_some()) == has_target;
            let Some(queues) = vm.queues_of(disk).filter(|_| is_of_kind) else { continue };
            disks.push((disk, queues));
            for task in tasks_of(disk) {
                declared += task.load.iops.map_or(0.0, Iops::get);
                is_open |= has_target && task.load.iops.is_none();
            }
        }
        if disks.is_empty() {
            return None;
        }
        let demand = if is_open { declared.max(REQUESTS_PER_IOTHREAD) } else { declared };
        Some(Self { vm, has_target, disks, demand, is_open })
    }

    /// IOThreads that the demand asks for.
    fn wanted(&self) -> usize {
        ((self.demand / REQUESTS_PER_IOTHREAD).ceil() as usize).max(1)
    }

    /// Queues that a Linux guest uses.
    fn used_queues(&self) -> usize {
        let used = |&(_, queues): &(_, u32)| queues.min(self.vm.vcpus.unwrap_or(queues)) as usize;
        self.disks.iter().map(used).sum()
    }

    /// IOThreads that it gets where `left` CPUs are left.
    fn size(&self, left: usize) -> usize {
        self.wanted().min(self.used_queues()).min(left.max(1))
    }

    fn caveats(&self, left: usize) -> Vec<Reason> {
        let vm = || self.vm.name.clone();
        let mut caveats = Vec::new();
        if self.is_open {
            caveats.push(Reason::OpenRate { vm: vm(), per_iothread: REQUESTS_PER_IOTHREAD });
        }
        let (wanted, gets) = (self.wanted(), self.size(left));
        if gets < wanted {
            let (iops, queues) = (self.demand, self.used_queues());
            caveats.push(Reason::FewerIoThreads { vm: vm(), iops, wanted, queues, left, gets });
        }
        caveats
    }

    /// Adds its IOThreads and disks to the VM's.
    fn place(&self, left: usize, places: &mut Places, planned: &mut VmIoThreads) {
        let size = self.size(left);
        let first = planned.threads.len() as u32 + 1;
        let ids = (first..).map(IoThreadId::new).take(size);
        planned.threads.extend(ids.clone().map(|id| {
            let cpu = places.take(self.demand / size as f64, self.has_target);
            IoThread { id, cpu }
        }));
        let mut turn = ids.cycle();
        planned.disks.extend(self.disks.iter().map(|&(disk, queues)| DiskIoThreads {
            disk: disk.name.clone(),
            queues: turn.by_ref().take(queues as usize).collect(),
        }));
    }
}

/// The CPUs left for IOThreads.
#[derive(Default)]
struct Places {
    /// Not taken yet, ascending.
    free: Vec<CpuId>,
    taken: Vec<Taken>,
    /// Whether an IOThread had to go where there is no room for it.
    crowded: bool,
}

struct Taken {
    cpu: CpuId,
    has_target: bool,
    /// Requests per second of its IOThreads.
    demand: f64,
}

impl Places {
    /// A CPU for an IOThread of that demand; `None` if no CPU is left at all.
    fn take(&mut self, demand: f64, has_target: bool) -> Option<CpuId> {
        let has_room =
            |t: &Taken| t.has_target == has_target && t.demand + demand <= REQUESTS_PER_IOTHREAD;
        let place = match self.taken.iter().position(has_room) {
            Some(place) => place,
            None => match self.free.pop() {
                Some(cpu) => {
                    self.taken.push(Taken { cpu, has_target, demand: 0.0 });
                    self.taken.len() - 1
                }
                None => {
                    self.crowded = true;
                    self.least_bad(has_target)?
                }
            },
        };
        let taken = &mut self.taken[place];
        taken.demand += demand;
        Some(taken.cpu)
    }

    /// The CPU with the least demand, one of the same kind if there is one.
    fn least_bad(&self, has_target: bool) -> Option<usize> {
        let other_kind = |t: &Taken| t.has_target != has_target;
        (0..self.taken.len()).min_by(|&a, &b| {
            let (a, b) = (&self.taken[a], &self.taken[b]);
            other_kind(a).cmp(&other_kind(b)).then(a.demand.total_cmp(&b.demand))
        })
    }
}

#[cfg(test)]
mod tests;
