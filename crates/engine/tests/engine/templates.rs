//! Templates: made whole or not at all, used by sessions, and removed when nothing needs them.

use super::*;
use async_trait::async_trait;
use bytes::Bytes;
use k8e_driver::{DriverError, LayerBlob, LayerSize, LayerStore};
use k8e_engine::{LayerUpload, NewTemplate, TemplateOrigin, TemplateProgress, TemplateView};
use k8e_image::digest_of;
use k8e_model::{Digest, KeyId, Template, TemplateName, Tenants};
use std::collections::{BTreeSet, VecDeque};
use std::io::Read as _;
use std::sync::{Mutex, PoisonError};
use tokio::sync::mpsc;

/// Remembers what was unpacked. A layer is the bytes that came.
#[derive(Default)]
struct FakeLayers {
    there: Mutex<BTreeSet<Digest>>,
}

impl FakeLayers {
    fn names(&self) -> Vec<Digest> {
        let there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.iter().cloned().collect()
    }

    async fn settled(&self, count: usize) {
        let settled = async {
            while self.names().len() != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let within = tokio::time::timeout(PATIENCE, settled).await;
        within.unwrap_or_else(|_| panic!("{:?}, not {count}", self.names()));
    }
}

#[async_trait]
impl LayerStore for FakeLayers {
    async fn unpack(&self, mut blob: LayerBlob) -> Result<LayerSize, DriverError> {
        let mut bytes = Vec::new();
        blob.file.read_to_end(&mut bytes).unwrap();
        if bytes.len() as u64 > blob.bytes_max {
            return Err(DriverError::Exhausted("too large".to_owned()));
        }
        if digest_of(&bytes) != blob.diff_id {
            return Err(DriverError::Refused("another layer".to_owned()));
        }
        let mut there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.insert(blob.diff_id);
        Ok(LayerSize {
            bytes: bytes.len() as u64,
            entries: 1,
        })
    }

    async fn find(&self, diff_id: &Digest) -> Result<Option<LayerSize>, DriverError> {
        let there = self.names().contains(diff_id);
        Ok(there.then_some(LayerSize {
            bytes: 5,
            entries: 1,
        }))
    }

    async fn list(&self) -> Result<Vec<Digest>, DriverError> {
        Ok(self.names())
    }

    async fn remove(&self, diff_id: &Digest) -> Result<(), DriverError> {
        let mut there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.remove(diff_id);
        Ok(())
    }
}

/// Sends layers in two parts each, whichever are asked for.
struct Sender {
    layers: Vec<Vec<u8>>,
    parts: VecDeque<Bytes>,
    asked: Arc<Mutex<usize>>,
}

#[async_trait]
impl LayerUpload for Sender {
    async fn want(&mut self, digest: &Digest) -> Result<(), Error> {
        *self.asked.lock().unwrap() += 1;
        // One that lies sends what it has.
        let found = self.layers.iter().find(|layer| digest_of(layer) == *digest);
        let layer = found.unwrap_or(&self.layers[0]).clone();
        let (front, back) = layer.split_at(layer.len() / 2);
        self.parts = [front, back].map(Bytes::copy_from_slice).into();
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        Ok(self.parts.pop_front())
    }
}

struct Made {
    origin: TemplateOrigin,
    asked: Arc<Mutex<usize>>,
}

/// An image with these layers; the sender has `sent`.
fn image(layers: &[&[u8]], sent: &[&[u8]]) -> Made {
    let ids: Vec<String> = layers
        .iter()
        .map(|layer| digest_of(layer).to_string())
        .collect();
    let config = serde_json::json!({
        "os": "linux",
        "config": { "Env": ["FROM=image", "BOTH=image"], "WorkingDir": "/tmp" },
        "rootfs": { "type": "layers", "diff_ids": ids },
    });
    let config = config.to_string().into_bytes();
    let blobs: Vec<_> = layers
        .iter()
        .map(|layer| {
            serde_json::json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": digest_of(layer).as_str(),
                "size": layer.len(),
            })
        })
        .collect();
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(&config).as_str(), "size": config.len() },
        "layers": blobs,
    });
    let asked = Arc::default();
    let sender = Sender {
        layers: sent.iter().map(|layer| layer.to_vec()).collect(),
        parts: VecDeque::new(),
        asked: Arc::clone(&asked),
    };
    let origin = TemplateOrigin::Upload {
        manifest: manifest.to_string().into_bytes(),
        config,
        origin: "a\ntest".to_owned(),
        layers: Box::new(sender),
    };
    Made { origin, asked }
}

async fn server() -> (Server, Arc<FakeLayers>) {
    let layers = Arc::new(FakeLayers::default());
    let config = Config {
        layers: Some(Arc::clone(&layers) as Arc<dyn LayerStore>),
        ..Config::default()
    };
    (Server::with(config, FakeDriver::new()).await, layers)
}

