//! seccomp filters of native sandboxes: an allow list, a deny list, and rules on arguments.
//!
//! Three filters, because each has one action for what it does not let through:
//! dangerous calls are refused with EPERM, so that a program reports it to its user;
//! calls on neither list do not exist (ENOSYS), so that libraries fall back to others;
//! and calls that would only cost other sandboxes return success without being made.

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

mod arguments;
mod lists;
mod tree;

/// The filters, in the order in which they are installed.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    allowed: BpfProgram,
    refused: BpfProgram,
    pretended: BpfProgram,
}

// === impl Filters ===

impl Filters {
    /// Compiles them; they are the same for every sandbox.
    pub(crate) fn compile() -> Result<Self, BackendError> {
        let known = lists::ALLOWED.iter().chain(lists::REFUSED).copied();
        let mut refused = arguments::refused()?;
        refused.extend(lists::REFUSED.iter().map(|call| (*call, Vec::new())));
        Ok(Self {
            allowed: tree::allow(known, libc::ENOSYS),
            refused: answer(refused, libc::EPERM.unsigned_abs())?,
            pretended: answer(arguments::pretended()?, 0)?,
        })
    }

    /// Installs them on the calling thread. It must have `no_new_privs`.
    pub(crate) fn install(&self) -> Result<(), seccompiler::Error> {
        for filter in [&self.allowed, &self.refused, &self.pretended] {
            seccompiler::apply_filter(filter)?;
        }
        Ok(())
    }
}

/// A filter that makes calls that match its rules return `errno`; 0 is success.
fn answer(rules: arguments::Rules, errno: u32) -> Result<BpfProgram, BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let answer = SeccompAction::Errno(errno);
    SeccompFilter::new(rules, SeccompAction::Allow, answer, arch)?.try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_compile_and_the_lists_are_disjoint() {
        Filters::compile().unwrap();
        for call in lists::REFUSED {
            assert!(
                !lists::ALLOWED.contains(call),
                "system call {call} is on both lists"
            );
        }
    }
}
