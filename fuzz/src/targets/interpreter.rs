//! Streams of the code interpreter's kernels.

use crate::outcome;
use k8e_engine::fuzzing;

pub(super) fn kernel_streams(bytes: &[u8]) -> u64 {
    outcome(&format!("{:?}", fuzzing::kernel_streams(bytes)))
}
