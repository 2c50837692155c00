//! The two-tier path of virtual disks: tasks, the guest's scheduler, the virtqueue, the host's limits and
//! scheduler, the device.
//!
//! Terms. A *condition* is the device, what stands before it, and the VMs that share it ([`Condition`]); its
//! *outcome* what their tasks had ([`Outcome`]). A *tier* is a block device with a scheduler: the host's, and
//! one within each guest (`tier`).
//!
//! Model. A task issues at its rate, as fio does, reads and writes apart: what could not be issued in time is made up
//! for, but not what the warm-up leaves. Tasks without a rate are at work before the others start. A request
//! goes through the guest's scheduler, then, as one of the VM's IOThread, through the limits of the VM's cgroup
//! (`throttle`) and the host's scheduler, to the device (`rtvirtio_ssd`). Without a guest a task is a
//! process in the VM's cgroup. Schedulers: bfq, mq-deadline, kyber, none, modelled after what
//! is published of them; or the data plane's own, `rtvirtio_qos`, itself.
//!
//! Left out, beside what `bfq` names: CPU time (a request takes `software` longer, whoever else
//! runs), merging, buffered writes, flushes, the sector order of mq-deadline, the virtqueue's limit of 128 to 256
//! requests, more than one hardware queue. Limits are not applied in the data plane.
//!
//! Pure: the seed is the condition's. Properties (tests of the same name): `same_seed_same_outcome`,
//! `each_request_ends_once`, `each_task_goes_on_at_its_rate_at_most`, `lone_task_waits_for_the_device_alone`,
//! `device_delivers_its_capacity`, `idling_holds_others_up`, `no_idling_no_tail`, `weights_divide_a_saturated_device`,
//! `real_time_class_goes_first`, `limit_caps_a_writer`, `promises_hold_beside_a_deep_writer`.

mod bfq;
mod clocks;
mod condition;
mod deadline;
mod kyber;
mod outcome;
mod request;
mod runner;
mod throttle;
mod tick;
mod tier;
mod world;

#[cfg(test)]
mod tests;

pub use condition::{
    Condition, ConditionError, Length, MAX_TASKS, MAX_VMS, Priority, Service, Task, Until, Vm,
};
pub use outcome::{Outcome, TaskOutcome};
pub use world::run;
