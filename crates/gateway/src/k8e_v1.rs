//! The services of `k8e.v1` over the engine: parse, call, render.

mod approvals;
mod background;
mod egress;
mod exposures;
mod file_watch;
mod files;
mod history;
mod identity;
mod run;
mod secrets;
mod sessions;
mod snapshots;
mod templates;
mod terminals;

use crate::auth::login::Login;
use crate::auth::principal;
use crate::auth::tls::Tls;
use crate::{Error, sandbox_v1};
use futures::stream::BoxStream;
use k8e_api::status::to_status;
use k8e_api::v1::approvals_server::ApprovalsServer;
use k8e_api::v1::identity_server::IdentityServer;
use k8e_api::v1::sandboxes_server::{Sandboxes, SandboxesServer};
use k8e_api::v1::secrets_server::SecretsServer;
use k8e_api::v1::snapshots_server::SnapshotsServer;
use k8e_api::v1::templates_server::TemplatesServer;
use k8e_api::{REQUEST_BYTES_MAX, v1};
use k8e_engine::Sessions;
use k8e_model::Code;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

/// The services of all gRPC listeners.
pub(crate) type Services = Routes;

pub(crate) type Answer<T> = Result<Response<T>, Status>;
pub(crate) type Answers<T> = BoxStream<'static, Result<T, Status>>;

/// Timeout of the first message of a client stream: a client that sends none holds the stream for nothing.
const FIRST_MESSAGE_WITHIN: Duration = Duration::from_secs(30);

/// Bytes of a request of the small services: a name, a key, or a secret's value.
const SMALL_REQUEST_BYTES_MAX: usize = 128 * 1024;

/// Our services, and gRPC's own for health and reflection. Streams without an end are ended when `stopped` is true.
pub(crate) async fn services(
    sessions: Sessions,
    tls: Option<Arc<Tls>>,
    stopped: watch::Receiver<bool>,
) -> Result<Services, Error> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<SandboxesServer<Service>>().await;
    health.set_serving::<sandbox_v1::Server>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(k8e_api::sandbox_v1::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()
        .map_err(Error::Reflection)?;
    let login = Login::new(sessions.clone(), tls);
    let sandbox_service = sandbox_v1::server(sessions.clone(), login.clone(), stopped.clone());
    let identity = IdentityServer::new(identity::Service {
        sessions: sessions.clone(),
        login,
    })
    .max_decoding_message_size(SMALL_REQUEST_BYTES_MAX);
    let secrets = SecretsServer::new(secrets::Service {
        sessions: sessions.clone(),
    })
    .max_decoding_message_size(SMALL_REQUEST_BYTES_MAX);
    let approvals = ApprovalsServer::new(approvals::Service {
        sessions: sessions.clone(),
        stopped: stopped.clone(),
    })
    .max_decoding_message_size(SMALL_REQUEST_BYTES_MAX);
    let snapshots = SnapshotsServer::new(snapshots::Service {
        sessions: sessions.clone(),
    })
    .max_decoding_message_size(REQUEST_BYTES_MAX);
    let templates = TemplatesServer::new(templates::Service {
        sessions: sessions.clone(),
        stopped: stopped.clone(),
    })
    .max_decoding_message_size(REQUEST_BYTES_MAX);
    let sandboxes = SandboxesServer::new(Service { sessions, stopped })
        .max_decoding_message_size(REQUEST_BYTES_MAX);
    Ok(Routes::new(sandboxes)
        .add_service(identity)
        .add_service(secrets)
        .add_service(approvals)
        .add_service(snapshots)
        .add_service(templates)
        .add_service(sandbox_service)
        .add_service(health_service)
        .add_service(reflection))
}

/// The service: a handle of the engine.
struct Service {
    sessions: Sessions,
    stopped: watch::Receiver<bool>,
}

// === impl Service ===

#[tonic::async_trait]
impl Sandboxes for Service {
    type RunStream = Answers<v1::RunEvent>;
    type ReadFileStream = Answers<v1::ReadFileResponse>;
    type ListFilesStream = Answers<v1::ListFilesResponse>;
    type WatchEgressStream = Answers<v1::EgressFlow>;
    type WatchRunStream = Answers<v1::WatchRunResponse>;
    type AttachTerminalStream = Answers<v1::TerminalEvent>;
    type WatchFilesStream = Answers<v1::WatchFilesResponse>;

    async fn get_status(&self, request: Request<v1::GetStatusRequest>) -> Answer<v1::Status> {
        let who = principal(&request)?;
        Ok(Response::new(sessions::status(&self.sessions, &who)))
    }

