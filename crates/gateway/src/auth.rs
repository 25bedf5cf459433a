//! Who is asking. Every call passes here before anything of it is used.

pub(crate) mod peer;
pub(crate) mod tls;

use k8e_api::status::to_status;
use k8e_model::{Code, Principal};
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo, UdsConnectInfo};
use tonic::{Request, Status};

/// The principal of a call that passed a door.
pub(crate) fn principal<T>(request: &Request<T>) -> Result<Principal, Status> {
    let nobody = || {
        to_status(
            Code::Unauthenticated,
            "the call came through no door of ours",
        )
    };
    request
        .extensions()
        .get::<Principal>()
        .cloned()
        .ok_or_else(nobody)
}

/// The Unix socket's door: root, and members of the group.
pub(crate) fn by_peer(mut request: Request<()>, group: &str) -> Result<Request<()>, Status> {
    let peer = request
        .extensions()
        .get::<UdsConnectInfo>()
        .and_then(|info| info.peer_cred);
    let Some(peer) = peer else {
        return Err(to_status(
            Code::Unauthenticated,
            "the kernel does not say who is calling",
        ));
    };
    if !peer::may_enter(peer.uid(), peer.gid(), group) {
        let message = format!(
            "user {} may not use this server: become root, or join the group {group} (`usermod -aG {group} USER`)",
            peer.uid()
        );
        return Err(to_status(Code::Denied, &message));
    }
    request.extensions_mut().insert(Principal::local());
    Ok(request)
}

/// The TLS door: the common name of the client's certificate, which the handshake has verified.
pub(crate) fn by_certificate(mut request: Request<()>) -> Result<Request<()>, Status> {
    let info = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>();
    let certificates = info.and_then(TlsConnectInfo::peer_certs);
    let name = certificates
        .as_deref()
        .and_then(|chain| chain.first())
        .and_then(|certificate| tls::common_name(certificate));
    let Some(name) = name else {
        return Err(to_status(
            Code::Unauthenticated,
            "the client certificate has no usable common name",
        ));
    };
    request
        .extensions_mut()
        .insert(Principal::certificate(&name));
    Ok(request)
}
