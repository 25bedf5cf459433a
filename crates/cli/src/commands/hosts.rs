//! Egress allow-lists on the command line: help text and validation.

use crate::failure::Failure;
use crate::output;
use k8e_model::EgressPolicy;

/// Help text about HOSTS.
macro_rules! help {
    () => {
        "\
HOSTS is a list, separated by commas:
  api.example.com      this host, on ports 80 and 443
  *.example.com        every subdomain at any depth, not example.com itself
  db.example.com:5432  this host on this TCP port only
  10.1.0.0/16:5432     a network on this TCP port; 1.2.3.4:22 for one address
  @python @npm @github the hosts of the package index, or of git and releases
  @read-only           hosts to download packages and code from, without those that accept uploads
  @default             the built-in default; with a token, code can push to github.com and publish
                       to npm
  none                 no egress
  all                  every public address, on every port: code can send what it reads anywhere"
    };
}
pub(crate) use help;

/// Validates a list before anything is sent, and warns about `all`.
pub(crate) fn check(hosts: &[String]) -> Result<(), Failure> {
    if EgressPolicy::parse(hosts)? == EgressPolicy::All {
        output::note(
            "warning: `all` allows every public address: code in the sandbox can send what it reads anywhere",
        );
    }
    Ok(())
}
