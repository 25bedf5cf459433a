//! Where the bytes of a template's image come from: a registry, or a client that uploads them. What
//! either says is not believed: digests are checked by whoever asks.

use crate::Error;
use async_trait::async_trait;
use bytes::Bytes;
use k8e_egress::Egress;
use k8e_image::{
    Blob, BlobStream, CONFIG_BYTES_MAX, Credentials, ImageError, Manifest, Reference, Registry,
    RegistryPolicy, Resolve,
};
use k8e_model::{Digest, HostName};
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

/// Of what a client says about where it has an image from.
const ORIGIN_CHARS_MAX: usize = 255;

/// Where a template's image comes from.
pub enum TemplateOrigin {
    /// The server fetches it.
    Registry {
        /// `[registry/]repository[:tag][@digest]`.
        reference: String,
        /// A user and a password for the registry; never stored.
        credentials: Option<(String, String)>,
    },
    /// A client sends it.
    Upload {
        /// The bytes of its manifest.
        manifest: Vec<u8>,
        /// The bytes of its configuration.
        config: Vec<u8>,
        /// Where the client has it from, for people.
        origin: String,
        /// Brings its layers.
        layers: Box<dyn LayerUpload>,
    },
}

/// A client that sends layers.
#[async_trait]
pub trait LayerUpload: Send {
    /// Asks for a layer, by the digest of its bytes as they are sent.
    async fn want(&mut self, digest: &Digest) -> Result<(), Error>;

    /// The next bytes of that layer; none at its end.
    async fn next(&mut self) -> Result<Option<Bytes>, Error>;
}

/// An image that can be asked for part by part.
#[async_trait]
pub(super) trait Source: Send {
    /// The manifest, and the bytes of the configuration that it names.
    async fn image(&mut self) -> Result<(Manifest, Vec<u8>), Error>;

    /// Begins a layer.
    async fn layer(&mut self, blob: &Blob) -> Result<(), Error>;

    /// The next bytes of that layer; none at its end.
    async fn next(&mut self) -> Result<Option<Bytes>, Error>;
}

/// An image that a client sends.
struct UploadSource {
    manifest: Vec<u8>,
    config: Vec<u8>,
    layers: Box<dyn LayerUpload>,
}

/// An image on a registry.
struct RegistrySource {
    reference: Reference,
    credentials: Option<Credentials>,
    policy: RegistryPolicy,
    egress: Option<Arc<Egress>>,
    registry: Option<Registry>,
    stream: Option<BlobStream>,
}

/// Looks names up as sandboxes have them looked up.
struct Names(Option<Arc<Egress>>);

// === impl TemplateOrigin ===

impl TemplateOrigin {
    /// How people are shown it, and where its bytes come from.
    pub(super) fn open(self, config: &crate::Config) -> Result<(String, Box<dyn Source>), Error> {
        match self {
            Self::Registry {
                reference,
                credentials,
            } => {
                let reference: Reference = reference.parse()?;
                let credentials =
                    credentials.map(|(username, password)| Credentials { username, password });
                let shown = reference.to_string();
                let source = RegistrySource {
                    reference,
                    credentials,
                    policy: config.registries.clone(),
                    egress: config.gates.clone(),
                    registry: None,
                    stream: None,
                };
                Ok((shown, Box::new(source)))
            }
            Self::Upload {
                manifest,
                config,
                origin,
                layers,
            } => {
                let plain = origin.chars().filter(|c| !c.is_control());
                let shown: String = plain.take(ORIGIN_CHARS_MAX).collect();
                let source = UploadSource {
                    manifest,
                    config,
                    layers,
                };
                Ok((format!("upload of {shown}"), Box::new(source)))
            }
        }
    }
}

// === impl UploadSource ===

#[async_trait]
impl Source for UploadSource {
    async fn image(&mut self) -> Result<(Manifest, Vec<u8>), Error> {
        let manifest = Manifest::parse(&self.manifest)?;
        if self.config.len() > CONFIG_BYTES_MAX {
            let max = format!("{CONFIG_BYTES_MAX} bytes");
            let what = "the image's configuration";
            return Err(ImageError::TooLarge { what, max }.into());
        }
        Ok((manifest, std::mem::take(&mut self.config)))
    }

    async fn layer(&mut self, blob: &Blob) -> Result<(), Error> {
        self.layers.want(&blob.digest).await
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        self.layers.next().await
    }
}

// === impl RegistrySource ===

#[async_trait]
impl Source for RegistrySource {
    async fn image(&mut self) -> Result<(Manifest, Vec<u8>), Error> {
        let names = Arc::new(Names(self.egress.clone()));
        let credentials = self.credentials.take();
        let found = Registry::find(&self.policy, names, &self.reference, credentials);
        let (mut registry, manifest) = found.await?;
        let config = registry.config(&manifest).await?;
        self.registry = Some(registry);
        Ok((manifest, config))
    }

    async fn layer(&mut self, blob: &Blob) -> Result<(), Error> {
        if let Some(registry) = &mut self.registry {
            self.stream = Some(registry.blob(blob).await?);
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        match &mut self.stream {
            Some(stream) => Ok(stream.next().await?),
            None => Err(ImageError::Invalid("no layer was begun".to_owned()).into()),
        }
    }
}

// === impl Names ===

impl Resolve for Names {
    fn resolve<'a>(
        &'a self,
        host: &'a str,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
        Box::pin(async move {
            let egress = self
                .0
                .as_ref()
                .ok_or_else(|| io::Error::other("there is no resolver"))?;
            let name: HostName = host.parse().map_err(io::Error::other)?;
            let addresses = egress.resolve(&name).await?;
            Ok(addresses.into_iter().map(IpAddr::V4).collect())
        })
    }
}
