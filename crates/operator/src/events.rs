//! Event recorder: Kubernetes events, as shown by `kubectl describe`. Sending never blocks a reconcile; when the queue
//! is full, events are dropped.

use crate::context::Context;
use crate::error::within;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Resource};
use metrics::counter;
use tokio::sync::mpsc;

/// Events queued to be sent. More are dropped and counted: the state is in the objects, not in events.
const QUEUED_MAX: usize = 4096;
/// Longest `note` of an event that the API server accepts, in bytes.
const TEXT_BYTES_MAX: usize = 1024;
/// `reportingController` of our events.
const CONTROLLER: &str = "agent-sandbox-controller";

/// A Kubernetes event before it is sent: type, reason, action and text.
pub(crate) struct Event {
    kind: &'static str,
    reason: String,
    action: &'static str,
    text: String,
}

/// Event recorder: a bounded queue, and a task that sends it to the API server.
pub(crate) struct EventRecorder {
    sender: mpsc::Sender<v1::Event>,
    instance: String,
}

// === impl Event ===

impl Event {
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

// === impl EventRecorder ===

impl EventRecorder {
    /// The recorder, and the task that sends the events.
    pub(crate) fn new(client: Client, instance: String) -> (Self, impl Future<Output = ()> + Send) {
        let (sender, mut receiver) = mpsc::channel::<v1::Event>(QUEUED_MAX);
        let send = async move {
            while let Some(event) = receiver.recv().await {
                let namespace = event.metadata.namespace.clone().unwrap_or_default();
                let api: Api<v1::Event> = Api::namespaced(client.clone(), &namespace);
                counter!("k8e_operator_writes_total", "kind" => "Event", "verb" => "create")
                    .increment(1);
                let new = PostParams::default();
                if let Err(error) = within(api.create(&new, &event)).await {
                    tracing::debug!(%error, "the API server refused an event");
                }
            }
        };
        (Self { sender, instance }, send)
    }

    fn record(&self, regarding: ObjectReference, event: Event) {
        let now = Timestamp::now();
        let name = regarding.name.as_deref().unwrap_or(CONTROLLER);
        let mut text = event.text;
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        let event = v1::Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{:x}", now.as_nanosecond())),
                namespace: regarding.namespace.clone(),
                ..ObjectMeta::default()
            },
            action: Some(event.action.to_owned()),
            reason: Some(event.reason),
            note: Some(text),
            type_: Some(event.kind.to_owned()),
            event_time: Some(MicroTime(now)),
            regarding: Some(regarding),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            ..v1::Event::default()
        };
        if self.sender.try_send(event).is_err() {
            counter!("k8e_operator_events_dropped_total").increment(1);
        }
    }
}

// === impl Context ===

impl Context {
    /// Queues an event about an object, unless events of its kind are disabled by a flag.
    pub(crate) fn record_event<K: Resource<DynamicType = ()>>(&self, object: &K, event: Event) {
        let disabled = match K::kind(&()).as_ref() {
            "Sandbox" => self.options.disable_sandbox_events,
            "SandboxClaim" => self.options.disable_claim_events,
            _ => false,
        };
        // Pooled sandboxes come and go by the thousand: only their warnings are sent.
        let pooled = crate::object_meta::controller_of(object.meta())
            .is_some_and(|o| o.kind == "SandboxWarmPool");
        if !(disabled || pooled && event.kind == "Normal") {
            self.events.record(object.object_ref(&()), event);
        }
    }
}
