//! Exposed services: port and host.

use k8e_model::{Error, Port, ServiceHost};

/// The port of a service.
pub fn service_port(port: i64) -> Result<Port, Error> {
    Port::new(port)
}

/// The address in the sandbox that a service listens on; empty is loopback.
pub fn service_host(text: &str) -> Result<ServiceHost, Error> {
    text.parse()
}