    async fn find_run_session(
        &self,
        request: Request<v1::CreateSessionRequest>,
    ) -> Answer<v1::FindRunSessionResponse> {
        let who = principal(&request)?;
        sessions::find_run_session(&self.sessions, &who, request.into_inner()).map(Response::new)
    }

    async fn create_session(
        &self,
        request: Request<v1::CreateSessionRequest>,
    ) -> Answer<v1::Session> {
        let who = principal(&request)?;
        sessions::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_session(&self, request: Request<v1::GetSessionRequest>) -> Answer<v1::Session> {
        let who = principal(&request)?;
        sessions::get(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_sessions(
        &self,
        request: Request<v1::ListSessionsRequest>,
    ) -> Answer<v1::ListSessionsResponse> {
        let who = principal(&request)?;
        sessions::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn destroy_session(
        &self,
        request: Request<v1::DestroySessionRequest>,
    ) -> Answer<v1::DestroySessionResponse> {
        let who = principal(&request)?;
        sessions::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn pause_session(
        &self,
        request: Request<v1::PauseSessionRequest>,
    ) -> Answer<v1::Session> {
        let who = principal(&request)?;
        sessions::pause(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn resume_session(
        &self,
        request: Request<v1::ResumeSessionRequest>,
    ) -> Answer<v1::Session> {
        let who = principal(&request)?;
        sessions::resume(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn fork_session(
        &self,
        request: Request<v1::ForkSessionRequest>,
    ) -> Answer<v1::ForkSessionResponse> {
        let who = principal(&request)?;
        sessions::fork(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn create_sub_agent(
        &self,
        request: Request<v1::CreateSubAgentRequest>,
    ) -> Answer<v1::Session> {
        let who = principal(&request)?;
        sessions::create_sub_agent(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn update_allowed_hosts(
        &self,
        request: Request<v1::UpdateAllowedHostsRequest>,
    ) -> Answer<v1::UpdateAllowedHostsResponse> {
        let who = principal(&request)?;
        egress::update(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn watch_egress(
        &self,
        request: Request<v1::WatchEgressRequest>,
    ) -> Answer<Self::WatchEgressStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        egress::watch(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn run(&self, request: Request<Streaming<v1::RunRequest>>) -> Answer<Self::RunStream> {
        let who = principal(&request)?;
        run::run(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn start_run(&self, request: Request<v1::RunStart>) -> Answer<v1::BackgroundRun> {
        let who = principal(&request)?;
        background::start(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_run(&self, request: Request<v1::GetRunRequest>) -> Answer<v1::BackgroundRun> {
        let who = principal(&request)?;
        background::get(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_runs(
        &self,
        request: Request<v1::ListRunsRequest>,
    ) -> Answer<v1::ListRunsResponse> {
        let who = principal(&request)?;
        background::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn cancel_run(
        &self,
        request: Request<v1::CancelRunRequest>,
    ) -> Answer<v1::BackgroundRun> {
        let who = principal(&request)?;
        background::cancel(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn watch_run(
        &self,
        request: Request<v1::WatchRunRequest>,
    ) -> Answer<Self::WatchRunStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        background::watch(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn create_terminal(
        &self,
        request: Request<v1::CreateTerminalRequest>,
    ) -> Answer<v1::Terminal> {
        let who = principal(&request)?;
        terminals::create(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn attach_terminal(
        &self,
        request: Request<v1::AttachTerminalRequest>,
    ) -> Answer<Self::AttachTerminalStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        terminals::attach(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn write_terminal(
        &self,
        request: Request<v1::WriteTerminalRequest>,
    ) -> Answer<v1::WriteTerminalResponse> {
        let who = principal(&request)?;
        terminals::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn resize_terminal(
        &self,
        request: Request<v1::ResizeTerminalRequest>,
    ) -> Answer<v1::ResizeTerminalResponse> {
        let who = principal(&request)?;
        terminals::resize(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn terminal_foreground(
        &self,
        request: Request<v1::TerminalForegroundRequest>,
    ) -> Answer<v1::TerminalForegroundResponse> {
        let who = principal(&request)?;
        terminals::foreground(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn signal_terminal(
        &self,
        request: Request<v1::SignalTerminalRequest>,
    ) -> Answer<v1::SignalTerminalResponse> {
        let who = principal(&request)?;
        terminals::signal(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn destroy_terminal(
        &self,
        request: Request<v1::DestroyTerminalRequest>,
    ) -> Answer<v1::DestroyTerminalResponse> {
        let who = principal(&request)?;
        terminals::destroy(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_terminals(
        &self,
        request: Request<v1::ListTerminalsRequest>,
    ) -> Answer<v1::ListTerminalsResponse> {
        let who = principal(&request)?;
        terminals::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn expose_service(
        &self,
        request: Request<v1::ExposeServiceRequest>,
    ) -> Answer<v1::ExposedService> {
        let who = principal(&request)?;
        exposures::expose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn unexpose_service(
        &self,
        request: Request<v1::UnexposeServiceRequest>,
    ) -> Answer<v1::UnexposeServiceResponse> {
        let who = principal(&request)?;
        exposures::unexpose(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_exposed(
        &self,
        request: Request<v1::ListExposedRequest>,
    ) -> Answer<v1::ListExposedResponse> {
        let who = principal(&request)?;
        exposures::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn read_file(
        &self,
        request: Request<v1::ReadFileRequest>,
    ) -> Answer<Self::ReadFileStream> {
        let who = principal(&request)?;
        files::read(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn write_file(
        &self,
        request: Request<Streaming<v1::WriteFileRequest>>,
    ) -> Answer<v1::WriteFileResponse> {
        let who = principal(&request)?;
        files::write(&self.sessions, &who, request.into_inner())
            .await
            .map(Response::new)
    }

    async fn list_files(
        &self,
        request: Request<v1::ListFilesRequest>,
    ) -> Answer<Self::ListFilesStream> {
        let who = principal(&request)?;
        files::list(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn stat_file(&self, request: Request<v1::StatFileRequest>) -> Answer<v1::FileInfo> {
        let who = principal(&request)?;
        files::stat(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn make_dir(&self, request: Request<v1::MakeDirRequest>) -> Answer<v1::MakeDirResponse> {
        let who = principal(&request)?;
        files::make_dir(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn move_file(
        &self,
        request: Request<v1::MoveFileRequest>,
    ) -> Answer<v1::MoveFileResponse> {
        let who = principal(&request)?;
        files::move_file(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn remove_file(
        &self,
        request: Request<v1::RemoveFileRequest>,
    ) -> Answer<v1::RemoveFileResponse> {
        let who = principal(&request)?;
        files::remove(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn watch_files(
        &self,
        request: Request<v1::WatchFilesRequest>,
    ) -> Answer<Self::WatchFilesStream> {
        let who = principal(&request)?;
        let stop = crate::signal(&self.stopped);
        file_watch::watch(&self.sessions, &who, &request.into_inner(), stop)
            .await
            .map(Response::new)
    }

    async fn list_processes(
        &self,
        request: Request<v1::ListProcessesRequest>,
    ) -> Answer<v1::ListProcessesResponse> {
        let who = principal(&request)?;
        sessions::processes(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_session_metrics(
        &self,
        request: Request<v1::GetSessionMetricsRequest>,
    ) -> Answer<v1::SessionMetrics> {
        let who = principal(&request)?;
        sessions::metrics(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_transcript(
        &self,
        request: Request<v1::GetTranscriptRequest>,
    ) -> Answer<v1::Transcript> {
        let who = principal(&request)?;
        history::transcript(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_events(
        &self,
        request: Request<v1::GetEventsRequest>,
    ) -> Answer<v1::GetEventsResponse> {
        let who = principal(&request)?;
        history::events(&self.sessions, &who, &request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_pools(
        &self,
        request: Request<v1::GetPoolsRequest>,
    ) -> Answer<v1::GetPoolsResponse> {
        principal(&request)?;
        Ok(Response::new(sessions::pools(&self.sessions)))
    }
}

/// An error of the engine as a gRPC status. Internal errors are logged here, once.
pub(crate) fn engine_status(error: k8e_engine::Error) -> Status {
    if error.code() == Code::Internal {
        tracing::error!(error = &error as &dyn std::error::Error, "a call failed");
    }
    to_status(error.code(), &error.to_string())
}

/// An invalid request as a gRPC status.
pub(crate) fn model_status(error: k8e_model::Error) -> Status {
    to_status(error.code, &error.message)
}

/// Ends a stream that has no end of its own. It is an error: a stream that just ends is complete.
pub(crate) fn stopping() -> Status {
    to_status(
        Code::Unavailable,
        "the server is stopping: watch again when it is back",
    )
}

/// The first message of a client's stream; `call` names it in errors.
async fn first_message<T>(messages: &mut Streaming<T>, call: &str) -> Result<Option<T>, Status> {
    match tokio::time::timeout(FIRST_MESSAGE_WITHIN, messages.message()).await {
        Ok(first) => first.map_err(message_status),
        Err(_) => Err(to_status(
            Code::Timeout,
            &format!("the first message of a {call} did not come"),
        )),
    }
}

/// A message that could not be read from a client's stream.
fn message_status(status: Status) -> Status {
    if status.code() == tonic::Code::OutOfRange {
        let message = format!(
            "a message is larger than {REQUEST_BYTES_MAX} bytes: send files in chunks, and long code as a file"
        );
        return to_status(Code::Invalid, &message);
    }
    status
}