fn root() -> Principal {
    Principal::local()
}

fn name(text: &str) -> TemplateName {
    text.parse().unwrap()
}

async fn create(
    server: &Server,
    who: &Principal,
    text: &str,
    made: Made,
) -> Result<TemplateView, Error> {
    let (progress, mut told) = mpsc::channel::<TemplateProgress>(64);
    let new = NewTemplate {
        name: name(text),
        origin: made.origin,
    };
    let view = server.sessions.create_template(who, new, progress).await?;
    assert!(told.recv().await.is_some(), "progress is told");
    Ok(view)
}

fn on(id: &str, template: &str) -> SessionSpec {
    SessionSpec {
        template: template.parse().unwrap(),
        ..spec(id)
    }
}

#[tokio::test]
async fn a_session_stands_on_the_image_it_was_made_with() {
    let (server, layers) = server().await;
    let first = create(
        &server,
        &root(),
        "t",
        image(&[b"base", b"app-1"], &[b"base", b"app-1"]),
    )
    .await
    .unwrap();
    assert_eq!(first.record.source, "upload of atest");
    let view = server.sessions.create(&me(), on("s", "t")).await.unwrap();
    let digest = first.record.image.digest.clone();
    assert_eq!(view.session.template.to_string(), format!("t@{digest}"));
    let again = image(&[b"base", b"app-2"], &[b"base", b"app-2"]);
    let asked = Arc::clone(&again.asked);
    let second = create(&server, &root(), "t", again).await.unwrap();
    assert_eq!(*asked.lock().unwrap(), 1, "what is there is not asked for");
    assert_ne!(second.record.image.digest, digest);
    layers.settled(3).await;
    // The image's environment is below the session's and the command's; so is its directory.
    let (said, _) = server.run("s", "echo $FROM $BOTH; pwd").await.unwrap();
    assert_eq!(said, b"image image\n/tmp\n");
    let server = server.restart().await;
    let view = server.sessions.get(&me(), &sid("s")).await.unwrap();
    assert_eq!(view.session.template.to_string(), format!("t@{digest}"));
    layers.settled(3).await;
    // The old image can be asked for by nobody new.
    let old = server
        .sessions
        .create(&me(), on("x", &format!("t@{digest}")))
        .await;
    assert!(matches!(old, Err(Error::TemplateNotFound(_))));
    server.sessions.destroy(&me(), &sid("s")).await.unwrap();
    server.no_sandbox().await;
    server
        .sessions
        .delete_template(&root(), &name("t"))
        .await
        .unwrap();
    assert_eq!(layers.names(), []);
}

#[tokio::test]
async fn what_is_used_is_not_deleted_and_what_is_not_known_is_said() {
    let (server, layers) = server().await;
    create(&server, &root(), "t", image(&[b"base"], &[b"base"]))
        .await
        .unwrap();
    server.sessions.create(&me(), on("s", "t")).await.unwrap();
    let refused = server.sessions.delete_template(&root(), &name("t")).await;
    assert!(
        matches!(refused, Err(Error::TemplateInUse { sessions: 1, .. })),
        "{refused:?}"
    );
    assert_eq!(server.sessions.list_templates()[0].sessions, 1);
    server.sessions.destroy(&me(), &sid("s")).await.unwrap();
    server.no_sandbox().await;
    server
        .sessions
        .delete_template(&root(), &name("t"))
        .await
        .unwrap();
    assert_eq!(layers.names(), []);
    assert!(server.sessions.list_templates().is_empty());
    let gone = server
        .sessions
        .create(&me(), on("s", "t"))
        .await
        .unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    let gone = server
        .sessions
        .delete_template(&root(), &name("t"))
        .await
        .unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    assert_eq!(
        server.sessions.get_template(&name("t")).unwrap_err().code(),
        Code::NotFound
    );
}

#[tokio::test]
async fn a_lie_leaves_nothing() {
    let (server, layers) = server().await;
    let lies = create(
        &server,
        &root(),
        "t",
        image(&[b"base", b"truth"], &[b"base"]),
    )
    .await;
    let error = lies.unwrap_err();
    assert_eq!(error.code(), Code::Invalid, "{error}");
    layers.settled(0).await;
    assert!(server.sessions.list_templates().is_empty());
    let empty = TemplateOrigin::Registry {
        reference: "not a reference".to_owned(),
        credentials: None,
    };
    let asked = Arc::default();
    let error = create(
        &server,
        &root(),
        "t",
        Made {
            origin: empty,
            asked,
        },
    )
    .await
    .unwrap_err();
    assert_eq!(error.code(), Code::Invalid, "{error}");
}

