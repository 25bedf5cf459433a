//! Lists of hosts as people type them, for every command that takes one.

use crate::failure::Failure;
use crate::output;
use k8e_model::EgressPolicy;

/// What to write for HOSTS.
macro_rules! help {
    () => {
        "\
Hosts, with commas between them:
  api.example.com      this host, on ports 80 and 443
  *.example.com        every host below it at any depth, not itself
  db.example.com:5432  this host on this TCP port only
  10.1.0.0/16:5432     addresses, whatever is there; 1.2.3.4:22 for one
  @python @npm @github the package indexes and the hosts that git and releases need
  @read-only           hosts to fetch packages and code from that take nothing in
  @default             what a session gets that names none, unless the server was told otherwise; with a
                       token, code can write to github.com and publish to npm
  none                 nothing
  all                  every public address, on every port: what is read inside can be sent anywhere"
    };
}
pub(crate) use help;

/// Refuses what the server would refuse, before anything is sent, and warns of what it would not.
pub(crate) fn check(hosts: &[String]) -> Result<(), Failure> {
    if EgressPolicy::parse(hosts)? == EgressPolicy::All {
        output::note(
            "warning: `all` lets the sandbox reach every public address: what it reads it can send anywhere",
        );
    }
    Ok(())
}
