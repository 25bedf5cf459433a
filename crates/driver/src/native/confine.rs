//! Landlock ruleset of a native sandbox, applied last, on top of the namespaces.
//!
//! The file system is already the sandbox's own; what Landlock adds holds even if that fails:
//! no change of the mount tree, no new device nodes, no ioctl on a device outside `/dev`, and no
//! signal or abstract socket to a process outside the sandbox.

use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreatedAttr as _, RulesetError, Scope,
};

/// The newest ABI whose rights are used; an older kernel enforces those it knows.
const RIGHTS: ABI = ABI::V6;

/// Restricts the calling thread and its future children.
pub(super) fn landlock() -> Result<(), RulesetError> {
    let all = AccessFs::from_all(RIGHTS);
    let files = all & !(AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev);
    let open = |path: &str| PathFd::new(path);
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .scope(Scope::from_all(RIGHTS))?
        .create()?;
    if let Ok(root) = open("/") {
        rules = rules.add_rule(PathBeneath::new(root, files))?;
    }
    if let Ok(dev) = open("/dev") {
        rules = rules.add_rule(PathBeneath::new(dev, files | AccessFs::IoctlDev))?;
    }
    rules.restrict_self().map(drop)
}

/// Rights that this kernel does not enforce, and what to do.
pub(crate) fn landlock_missing() -> Option<String> {
    let knows = |abi: ABI| {
        Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(abi))
            .and_then(|rules| {
                if abi == RIGHTS {
                    rules.scope(Scope::from_all(abi))
                } else {
                    Ok(rules)
                }
            })
            .and_then(Ruleset::create)
            .is_ok()
    };
    let what = if !knows(ABI::V1) {
        "has no Landlock: sandboxes rely on namespaces and seccomp alone; boot with lsm=landlock,… or use Linux 6.12 or newer"
    } else if !knows(RIGHTS) {
        "has an old Landlock that does not restrict device ioctls or signals: namespaces alone do; use Linux 6.12 or newer"
    } else {
        return None;
    };
    Some(format!("this kernel {what}"))
}
