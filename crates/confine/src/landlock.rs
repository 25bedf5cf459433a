//! Landlock ruleset: the files that the process may open, whatever their permissions are.

use crate::{ConfineError, Confinement};
use landlock::{
    ABI, Access as _, AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset,
    RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetError, RulesetStatus, Scope,
};
use std::io;
use std::path::Path;

/// The newest ABI whose rights are used; an older kernel enforces those it knows.
const RIGHTS: ABI = ABI::V6;

/// Restricts the calling process. Returns the rights that this kernel does not enforce.
pub(crate) fn restrict(confinement: &Confinement) -> Result<Option<String>, ConfineError> {
    let status = apply(confinement)
        .map_err(|error| ConfineError::Step("apply Landlock", io::Error::other(error)))?;
    Ok(match status {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some(
            "this kernel has an old Landlock that does not restrict all that the server may do; use Linux 6.12 or newer".to_owned(),
        ),
        RulesetStatus::NotEnforced => Some(
            "this kernel has no Landlock: file permissions alone keep the server from the host's files; boot with lsm=landlock,… or use Linux 6.12 or newer".to_owned(),
        ),
    })
}

fn apply(confinement: &Confinement) -> Result<RulesetStatus, RulesetError> {
    let all = AccessFs::from_all(RIGHTS);
    // W^X for files: what the process can write it can never execute.
    let write =
        all & !(AccessFs::Execute | AccessFs::MakeBlock | AccessFs::MakeChar | AccessFs::IoctlDev);
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .scope(Scope::from_all(RIGHTS))?
        .create()?;
    for path in &confinement.read_write {
        rules = allow(rules, path, write)?;
    }
    for path in &confinement.read_only {
        rules = allow(rules, path, read)?;
    }
    rules.restrict_self().map(|restricted| restricted.ruleset)
}

/// A path that does not exist needs no rule.
fn allow(
    rules: RulesetCreated,
    path: &Path,
    rights: landlock::BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    let Ok(there) = PathFd::new(path) else {
        return Ok(rules);
    };
    let rights = match path.is_dir() {
        true => rights,
        // READ_DIR is only valid for directories.
        false => rights & AccessFs::from_file(RIGHTS),
    };
    rules.add_rule(PathBeneath::new(there, rights))
}
