//! Templates: names of images, the fetching and unpacking of their layers, and which layers are still
//! needed.
//!
//! A template is listed when all of its layers are unpacked and its row is written, never before. A
//! session keeps in its record what it stands on, so a name can be given to another image, and the
//! layers of the first stay until no session needs them. What nothing needs is removed: after each change,
//! and now and then, which also finds what a crash left.

mod fetch;
mod source;

pub use source::{LayerUpload, TemplateOrigin};

use crate::recorder::now_ms;
use crate::sessions::Shared;
use crate::{Error, Sessions};
use k8e_driver::LayerStore;
use k8e_model::{Digest, Image, Principal, Template, TemplateName};
use k8e_store::{Store, TemplateRecord};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{sleep, timeout};

/// All of them are in memory, some kilobytes each.
const TEMPLATES_MAX: usize = 1000;

/// Made at once: each has a connection, a file and a process that unpacks.
const MADE_AT_ONCE: usize = 2;

/// All of a template: 16 GiB at 5 MB a second.
const MAKE_TIMEOUT: Duration = Duration::from_secs(3600);

/// How often what nobody needs is looked for, besides after changes.
const COLLECT_EVERY: Duration = Duration::from_secs(600);

/// What a template shall be.
pub struct NewTemplate {
    /// Its name; a template of that name is replaced.
    pub name: TemplateName,
    /// Where its image comes from.
    pub origin: TemplateOrigin,
}

/// A template, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateView {
    /// Its record.
    pub record: TemplateRecord,
    /// Sessions that are not over and stand on its image.
    pub sessions: usize,
}

/// How far the making of a template is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateProgress {
    /// Which layer, from 1 on.
    pub layer: usize,
    /// Of how many.
    pub layers: usize,
    /// Of this layer, as it is sent.
    pub bytes: u64,
    /// Of this layer, in all.
    pub bytes_total: u64,
    /// It is fetched and being unpacked, or is there already.
    pub unpacking: bool,
}

/// The templates of a server.
pub(crate) struct Templates {
    // Held for map operations only, never across an await.
    view: Mutex<BTreeMap<TemplateName, Arc<TemplateRecord>>>,
    /// Layers of templates that are being made.
    pinned: Arc<Mutex<HashMap<Digest, usize>>>,
    making: Semaphore,
    /// What each layer takes that is there: also those that only sessions need.
    sizes: Mutex<HashMap<Digest, u64>>,
    /// Held while a layer is unpacked: what is left of the disk space is known then.
    unpacking: tokio::sync::Mutex<()>,
    /// Held while a row and its place in memory change together.
    changing: tokio::sync::Mutex<()>,
    /// Held while layers are removed, and while somebody finds out whether one is there.
    collecting: tokio::sync::Mutex<()>,
}

/// Keeps layers from being removed while their template is made.
struct Pins {
    pinned: Arc<Mutex<HashMap<Digest, usize>>>,
    layers: Vec<Digest>,
}

/// Has layers that nobody needs removed.
struct CollectOnDrop(Arc<Shared>);

// === impl Sessions ===

impl Sessions {
    /// Makes a template, or makes it stand for another image. For administrators. When the returned future is
    /// dropped, nothing has changed but maybe layers that nobody needs, which are collected.
    pub async fn create_template(
        &self,
        who: &Principal,
        new: NewTemplate,
        progress: mpsc::Sender<TemplateProgress>,
    ) -> Result<TemplateView, Error> {
        let audit = self.audited(who, "template.create", new.name.as_str());
        // Of a failed one, of one that nobody waits for any more, or of what the name stood for.
        let _collect = CollectOnDrop(Arc::clone(&self.shared));
        let made = timeout(MAKE_TIMEOUT, self.make_template(who, new, progress)).await;
        let made = made.unwrap_or(Err(Error::TemplateTimeout(MAKE_TIMEOUT)));
        audit.end(made)
    }

    async fn make_template(
        &self,
        who: &Principal,
        new: NewTemplate,
        progress: mpsc::Sender<TemplateProgress>,
    ) -> Result<TemplateView, Error> {
        self.administrator(who, "templates are made")?;
        let shared = &self.shared;
        let layers = shared.layers()?;
        shared.templates.has_room(&new.name)?;
        let _turn = shared.templates.making.acquire().await;
        let (shown, mut source) = new.origin.open(&shared.config)?;
        let (manifest, config) = source.image().await?;
        let image = manifest.image(&config)?;
        let pins = Pins::new(&shared.templates, &image.layers);
        // What sessions needed that are over by now makes room.
        shared.collect_unneeded().await;
        let fetched = shared.fetch(&layers, &manifest, &image, source.as_mut(), &progress);
        let layer_bytes = fetched.await?;
        let record = TemplateRecord {
            name: new.name,
            image,
            layer_bytes,
            source: shown,
            created_at: now_ms(),
            created_by: who.name().to_owned(),
        };
        let record = Arc::new(record);
        let (own, kept) = (Arc::clone(shared), Arc::clone(&record));
        // Not interrupted by a caller that goes: a row without its place in memory would be listed by the
        // next start, when its layers are long collected.
        let keeping = async move { own.keep_template(kept, pins).await };
        self.whole(keeping).await?;
        Ok(shared.view_template(&record))
    }

