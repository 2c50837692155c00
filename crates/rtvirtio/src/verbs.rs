//! One module a verb: its arguments and what it does.

pub(crate) mod apply;
pub(crate) mod boot;
pub(crate) mod calibrate;
pub(crate) mod ctl;
pub(crate) mod doctor;
pub(crate) mod generate;
pub(crate) mod init;
pub(crate) mod mapping;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod serve;
pub(crate) mod top;
pub(crate) mod watch;
