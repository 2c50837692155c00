//! Integration tests of the workspace and its binary.

mod archive;
mod bench_iocores;
mod cgroup2;
mod cli;
mod ctl;
mod dataplane;
mod dictionary;
mod floods;
mod guest;
mod guest_knobs;
mod in_guest;
mod integrity;
mod libvirt;
mod lifecycle;
mod mapping;
mod messages;
mod network;
mod nic;
mod nvme;
mod operator;
mod packaging;
mod readme;
mod reference;

mod run;
mod scratch_disk;
mod simulate;
mod storage;
mod systemd;
mod tour;
mod traps;
mod tree;
mod watch_data_plane;
mod workspace;
