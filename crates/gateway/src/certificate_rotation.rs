//! Certificate rotation: renews the server's certificate while the server runs.

use crate::Error;
use crate::auth::tls::Tls;
use crate::auth::tls::names::{self, Name};
use std::convert::Infallible;
use std::time::Duration;

/// The names that the server's certificate must have.
pub(crate) struct Names {
    given: Vec<Name>,
}

// === impl Names ===

impl Names {
    pub(crate) fn new(given: &[String]) -> Result<Self, Error> {
        let name = |text: &String| Name::new(text).ok_or_else(|| Error::Name(text.clone()));
        Ok(Self {
            given: given.iter().map(name).collect::<Result<_, _>>()?,
        })
    }

    /// The configured names, and those that the machine has now.
    pub(crate) fn now(&self) -> Vec<Name> {
        let mut names = names::of_this_machine();
        for name in &self.given {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }
}

/// Never ends. A failure is logged once until it works again; the current certificate stays.
pub(crate) async fn rotate(tls: &Tls, names: &Names, every: Duration) -> Infallible {
    let mut failing = false;
    loop {
        tokio::time::sleep(every).await;
        // Some small files, once a minute: not worth a thread.
        match tls.refresh(&names.now()) {
            Ok(changed) => {
                failing = false;
                if changed {
                    tracing::info!("the server's certificate was renewed");
                }
            }
            Err(error) if !failing => {
                failing = true;
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                tracing::warn!(
                    "cannot renew the server's certificate: {error}: {}",
                    cause.unwrap_or_default()
                );
            }
            Err(_) => {}
        }
    }
}