#[tokio::test]
async fn only_those_who_run_the_server_make_and_delete_them() {
    let (server, layers) = server().await;
    let ann = Principal::user(&"ann".parse().unwrap(), KeyId::random(), Tenants::any());
    let denied = create(&server, &ann, "t", image(&[b"base"], &[b"base"]))
        .await
        .unwrap_err();
    assert_eq!(denied.code(), Code::Denied);
    create(&server, &root(), "t", image(&[b"base"], &[b"base"]))
        .await
        .unwrap();
    let denied = server
        .sessions
        .delete_template(&ann, &name("t"))
        .await
        .unwrap_err();
    assert_eq!(denied.code(), Code::Denied);
    server.sessions.create(&ann, on("s", "t")).await.unwrap();
    layers.settled(1).await;
    let rows = server
        .sessions
        .audit(&root(), &k8e_engine::AuditQuery::default())
        .await
        .unwrap();
    let ours = rows
        .iter()
        .filter(|row| row.action.starts_with("template."));
    let codes: Vec<&str> = ours.map(|row| row.code.as_str()).collect();
    assert_eq!(codes, ["denied", "ok", "denied"]);
}

#[tokio::test]
async fn the_disk_for_templates_is_bounded() {
    let layers = Arc::new(FakeLayers::default());
    let config = Config {
        layers: Some(Arc::clone(&layers) as Arc<dyn LayerStore>),
        templates_bytes_max: 8,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    create(&server, &root(), "t", image(&[b"12345678"], &[b"12345678"]))
        .await
        .unwrap();
    let full = create(&server, &root(), "u", image(&[b"more"], &[b"more"]))
        .await
        .unwrap_err();
    assert_eq!(full.code(), Code::Exhausted, "{full}");
    layers.settled(1).await;
    let host: Template = "host".parse().unwrap();
    assert_eq!(host, Template::Host);
    let none = Server::start().await;
    let error = create(&none, &root(), "t", image(&[b"base"], &[b"base"]))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
}

#[tokio::test]
async fn layers_that_only_sessions_need_count_against_the_disk() {
    let layers = Arc::new(FakeLayers::default());
    let config = Config {
        layers: Some(Arc::clone(&layers) as Arc<dyn LayerStore>),
        templates_bytes_max: 12,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let made = create(&server, &root(), "t", image(&[b"12345678"], &[b"12345678"])).await;
    made.unwrap();
    server.sessions.create(&root(), on("s", "t")).await.unwrap();
    let made = create(&server, &root(), "t", image(&[b"more"], &[b"more"])).await;
    made.unwrap();
    // No template has the first layer any more, but the session does.
    let full = create(&server, &root(), "t", image(&[b"next"], &[b"next"])).await;
    assert_eq!(full.unwrap_err().code(), Code::Exhausted);
    let id = "s".parse().unwrap();
    server.sessions.destroy(&root(), &id).await.unwrap();
    let made = create(&server, &root(), "t", image(&[b"next"], &[b"next"])).await;
    made.unwrap();
}

#[tokio::test]
async fn a_caller_that_goes_leaves_memory_and_store_alike() {
    let (server, layers) = server().await;
    let mut polls = 0;
    // However far it has come when nobody waits for it any more.
    loop {
        polls += 1;
        let layer = format!("layer {polls}").into_bytes();
        let (progress, _told) = mpsc::channel::<TemplateProgress>(64);
        let new = NewTemplate {
            name: name(&format!("t{polls}")),
            origin: image(&[&layer], &[&layer]).origin,
        };
        let who = root();
        let mut making = Box::pin(server.sessions.create_template(&who, new, progress));
        let mut left = polls;
        let ended = std::future::poll_fn(|context| {
            left -= 1;
            match making.as_mut().poll(context) {
                std::task::Poll::Pending if left > 0 => std::task::Poll::Pending,
                polled => std::task::Poll::Ready(polled.is_ready()),
            }
        })
        .await;
        drop(making);
        if ended {
            break;
        }
    }
    assert!(polls > 2, "it was never interrupted");
    let alike = async {
        loop {
            let stored = server.store.templates().await.unwrap();
            let stored: Vec<_> = stored.into_iter().map(|record| record.name).collect();
            let listed = server.sessions.list_templates().into_iter();
            let listed: Vec<_> = listed.map(|view| view.record.name).collect();
            if stored == listed && layers.names().len() == listed.len() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let alike = tokio::time::timeout(PATIENCE, alike).await;
    alike.expect("a template is in the store and not listed, or layers are left");
}

#[tokio::test]
async fn without_host_a_server_is_ready_when_it_has_a_template() {
    let config = Config {
        layers: Some(Arc::new(FakeLayers::default())),
        host_template: false,
        ..Config::default()
    };
    let server = Server::with(config, FakeDriver::new()).await;
    let not_yet = server.sessions.ready().await.unwrap_err();
    assert!(not_yet.to_string().contains("--allow-host-template"));
    let made = create(&server, &root(), "t", image(&[b"base"], &[b"base"])).await;
    made.unwrap();
    server.sessions.ready().await.unwrap();
    server.sessions.create(&root(), on("s", "t")).await.unwrap();
}
