//! Events that people see in `kubectl describe`. They are sent in the background, and dropped rather than waited for.

use crate::error::within;
use crate::world::World;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Resource};
use metrics::counter;
use tokio::sync::mpsc;

/// Events that wait to be sent. Beyond it they are lost: events are a courtesy, objects are the state.
const WAITING: usize = 4096;
/// Longest text of an event that Kubernetes takes.
const LONGEST_NOTE: usize = 1024;
/// How we are named in events.
const CONTROLLER: &str = "agent-sandbox-controller";

/// One thing worth telling.
pub(crate) struct Note {
    kind: &'static str,
    reason: String,
    action: &'static str,
    text: String,
}

/// Where notes go.
pub(crate) struct NoteBook {
    sender: mpsc::Sender<Event>,
    instance: String,
}

// === impl Note ===

impl Note {
    pub(crate) fn normal(reason: &str, action: &'static str, text: String) -> Self {
        Self {
            kind: "Normal",
            reason: reason.to_owned(),
            action,
            text,
        }
    }

    pub(crate) fn warning(reason: &str, action: &'static str, text: String) -> Self {
        Self {
            kind: "Warning",
            reason: reason.to_owned(),
            action,
            text,
        }
    }
}

// === impl NoteBook ===

impl NoteBook {
    /// A book, and the task that sends what is written into it.
    pub(crate) fn open(
        client: Client,
        instance: String,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (sender, mut receiver) = mpsc::channel::<Event>(WAITING);
        let send = async move {
            while let Some(event) = receiver.recv().await {
                let namespace = event.metadata.namespace.clone().unwrap_or_default();
                let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
                counter!("k8e_operator_writes_total", "kind" => "Event", "verb" => "create")
                    .increment(1);
                let new = PostParams::default();
                if let Err(error) = within(api.create(&new, &event)).await {
                    tracing::debug!(%error, "an event was not taken");
                }
            }
        };
        (Self { sender, instance }, send)
    }

    fn write(&self, regarding: ObjectReference, note: Note) {
        let now = Timestamp::now();
        let name = regarding.name.as_deref().unwrap_or(CONTROLLER);
        let mut text = note.text;
        text.truncate(text.floor_char_boundary(LONGEST_NOTE));
        let event = Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: regarding.namespace.clone(),
                ..ObjectMeta::default()
            },
            action: Some(note.action.to_owned()),
            reason: Some(note.reason),
            note: Some(text),
            type_: Some(note.kind.to_owned()),
            event_time: Some(MicroTime(now)),
            regarding: Some(regarding),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..Event::default()
        };
        if self.sender.try_send(event).is_err() {
            counter!("k8e_operator_events_dropped_total").increment(1);
        }
    }
}

// === impl World ===

impl World {
    /// Tells something about an object, unless events of its kind are switched off.
    pub(crate) fn note<K: Resource<DynamicType = ()>>(&self, object: &K, note: Note) {
        let silent = match K::kind(&()).as_ref() {
            "Sandbox" => self.options.disable_sandbox_events,
            "SandboxClaim" => self.options.disable_claim_events,
            _ => false,
        };
        // Sandboxes that wait in a pool come and go by the thousand: only what goes wrong with them is told.
        let pooled =
            crate::held::controller_of(object.meta()).is_some_and(|o| o.kind == "SandboxWarmPool");
        if !(silent || pooled && note.kind == "Normal") {
            self.notes.write(object.object_ref(&()), note);
        }
    }
}