    /// Runs work that must end once it has begun, whoever waits for it.
    async fn whole(
        &self,
        work: impl Future<Output = Result<(), Error>> + Send + 'static,
    ) -> Result<(), Error> {
        let Ok(guard) = Arc::clone(&self.shared.work).try_read_owned() else {
            return Err(Error::Stopping);
        };
        let work = self.shared.runtime.spawn(async move {
            // Shutdown waits for it.
            let _guard = guard;
            work.await
        });
        work.await.unwrap_or(Err(Error::Stopping))
    }

    /// All templates but `host`, by name.
    pub fn list_templates(&self) -> Vec<TemplateView> {
        let records: Vec<_> = self.shared.templates.view().values().cloned().collect();
        let shared = &self.shared;
        records
            .iter()
            .map(|record| shared.view_template(record))
            .collect()
    }

    /// One template.
    pub fn get_template(&self, name: &TemplateName) -> Result<TemplateView, Error> {
        let record = self.shared.templates.view().get(name).cloned();
        let record = record.ok_or_else(|| not_found(name))?;
        Ok(self.shared.view_template(&record))
    }

    /// Deletes a template that no session uses. For administrators.
    pub async fn delete_template(&self, who: &Principal, name: &TemplateName) -> Result<(), Error> {
        let audit = self.audited(who, "template.delete", name.as_str());
        audit.end(self.remove_template(who, name).await)
    }

    async fn remove_template(&self, who: &Principal, name: &TemplateName) -> Result<(), Error> {
        self.administrator(who, "templates are deleted")?;
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        self.whole(async move { shared.forget_template(&name).await })
            .await
    }
}

// === impl Shared ===

impl Shared {
    fn layers(&self) -> Result<Arc<dyn LayerStore>, Error> {
        self.config.layers.clone().ok_or(Error::NoImages)
    }

    /// Writes a template down and lists it.
    async fn keep_template(&self, record: Arc<TemplateRecord>, pins: Pins) -> Result<(), Error> {
        let _changing = self.templates.changing.lock().await;
        self.templates.has_room(&record.name)?;
        self.store.put_template(&record).await?;
        self.templates.view().insert(record.name.clone(), record);
        drop(pins);
        Ok(())
    }

    async fn forget_template(&self, name: &TemplateName) -> Result<(), Error> {
        let changing = self.templates.changing.lock().await;
        let record = self.take_template(name)?;
        if let Err(error) = self.store.delete_template(name).await {
            // The next start would find it: it is there.
            let mut view = self.templates.view();
            view.entry(name.clone()).or_insert(record);
            return Err(error.into());
        }
        drop(changing);
        self.collect_unneeded().await;
        Ok(())
    }

    fn view_template(&self, record: &Arc<TemplateRecord>) -> TemplateView {
        TemplateView {
            sessions: self.sessions_of_image(&record.image.digest),
            record: TemplateRecord::clone(record),
        }
    }

    /// Takes a template off the list, unless a session uses it. A session that is being admitted looks
    /// again once it can be seen here.
    fn take_template(&self, name: &TemplateName) -> Result<Arc<TemplateRecord>, Error> {
        let record = self
            .templates
            .view()
            .remove(name)
            .ok_or_else(|| not_found(name))?;
        let digest = &record.image.digest;
        let others = self
            .templates
            .view()
            .values()
            .any(|other| other.image.digest == *digest);
        let sessions = if others {
            0
        } else {
            self.sessions_of_image(digest)
        };
        if sessions > 0 {
            let name = name.clone();
            self.templates.view().entry(name.clone()).or_insert(record);
            return Err(Error::TemplateInUse { name, sessions });
        }
        Ok(record)
    }

    fn collect_soon(self: &Arc<Self>) {
        let shared = Arc::clone(self);
        self.runtime
            .spawn(async move { shared.collect_unneeded().await });
    }

    /// Removes layers that no template, no session and nothing that is being made needs.
    pub(crate) async fn collect_unneeded(&self) {
        let Some(layers) = &self.config.layers else {
            return;
        };
        let _collecting = self.templates.collecting.lock().await;
        let found = match layers.list().await {
            Ok(found) => found,
            Err(error) => return tracing::warn!("cannot list layers of images: {error}"),
        };
        self.survey(layers.as_ref(), &found).await;
        let needed = self.needed_layers();
        for layer in found.iter().filter(|layer| !needed.contains(*layer)) {
            match layers.remove(layer).await {
                Ok(()) => {
                    self.templates.sizes().remove(layer);
                    tracing::debug!(%layer, "removed a layer that nothing needs");
                }
                Err(error) => tracing::warn!(%layer, "cannot remove a layer: {error}"),
            }
        }
    }

