//! `k8e.v1.Templates`: images for sessions, fetched by the server or sent by the client.

use super::{Answer, Answers, engine_status, first_message, message_status, model_status};
use crate::auth::principal;
use futures::StreamExt as _;
use k8e_api::status::to_status;
use k8e_api::v1::create_template_event::Event;
use k8e_api::v1::create_template_request::Message;
use k8e_api::v1::create_template_start::Source;
use k8e_api::v1::templates_server::Templates;
use k8e_api::{convert, v1};
use k8e_engine::{
    Error, LayerUpload, NewTemplate, Sessions, TemplateOrigin, TemplateProgress, TemplateView,
};
use k8e_model::{Code, Digest};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tonic::{Request, Response, Status, Streaming};

/// Between two messages of an upload: the client reads its own disk.
const PART_WITHIN: Duration = Duration::from_secs(60);

/// Answers that wait to be read. Of progress, what does not fit is left out.
const EVENTS_MAX: usize = 16;

/// The service.
pub(super) struct Service {
    pub(super) sessions: Sessions,
    pub(super) stopped: watch::Receiver<bool>,
}

/// The layers that a client sends.
struct Upload {
    messages: Streaming<v1::CreateTemplateRequest>,
    events: mpsc::Sender<Result<Event, Status>>,
    /// The last part of the layer has come.
    ended: bool,
}

/// Ends the work when its caller is gone.
struct Work(AbortHandle);

// === impl Service ===

#[tonic::async_trait]
impl Templates for Service {
    type CreateTemplateStream = Answers<v1::CreateTemplateEvent>;

    async fn create_template(
        &self,
        request: Request<Streaming<v1::CreateTemplateRequest>>,
    ) -> Answer<Self::CreateTemplateStream> {
        let who = principal(&request)?;
        let mut messages = request.into_inner();
        let first = first_message(&mut messages, "create").await?;
        let Some(Message::Start(start)) = first.and_then(|first| first.message) else {
            let why = "the first message must say which template to create, from what";
            return Err(to_status(Code::Invalid, why));
        };
        let name = convert::template_name(&start.name).map_err(model_status)?;
        let (events, answers) = mpsc::channel(EVENTS_MAX);
        let origin = match start.source {
            Some(Source::Registry(image)) => TemplateOrigin::Registry {
                reference: image.reference,
                credentials: image.credentials.map(|c| (c.username, c.password)),
            },
            Some(Source::Upload(image)) => TemplateOrigin::Upload {
                manifest: image.manifest.into(),
                config: image.config.into(),
                origin: image.origin,
                layers: Box::new(Upload {
                    messages,
                    events: events.clone(),
                    ended: true,
                }),
            },
            None => {
                let why = "a template needs a source: a registry or an upload";
                return Err(to_status(Code::Invalid, why));
            }
        };
        let sessions = self.sessions.clone();
        let mut stopped = self.stopped.clone();
        let work = tokio::spawn(async move {
            let (progress, mut told) = mpsc::channel(EVENTS_MAX);
            let made = sessions.create_template(&who, NewTemplate { name, origin }, progress);
            tokio::pin!(made);
            let made = loop {
                tokio::select! {
                    made = &mut made => break made.map_err(engine_status),
                    Some(progress) = told.recv() => drop(events.try_send(Ok(shown(&progress)))),
                    _ = stopped.wait_for(|stopped| *stopped) => {
                        break Err(engine_status(Error::Stopping));
                    }
                }
            };
            // Nobody there to hear it.
            let _ = events
                .send(made.map(|view| Event::Created(template(view))))
                .await;
        });
        let work = Work(work.abort_handle());
        let answers = futures::stream::unfold((answers, work), |(mut answers, work)| async move {
            let event = answers.recv().await?;
            let event = event.map(|event| v1::CreateTemplateEvent { event: Some(event) });
            Some((event, (answers, work)))
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn list_templates(
        &self,
        request: Request<v1::ListTemplatesRequest>,
    ) -> Answer<v1::ListTemplatesResponse> {
        principal(&request)?;
        let templates = self.sessions.list_templates().into_iter().map(template);
        Ok(Response::new(v1::ListTemplatesResponse {
            templates: templates.collect(),
        }))
    }

    async fn get_template(&self, request: Request<v1::GetTemplateRequest>) -> Answer<v1::Template> {
        principal(&request)?;
        let name = convert::template_name(&request.get_ref().name).map_err(model_status)?;
        let view = self.sessions.get_template(&name).map_err(engine_status)?;
        Ok(Response::new(template(view)))
    }

    async fn delete_template(
        &self,
        request: Request<v1::DeleteTemplateRequest>,
    ) -> Answer<v1::DeleteTemplateResponse> {
        let who = principal(&request)?;
        let name = convert::template_name(&request.get_ref().name).map_err(model_status)?;
        let deleted = self.sessions.delete_template(&who, &name).await;
        deleted.map_err(engine_status)?;
        Ok(Response::new(v1::DeleteTemplateResponse {}))
    }
}

// === impl Upload ===

#[tonic::async_trait]
impl LayerUpload for Upload {
    async fn want(&mut self, digest: &Digest) -> Result<(), Error> {
        let digest = digest.to_string();
        self.ended = false;
        let asked = self
            .events
            .send(Ok(Event::Wanted(v1::LayerWanted { digest })))
            .await;
        asked.map_err(|_| Error::Invalid("the client is gone".to_owned()))
    }

    async fn next(&mut self) -> Result<Option<prost::bytes::Bytes>, Error> {
        if self.ended {
            return Ok(None);
        }
        let message = tokio::time::timeout(PART_WITHIN, self.messages.message()).await;
        let message = message.map_err(|_| {
            Error::Invalid(format!(
                "nothing came for {PART_WITHIN:?} in the middle of a layer"
            ))
        })?;
        let broken = |status: Status| Error::Invalid(message_status(status).message().to_owned());
        let message = message.map_err(broken)?.and_then(|message| message.message);
        let Some(Message::Part(part)) = message else {
            return Err(Error::Invalid(
                "the upload ended in the middle of a layer".to_owned(),
            ));
        };
        self.ended = part.last;
        Ok(Some(part.data))
    }
}

// === impl Work ===

impl Drop for Work {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn shown(progress: &TemplateProgress) -> Event {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Event::Progress(v1::LayerProgress {
        layer: count(progress.layer),
        layers: count(progress.layers),
        bytes: progress.bytes,
        bytes_total: progress.bytes_total,
        unpacking: progress.unpacking,
    })
}

fn template(view: TemplateView) -> v1::Template {
    let record = view.record;
    let layers = record.image.layers.iter().zip(&record.layer_bytes);
    let layers = layers.map(|(diff_id, bytes)| v1::TemplateLayer {
        diff_id: diff_id.to_string(),
        bytes: *bytes,
    });
    let config = record.image.config;
    let env = config.env.iter();
    v1::Template {
        name: record.name.to_string(),
        digest: record.image.digest.to_string(),
        source: record.source,
        layers: layers.collect(),
        bytes: record
            .layer_bytes
            .iter()
            .fold(0, |sum, bytes| bytes.saturating_add(sum)),
        env: env
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
        user: config.user.unwrap_or_default(),
        workdir: config.workdir.unwrap_or_default(),
        entrypoint: config.entrypoint,
        cmd: config.cmd,
        created_at_unix_ms: record.created_at,
        created_by: record.created_by,
        sessions: u32::try_from(view.sessions).unwrap_or(u32::MAX),
    }
}
