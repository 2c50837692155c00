//! What a few idle disks cost. The acceptance's 256 are in `make bench EXPERIMENT=dataplane-footprint`.

use std::process::Command;

use rtvirtio_engine::testing::has_io_uring;

use crate::scratch_disk::lab;

#[test]
fn idle_disks_cost_what_they_may() {
    if !has_io_uring() {
        return;
    }
    let footprint = ["bench", "dataplane", "footprint", "--devices", "8"];
    let output = Command::new(lab()).args(footprint).output().unwrap();
    let [said, complained] = [output.stdout, output.stderr].map(|t| String::from_utf8(t).unwrap());
    // 3: over a limit. The binary of this test may be a debug build, larger and slower.
    assert_eq!(output.status.code(), Some(0), "{said}{complained}");
}
