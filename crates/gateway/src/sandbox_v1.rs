//! `sandbox.v1.SandboxService`: the API of the Go K8E over the engine, for `sandbox.v1` clients.
//!
//! As thin as [`crate::k8e_v1`], and served by the same listeners. Where the Go server does something else than its clients
//! need, this does what they need; each such place says so.

mod approvals;
mod exec;
mod exec_stream;
mod exposures;
mod files;
mod history;
mod pip;
mod sessions;
mod snapshots;
mod sse;
mod terminals;

use crate::auth::login::Login;
use crate::auth::{caller, principal};
use crate::k8e_v1::{Answer, Answers};
use k8e_api::sandbox_v1 as pb;
use k8e_api::sandbox_v1::sandbox_service_server::{SandboxService, SandboxServiceServer};
use k8e_engine::Sessions;
use tokio::sync::watch;
use tonic::{Request, Response};

/// Bytes of a message in both directions, as in the Go server: `sandbox.v1` clients send and get a file in one message.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// The generated server over [`Service`].
pub(crate) type Server = SandboxServiceServer<Service>;

/// The service: a handle of the engine.
pub(crate) struct Service {
    sessions: Sessions,
    login: Login,
    stopped: watch::Receiver<bool>,
}

/// The service. Streams without an end are ended when `stopped` is true.
pub(crate) fn server(sessions: Sessions, login: Login, stopped: watch::Receiver<bool>) -> Server {
    let service = Service {
        sessions,
        login,
        stopped,
    };
    SandboxServiceServer::new(service)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

// === impl Service ===

#[tonic::async_trait]
impl SandboxService for Service {
    type ExecStreamStream = Answers<pb::ExecStreamResponse>;
    type TerminalStreamStream = Answers<pb::TerminalStreamResponse>;

    async fn create_session(
        &self,
        request: Request<pb::CreateSessionRequest>,
    ) -> Answer<pb::CreateSessionResponse> {
        let who = principal(&request)?;
        sessions::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_session(
        &self,
        request: Request<pb::GetSessionRequest>,
    ) -> Answer<pb::GetSessionResponse> {
        let who = principal(&request)?;
        sessions::get(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_sessions(
        &self,
        request: Request<pb::ListSessionsRequest>,
    ) -> Answer<pb::ListSessionsResponse> {
        let who = principal(&request)?;
        sessions::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn destroy_session(
        &self,
        request: Request<pb::DestroySessionRequest>,
    ) -> Answer<pb::DestroySessionResponse> {
        let who = principal(&request)?;
        sessions::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn pause_session(
        &self,
        request: Request<pb::PauseSessionRequest>,
    ) -> Answer<pb::PauseSessionResponse> {
        let who = principal(&request)?;
        sessions::pause(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn resume_session(
        &self,
        request: Request<pb::ResumeSessionRequest>,
    ) -> Answer<pb::ResumeSessionResponse> {
        let who = principal(&request)?;
        sessions::resume(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn exec(&self, request: Request<pb::ExecRequest>) -> Answer<pb::ExecResponse> {
        let who = principal(&request)?;
        exec::exec(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn exec_stream(
        &self,
        request: Request<pb::ExecRequest>,
    ) -> Answer<Self::ExecStreamStream> {
        let who = principal(&request)?;
        let framing = exec_stream::framing(request.metadata());
        exec_stream::start(&self.sessions, &who, &request.into_inner(), framing)
            .await
            .map(Response::new)
    }

    async fn write_file(
        &self,
        request: Request<pb::WriteFileRequest>,
    ) -> Answer<pb::WriteFileResponse> {
        let who = principal(&request)?;
        files::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn read_file(
        &self,
        request: Request<pb::ReadFileRequest>,
    ) -> Answer<pb::ReadFileResponse> {
        let who = principal(&request)?;
        files::read(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_files(
        &self,
        request: Request<pb::ListFilesRequest>,
    ) -> Answer<pb::ListFilesResponse> {
        let who = principal(&request)?;
        files::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn pip_install(
        &self,
        request: Request<pb::PipInstallRequest>,
    ) -> Answer<pb::PipInstallResponse> {
        let who = principal(&request)?;
        pip::install(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn run_sub_agent(
        &self,
        request: Request<pb::RunSubAgentRequest>,
    ) -> Answer<pb::RunSubAgentResponse> {
        let who = principal(&request)?;
        sessions::run_sub_agent(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn confirm_action(
        &self,
        request: Request<pb::ConfirmActionRequest>,
    ) -> Answer<pb::ConfirmActionResponse> {
        let caller = caller(&request)?;
        let stop = crate::signal(&self.stopped);
        approvals::confirm(&self.sessions, &caller, request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn approve_action(
        &self,
        request: Request<pb::ApproveActionRequest>,
    ) -> Answer<pb::ApproveActionResponse> {
        let caller = caller(&request)?;
        approvals::approve(&self.sessions, &caller, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn login(&self, request: Request<pb::LoginRequest>) -> Answer<pb::LoginResponse> {
        let asked = request.get_ref();
        let granted = self.login.grant(&request, &asked.csr, &asked.device_name)?;
        Ok(Response::new(pb::LoginResponse {
            cert: granted.cert,
            ca_cert: granted.ca_cert,
            valid_days: granted.valid_days,
        }))
    }

    async fn get_ca_cert(
        &self,
        request: Request<pb::GetCaCertRequest>,
    ) -> Answer<pb::GetCaCertResponse> {
        principal(&request)?;
        let cert = self.login.server_cert()?;
        Ok(Response::new(pb::GetCaCertResponse { cert }))
    }

    async fn poll_run(&self, request: Request<pb::PollRunRequest>) -> Answer<pb::PollRunResponse> {
        let who = principal(&request)?;
        exec::poll(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_transcript(
        &self,
        request: Request<pb::GetTranscriptRequest>,
    ) -> Answer<pb::GetTranscriptResponse> {
        let who = principal(&request)?;
        history::transcript(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_events(
        &self,
        request: Request<pb::GetEventsRequest>,
    ) -> Answer<pb::GetEventsResponse> {
        let who = principal(&request)?;
        history::events(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_put(
        &self,
        request: Request<pb::SnapshotPutRequest>,
    ) -> Answer<pb::SnapshotPutResponse> {
        let who = principal(&request)?;
        snapshots::put(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_get(
        &self,
        request: Request<pb::SnapshotGetRequest>,
    ) -> Answer<pb::SnapshotGetResponse> {
        let who = principal(&request)?;
        snapshots::get(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_list(
        &self,
        request: Request<pb::SnapshotListRequest>,
    ) -> Answer<pb::SnapshotListResponse> {
        let who = principal(&request)?;
        snapshots::list(&self.sessions, &who)
            .await
            .map(Response::new)
    }

    async fn get_processes(
        &self,
        request: Request<pb::GetProcessesRequest>,
    ) -> Answer<pb::GetProcessesResponse> {
        let who = principal(&request)?;
        sessions::processes(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn create_terminal(
        &self,
        request: Request<pb::CreateTerminalRequest>,
    ) -> Answer<pb::CreateTerminalResponse> {
        let who = principal(&request)?;
        terminals::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_stream(
        &self,
        request: Request<pb::TerminalStreamRequest>,
    ) -> Answer<Self::TerminalStreamStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        terminals::stream(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn terminal_write(
        &self,
        request: Request<pb::TerminalWriteRequest>,
    ) -> Answer<pb::TerminalWriteResponse> {
        let who = principal(&request)?;
        terminals::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_resize(
        &self,
        request: Request<pb::TerminalResizeRequest>,
    ) -> Answer<pb::TerminalResizeResponse> {
        let who = principal(&request)?;
        terminals::resize(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_foreground(
        &self,
        request: Request<pb::TerminalForegroundRequest>,
    ) -> Answer<pb::TerminalForegroundResponse> {
        let who = principal(&request)?;
        terminals::foreground(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_signal(
        &self,
        request: Request<pb::TerminalSignalRequest>,
    ) -> Answer<pb::TerminalSignalResponse> {
        let who = principal(&request)?;
        terminals::signal(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_destroy(
        &self,
        request: Request<pb::TerminalDestroyRequest>,
    ) -> Answer<pb::TerminalDestroyResponse> {
        let who = principal(&request)?;
        terminals::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn expose_service(
        &self,
        request: Request<pb::ExposeServiceRequest>,
    ) -> Answer<pb::ExposeServiceResponse> {
        let who = principal(&request)?;
        exposures::expose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn unexpose_service(
        &self,
        request: Request<pb::UnexposeServiceRequest>,
    ) -> Answer<pb::UnexposeServiceResponse> {
        let who = principal(&request)?;
        exposures::unexpose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_exposed(
        &self,
        request: Request<pb::ListExposedRequest>,
    ) -> Answer<pb::ListExposedResponse> {
        let who = principal(&request)?;
        exposures::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn update_allowed_hosts(
        &self,
        request: Request<pb::UpdateAllowedHostsRequest>,
    ) -> Answer<pb::UpdateAllowedHostsResponse> {
        let who = principal(&request)?;
        sessions::update_hosts(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }
}
