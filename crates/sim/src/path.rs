//! The two-tier path of virtual disks: tasks, the guest's scheduler, the virtqueue, the host's limits and
//! scheduler, the device.

mod condition;
mod outcome;

pub use condition::{
    Condition, ConditionError, Length, MAX_TASKS, MAX_VMS, Priority, Service, Task, Until, Vm,
};
pub use outcome::{JUDGED, Outcome, TaskOutcome};
