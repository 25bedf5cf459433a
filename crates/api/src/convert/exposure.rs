//! Services that are given a URL.

use k8e_model::{Error, Port, ServiceHost};

/// Which service.
pub fn service_port(port: i64) -> Result<Port, Error> {
    Port::new(port)
}

/// Where it listens inside; empty is the usual.
pub fn service_host(text: &str) -> Result<ServiceHost, Error> {
    text.parse()
}
