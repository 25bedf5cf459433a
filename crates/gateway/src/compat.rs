//! `sandbox.v1.SandboxService`: K8E's API over the engine, for the clients that K8E has.
//!
//! As thin as `grpc`, and next to it on the same doors. Where K8E's server and its clients' needs
//! differ the clients count; what K8E gets wrong is done right, and each such place says so.

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
mod text;

use crate::auth::login::Login;
use crate::auth::{caller, principal};
use crate::grpc::{Answer, Answers};
use k8e_api::sandbox_v1 as k8e;
use k8e_api::sandbox_v1::sandbox_service_server::{SandboxService, SandboxServiceServer};
use k8e_engine::Sessions;
use tokio::sync::watch;
use tonic::{Request, Response};

/// Both ways, as K8E has it: its clients send and get a file in one message.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;

/// What the doors serve.
pub(crate) type Server = SandboxServiceServer<Service>;

/// The service: a handle of the engine.
pub(crate) struct Service {
    sessions: Sessions,
    login: Login,
    stopped: watch::Receiver<bool>,
}

/// The service. Calls that would go on for ever end when `stopped` is true.
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
    type ExecStreamStream = Answers<k8e::ExecStreamResponse>;
    type TerminalStreamStream = Answers<k8e::TerminalStreamResponse>;

    async fn create_session(
        &self,
        request: Request<k8e::CreateSessionRequest>,
    ) -> Answer<k8e::CreateSessionResponse> {
        let who = principal(&request)?;
        sessions::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_session(
        &self,
        request: Request<k8e::GetSessionRequest>,
    ) -> Answer<k8e::GetSessionResponse> {
        let who = principal(&request)?;
        sessions::get(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_sessions(
        &self,
        request: Request<k8e::ListSessionsRequest>,
    ) -> Answer<k8e::ListSessionsResponse> {
        let who = principal(&request)?;
        sessions::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn destroy_session(
        &self,
        request: Request<k8e::DestroySessionRequest>,
    ) -> Answer<k8e::DestroySessionResponse> {
        let who = principal(&request)?;
        sessions::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn pause_session(
        &self,
        request: Request<k8e::PauseSessionRequest>,
    ) -> Answer<k8e::PauseSessionResponse> {
        let who = principal(&request)?;
        sessions::pause(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn resume_session(
        &self,
        request: Request<k8e::ResumeSessionRequest>,
    ) -> Answer<k8e::ResumeSessionResponse> {
        let who = principal(&request)?;
        sessions::resume(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn exec(&self, request: Request<k8e::ExecRequest>) -> Answer<k8e::ExecResponse> {
        let who = principal(&request)?;
        exec::exec(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn exec_stream(
        &self,
        request: Request<k8e::ExecRequest>,
    ) -> Answer<Self::ExecStreamStream> {
        let who = principal(&request)?;
        let framing = exec_stream::framing(request.metadata());
        exec_stream::start(&self.sessions, &who, &request.into_inner(), framing)
            .await
            .map(Response::new)
    }

    async fn write_file(
        &self,
        request: Request<k8e::WriteFileRequest>,
    ) -> Answer<k8e::WriteFileResponse> {
        let who = principal(&request)?;
        files::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn read_file(
        &self,
        request: Request<k8e::ReadFileRequest>,
    ) -> Answer<k8e::ReadFileResponse> {
        let who = principal(&request)?;
        files::read(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_files(
        &self,
        request: Request<k8e::ListFilesRequest>,
    ) -> Answer<k8e::ListFilesResponse> {
        let who = principal(&request)?;
        files::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn pip_install(
        &self,
        request: Request<k8e::PipInstallRequest>,
    ) -> Answer<k8e::PipInstallResponse> {
        let who = principal(&request)?;
        pip::install(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn run_sub_agent(
        &self,
        request: Request<k8e::RunSubAgentRequest>,
    ) -> Answer<k8e::RunSubAgentResponse> {
        let who = principal(&request)?;
        sessions::run_sub_agent(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn confirm_action(
        &self,
        request: Request<k8e::ConfirmActionRequest>,
    ) -> Answer<k8e::ConfirmActionResponse> {
        let caller = caller(&request)?;
        let stop = crate::signal(&self.stopped);
        approvals::confirm(&self.sessions, &caller, request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn approve_action(
        &self,
        request: Request<k8e::ApproveActionRequest>,
    ) -> Answer<k8e::ApproveActionResponse> {
        let caller = caller(&request)?;
        approvals::approve(&self.sessions, &caller, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn login(&self, request: Request<k8e::LoginRequest>) -> Answer<k8e::LoginResponse> {
        let asked = request.get_ref();
        let granted = self.login.grant(&request, &asked.csr, &asked.device_name)?;
        Ok(Response::new(k8e::LoginResponse {
            cert: granted.cert,
            ca_cert: granted.ca_cert,
            valid_days: granted.valid_days,
        }))
    }

    async fn get_ca_cert(
        &self,
        request: Request<k8e::GetCaCertRequest>,
    ) -> Answer<k8e::GetCaCertResponse> {
        principal(&request)?;
        let cert = self.login.server_cert()?;
        Ok(Response::new(k8e::GetCaCertResponse { cert }))
    }

    async fn poll_run(
        &self,
        request: Request<k8e::PollRunRequest>,
    ) -> Answer<k8e::PollRunResponse> {
        let who = principal(&request)?;
        exec::poll(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_transcript(
        &self,
        request: Request<k8e::GetTranscriptRequest>,
    ) -> Answer<k8e::GetTranscriptResponse> {
        let who = principal(&request)?;
        history::transcript(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_events(
        &self,
        request: Request<k8e::GetEventsRequest>,
    ) -> Answer<k8e::GetEventsResponse> {
        let who = principal(&request)?;
        history::events(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_put(
        &self,
        request: Request<k8e::SnapshotPutRequest>,
    ) -> Answer<k8e::SnapshotPutResponse> {
        let who = principal(&request)?;
        snapshots::put(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_get(
        &self,
        request: Request<k8e::SnapshotGetRequest>,
    ) -> Answer<k8e::SnapshotGetResponse> {
        let who = principal(&request)?;
        snapshots::get(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn snapshot_list(
        &self,
        request: Request<k8e::SnapshotListRequest>,
    ) -> Answer<k8e::SnapshotListResponse> {
        let who = principal(&request)?;
        snapshots::list(&self.sessions, &who)
            .await
            .map(Response::new)
    }

    async fn get_processes(
        &self,
        request: Request<k8e::GetProcessesRequest>,
    ) -> Answer<k8e::GetProcessesResponse> {
        let who = principal(&request)?;
        sessions::processes(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn create_terminal(
        &self,
        request: Request<k8e::CreateTerminalRequest>,
    ) -> Answer<k8e::CreateTerminalResponse> {
        let who = principal(&request)?;
        terminals::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_stream(
        &self,
        request: Request<k8e::TerminalStreamRequest>,
    ) -> Answer<Self::TerminalStreamStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        terminals::stream(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn terminal_write(
        &self,
        request: Request<k8e::TerminalWriteRequest>,
    ) -> Answer<k8e::TerminalWriteResponse> {
        let who = principal(&request)?;
        terminals::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_resize(
        &self,
        request: Request<k8e::TerminalResizeRequest>,
    ) -> Answer<k8e::TerminalResizeResponse> {
        let who = principal(&request)?;
        terminals::resize(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_foreground(
        &self,
        request: Request<k8e::TerminalForegroundRequest>,
    ) -> Answer<k8e::TerminalForegroundResponse> {
        let who = principal(&request)?;
        terminals::foreground(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_signal(
        &self,
        request: Request<k8e::TerminalSignalRequest>,
    ) -> Answer<k8e::TerminalSignalResponse> {
        let who = principal(&request)?;
        terminals::signal(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_destroy(
        &self,
        request: Request<k8e::TerminalDestroyRequest>,
    ) -> Answer<k8e::TerminalDestroyResponse> {
        let who = principal(&request)?;
        terminals::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn expose_service(
        &self,
        request: Request<k8e::ExposeServiceRequest>,
    ) -> Answer<k8e::ExposeServiceResponse> {
        let who = principal(&request)?;
        exposures::expose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn unexpose_service(
        &self,
        request: Request<k8e::UnexposeServiceRequest>,
    ) -> Answer<k8e::UnexposeServiceResponse> {
        let who = principal(&request)?;
        exposures::unexpose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_exposed(
        &self,
        request: Request<k8e::ListExposedRequest>,
    ) -> Answer<k8e::ListExposedResponse> {
        let who = principal(&request)?;
        exposures::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn update_allowed_hosts(
        &self,
        request: Request<k8e::UpdateAllowedHostsRequest>,
    ) -> Answer<k8e::UpdateAllowedHostsResponse> {
        let who = principal(&request)?;
        sessions::update_hosts(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }
}