    /// Finds out what layers take that are there and were not looked at since the start.
    async fn survey(&self, layers: &dyn LayerStore, found: &[Digest]) {
        for layer in found {
            if self.templates.sizes().contains_key(layer) {
                continue;
            }
            if let Ok(Some(size)) = layers.find(layer).await {
                self.templates.sizes().insert(layer.clone(), size.bytes);
            }
        }
    }

    fn needed_layers(&self) -> HashSet<Digest> {
        let mut needed: HashSet<Digest> = self.templates.pinned().keys().cloned().collect();
        for record in self.templates.view().values() {
            needed.extend(record.image.layers.iter().cloned());
        }
        self.each_live(|live| {
            let layers = live.record.image.iter().flat_map(|image| &image.layers);
            needed.extend(layers.cloned());
        });
        needed
    }
}

/// Collects layers until shutdown.
pub(crate) async fn collect(shared: Arc<Shared>) {
    loop {
        shared.collect_unneeded().await;
        tokio::select! {
            () = shared.stopped() => return,
            () = sleep(COLLECT_EVERY) => {}
        }
    }
}

// === impl Templates ===

impl Templates {
    pub(crate) async fn load(store: &Store) -> Result<Self, Error> {
        fetch::remove_leftovers(store);
        let records = store.templates().await?.into_iter();
        let view = records.map(|record| (record.name.clone(), Arc::new(record)));
        Ok(Self {
            view: Mutex::new(view.collect()),
            pinned: Arc::default(),
            making: Semaphore::new(MADE_AT_ONCE),
            sizes: Mutex::default(),
            unpacking: tokio::sync::Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            collecting: tokio::sync::Mutex::default(),
        })
    }

    /// The template with its image fixed, and the image. Nothing here waits: sessions are made so.
    pub(crate) fn resolve(&self, template: &Template) -> Result<(Template, Option<Image>), Error> {
        let Template::Image { name, digest } = template else {
            return Ok((Template::Host, None));
        };
        let view = self.view();
        let record = view.get(name);
        let record = record.filter(|record| {
            digest
                .as_ref()
                .is_none_or(|digest| *digest == record.image.digest)
        });
        let record = record.ok_or_else(|| Error::TemplateNotFound(template.clone()))?;
        let pinned = Template::Image {
            name: name.clone(),
            digest: Some(record.image.digest.clone()),
        };
        Ok((pinned, Some(record.image.clone())))
    }

    /// Whether a template that was resolved is still there.
    pub(crate) fn still_has(&self, template: &Template) -> Result<(), Error> {
        match template {
            Template::Host => Ok(()),
            Template::Image { .. } => self.resolve(template).map(drop),
        }
    }

    /// Whether there is none but `host`.
    pub(crate) fn is_empty(&self) -> bool {
        self.view().is_empty()
    }

    fn has_room(&self, name: &TemplateName) -> Result<(), Error> {
        let view = self.view();
        match view.len() >= TEMPLATES_MAX && !view.contains_key(name) {
            true => Err(Error::TemplatesFull { max: TEMPLATES_MAX }),
            false => Ok(()),
        }
    }

    /// What all layers take, each once.
    fn bytes(&self) -> u64 {
        let sizes = self.sizes();
        sizes
            .values()
            .fold(0, |sum, size| sum.saturating_add(*size))
    }

    fn sizes(&self) -> MutexGuard<'_, HashMap<Digest, u64>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self) -> MutexGuard<'_, BTreeMap<TemplateName, Arc<TemplateRecord>>> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pinned(&self) -> MutexGuard<'_, HashMap<Digest, usize>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl CollectOnDrop ===

impl Drop for CollectOnDrop {
    fn drop(&mut self) {
        self.0.collect_soon();
    }
}

// === impl Pins ===

impl Pins {
    fn new(templates: &Templates, layers: &[Digest]) -> Self {
        let mut pinned = templates.pinned();
        for layer in layers {
            *pinned.entry(layer.clone()).or_default() += 1;
        }
        drop(pinned);
        Self {
            pinned: Arc::clone(&templates.pinned),
            layers: layers.to_vec(),
        }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut pinned = self.pinned.lock().unwrap_or_else(PoisonError::into_inner);
        for layer in &self.layers {
            if let Some(count) = pinned.get_mut(layer) {
                *count -= 1;
                if *count == 0 {
                    pinned.remove(layer);
                }
            }
        }
    }
}

fn not_found(name: &TemplateName) -> Error {
    let name = name.clone();
    Error::TemplateNotFound(Template::Image { name, digest: None })
}
