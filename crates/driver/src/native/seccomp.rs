//! Which system calls the sandbox may make.
//!
//! Three filters, because one can only give one answer to what it does not let through:
//! what is known to be dangerous is refused with EPERM, so that a program tells its user so;
//! everything that is on neither list does not exist (ENOSYS), so that libraries fall back to what does;
//! and what would only cost others is answered with success and not done.

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

mod arguments;
mod lists;
mod tree;

/// The filters, in the order they are installed.
#[derive(Clone, Debug)]
pub(crate) struct Filters {
    allowed: BpfProgram,
    refused: BpfProgram,
    pretended: BpfProgram,
}

// === impl Filters ===

impl Filters {
    /// Compiles them; they do not depend on the sandbox.
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

    /// Installs them on the calling thread, for good. It must have `no_new_privs`.
    pub(crate) fn install(&self) -> Result<(), seccompiler::Error> {
        for filter in [&self.allowed, &self.refused, &self.pretended] {
            seccompiler::apply_filter(filter)?;
        }
        Ok(())
    }
}

/// A filter that answers what its rules match with `errno`, without making the call; 0 is success.
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
