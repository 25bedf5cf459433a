//! Manifests, indexes and configurations of images: OCI's, and Docker's version 2.

use crate::decode::Compression;
use crate::error::ImageError;
use crate::hash::digest_of;
use k8e_model::{Digest, Env, IMAGE_LAYERS_MAX, Image, ImageConfig};
use serde::Deserialize;
use std::collections::BTreeMap;

/// What registries take.
pub const MANIFEST_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Of a configuration: a history of thousands of steps fits.
pub const CONFIG_BYTES_MAX: usize = 4 * 1024 * 1024;

/// Of one layer, as it is stored and sent.
pub const LAYER_COMPRESSED_BYTES_MAX: u64 = 8 * 1024 * 1024 * 1024;

/// Of all layers of an image, as they are stored and sent.
pub const IMAGE_COMPRESSED_BYTES_MAX: u64 = 16 * 1024 * 1024 * 1024;

/// Platforms of one index.
const INDEX_ENTRIES_MAX: usize = 1000;

/// What a manifest is asked for as.
pub(crate) const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, \
     application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, \
     application/vnd.docker.distribution.manifest.v2+json";

/// What a name on a registry stands for.
#[derive(Debug)]
pub(crate) enum Document {
    /// One image.
    Manifest(Manifest),
    /// One image for each platform; that of this machine.
    Index(Digest),
}

/// The manifest of an image: which blobs it is made of.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// Of the manifest's own bytes.
    pub digest: Digest,
    /// Where its configuration is.
    pub config: Blob,
    /// Its layers, the lowest first.
    pub layers: Vec<LayerBlob>,
}

/// A blob, by what it must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blob {
    /// Of its bytes.
    pub digest: Digest,
    /// How many they are.
    pub bytes: u64,
}

/// A layer as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerBlob {
    /// Its bytes.
    pub blob: Blob,
    /// What they must be unpacked as.
    pub compression: Compression,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireDocument {
    schema_version: u32,
    #[serde(default)]
    config: Option<WireDescriptor>,
    #[serde(default)]
    layers: Option<Vec<WireDescriptor>>,
    #[serde(default)]
    manifests: Option<Vec<WireDescriptor>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WireDescriptor {
    #[serde(default)]
    media_type: String,
    pub(crate) digest: String,
    size: u64,
    #[serde(default)]
    platform: Option<WirePlatform>,
    #[serde(default)]
    pub(crate) annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct WirePlatform {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
}

#[derive(Deserialize)]
struct WireConfig {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default)]
    config: Option<WireRunConfig>,
    rootfs: WireRootfs,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "PascalCase", default)]
struct WireRunConfig {
    user: Option<String>,
    env: Option<Vec<String>>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct WireRootfs {
    diff_ids: Vec<String>,
}

// === impl Manifest ===

impl Manifest {
    /// Reads a manifest; an index is an error.
    pub fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        match Document::parse(bytes)? {
            Document::Manifest(manifest) => Ok(manifest),
            Document::Index(_) => Err(ImageError::invalid(
                "the manifest is an index of several platforms: name one of them",
            )),
        }
    }

    /// The image that this manifest and its configuration describe, with the DiffID of each layer.
    pub fn image(&self, config: &[u8]) -> Result<Image, ImageError> {
        let found = digest_of(config);
        if found != self.config.digest {
            return Err(ImageError::Digest {
                what: "the image's configuration",
                wanted: self.config.digest.to_string(),
                found: found.to_string(),
            });
        }
        let config: WireConfig = json("configuration", config)?;
        let (os, architecture) = ("linux", go_architecture());
        let other = |said: &str, ours: &str| !said.is_empty() && said != ours;
        if other(&config.os, os) || other(&config.architecture, architecture) {
            return Err(ImageError::invalid(format!(
                "the image is for {}/{}: this machine is {os}/{architecture}",
                config.os, config.architecture
            )));
        }
        let layers: Result<Vec<Digest>, _> =
            config.rootfs.diff_ids.iter().map(|id| id.parse()).collect();
        let layers = layers.map_err(|error| ImageError::invalid(error.message))?;
        if layers.len() != self.layers.len() {
            return Err(ImageError::invalid(format!(
                "the image's configuration names {} layers and its manifest {}",
                layers.len(),
                self.layers.len()
            )));
        }
        let run = config.config.unwrap_or_default();
        let env = run.env.unwrap_or_default().into_iter().filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        });
        let env: BTreeMap<String, String> = env.collect();
        let of_the_image =
            |error: k8e_model::Error| ImageError::invalid(format!("the image's {}", error.message));
        let config = ImageConfig::checked(
            Env::try_from(env).map_err(of_the_image)?,
            &run.user.unwrap_or_default(),
            &run.working_dir.unwrap_or_default(),
            run.entrypoint.unwrap_or_default(),
            run.cmd.unwrap_or_default(),
        );
        Ok(Image {
            digest: self.digest.clone(),
            layers,
            config: config.map_err(|error| ImageError::invalid(error.message))?,
        })
    }
}

// === impl Document ===

impl Document {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        if bytes.len() > MANIFEST_BYTES_MAX {
            let max = format!("{MANIFEST_BYTES_MAX} bytes");
            return Err(ImageError::too_large("the image's manifest", max));
        }
        let wire: WireDocument = json("manifest", bytes)?;
        if wire.schema_version != 2 {
            return Err(ImageError::invalid(format!(
                "the image's manifest has version {}: only version 2 is understood; push the image again with a newer tool",
                wire.schema_version
            )));
        }
        match (wire.config, wire.layers, wire.manifests) {
            (Some(config), Some(layers), None) => {
                manifest(bytes, &config, &layers).map(Self::Manifest)
            }
            (None, None, Some(manifests)) => choose(&manifests).map(Self::Index),
            // Two readers could take two different things for the image.
            _ => Err(ImageError::invalid(
                "the image's manifest is neither one image nor an index of images",
            )),
        }
    }
}

// === impl WireDescriptor ===

impl WireDescriptor {
    pub(crate) fn blob(&self) -> Result<Blob, ImageError> {
        let digest = self.digest.parse();
        Ok(Blob {
            digest: digest.map_err(|error: k8e_model::Error| ImageError::invalid(error.message))?,
            bytes: self.size,
        })
    }

    pub(crate) fn is_for_this_machine(&self) -> bool {
        self.platform.as_ref().is_none_or(|platform| {
            platform.os == "linux" && platform.architecture == go_architecture()
        })
    }
}

fn manifest(
    bytes: &[u8],
    config: &WireDescriptor,
    layers: &[WireDescriptor],
) -> Result<Manifest, ImageError> {
    if layers.is_empty() || layers.len() > IMAGE_LAYERS_MAX {
        return Err(ImageError::invalid(format!(
            "the image has {} layers: 1 to {IMAGE_LAYERS_MAX} are taken",
            layers.len()
        )));
    }
    let config = config.blob()?;
    if config.bytes > CONFIG_BYTES_MAX as u64 {
        let max = format!("{CONFIG_BYTES_MAX} bytes");
        return Err(ImageError::too_large("the image's configuration", max));
    }
    let layer = |layer: &WireDescriptor| {
        let compression = Compression::of_media_type(&layer.media_type).ok_or_else(|| {
            let kind: String = layer.media_type.chars().take(100).collect();
            ImageError::invalid(format!(
                "a layer of the image is of an unknown kind: {kind:?}"
            ))
        })?;
        let blob = layer.blob()?;
        if blob.bytes > LAYER_COMPRESSED_BYTES_MAX {
            let max = format!("{LAYER_COMPRESSED_BYTES_MAX} bytes");
            return Err(ImageError::too_large("a layer of the image", max));
        }
        Ok(LayerBlob { blob, compression })
    };
    let layers: Vec<LayerBlob> = layers.iter().map(layer).collect::<Result<_, _>>()?;
    // Each is below its bound: no overflow.
    if layers.iter().map(|layer| layer.blob.bytes).sum::<u64>() > IMAGE_COMPRESSED_BYTES_MAX {
        let max = format!("{IMAGE_COMPRESSED_BYTES_MAX} bytes");
        return Err(ImageError::too_large("the image", max));
    }
    Ok(Manifest {
        digest: digest_of(bytes),
        config,
        layers,
    })
}

/// The first image for this machine.
pub(crate) fn choose(manifests: &[WireDescriptor]) -> Result<Digest, ImageError> {
    if manifests.len() > INDEX_ENTRIES_MAX {
        return Err(ImageError::too_large(
            "platforms of the image",
            INDEX_ENTRIES_MAX,
        ));
    }
    let ours = manifests.iter().find(|entry| entry.is_for_this_machine());
    let ours = ours.ok_or_else(|| {
        ImageError::invalid(format!(
            "the image is not there for linux/{}, which this machine is",
            go_architecture()
        ))
    })?;
    Ok(ours.blob()?.digest)
}

/// What Go, and so every image, calls this machine.
pub(crate) fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub(crate) fn json<'a, T: Deserialize<'a>>(what: &str, bytes: &'a [u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ImageError::invalid(format!("the image's {what} cannot be read: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn descriptor(media_type: &str, fill: &str) -> serde_json::Value {
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", fill.repeat(32)), "size": 10 })
    }

    const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

    fn manifest_for(config: &[u8], layers: usize) -> Vec<u8> {
        let value = json!({
            "schemaVersion": 2,
            "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(config).as_str(), "size": config.len() },
            "layers": vec![descriptor(LAYER, "0a"); layers],
        });
        value.to_string().into_bytes()
    }

    fn config(more: serde_json::Value) -> Vec<u8> {
        let mut value = json!({ "os": "linux", "architecture": go_architecture(), "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", "0b".repeat(32))] } });
        value
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        value.to_string().into_bytes()
    }

    #[test]
    fn an_image_is_read() {
        let config = config(json!({ "config": {
            "User": "app:app", "Env": ["PATH=/bin", "nonsense", "A=b=c"], "WorkingDir": "/srv", "Entrypoint": null, "Cmd": ["python3"]
        } }));
        let bytes = manifest_for(&config, 1);
        let manifest = Manifest::parse(&bytes).unwrap();
        let image = manifest.image(&config).unwrap();
        assert_eq!(image.digest, digest_of(&bytes));
        assert_eq!(image.config.user.as_deref(), Some("app"));
        assert_eq!(image.config.workdir.as_deref(), Some("/srv"));
        assert_eq!(
            image.config.env.iter().collect::<Vec<_>>(),
            [("A", "b=c"), ("PATH", "/bin")]
        );
        assert_eq!(image.config.cmd, ["python3"]);
    }

    #[test]
    fn what_does_not_fit_together_is_refused() {
        let good = config(json!({}));
        assert!(
            Manifest::parse(&manifest_for(&good, 2))
                .unwrap()
                .image(&good)
                .is_err()
        );
        assert!(Manifest::parse(&manifest_for(&good, 0)).is_err());
        assert!(Manifest::parse(&manifest_for(&good, IMAGE_LAYERS_MAX + 1)).is_err());
        let other = config(json!({ "author": "somebody else" }));
        let wrong = Manifest::parse(&manifest_for(&good, 1))
            .unwrap()
            .image(&other);
        assert!(matches!(wrong, Err(ImageError::Digest { .. })));
        let arm = config(json!({ "architecture": "s390x" }));
        let error = Manifest::parse(&manifest_for(&arm, 1))
            .unwrap()
            .image(&arm)
            .unwrap_err();
        assert!(error.to_string().contains("linux/s390x"), "{error}");
        for bad in [
            json!({ "schemaVersion": 1 }),
            json!({ "schemaVersion": 2 }),
            json!({ "schemaVersion": 2, "config": descriptor("x", "0a"), "layers": [descriptor("text/plain", "0a")] }),
            json!({ "schemaVersion": 2, "config": descriptor("x", "0a"), "layers": [descriptor(LAYER, "0a")], "manifests": [] }),
            json!({ "schemaVersion": 2, "manifests": [] }),
        ] {
            assert!(
                Document::parse(bad.to_string().as_bytes()).is_err(),
                "{bad}"
            );
        }
        let mut large = descriptor(LAYER, "0a");
        large["size"] = json!(u64::MAX);
        let bad = json!({ "schemaVersion": 2, "config": descriptor("x", "0a"), "layers": [large] });
        assert!(Document::parse(bad.to_string().as_bytes()).is_err());
    }

    #[test]
    fn an_index_has_an_image_for_this_machine() {
        let entry = |arch: &str, fill: &str| {
            let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", fill);
            entry["platform"] = json!({ "os": "linux", "architecture": arch });
            entry
        };
        let index = json!({ "schemaVersion": 2, "manifests": [entry("s390x", "01"), entry(go_architecture(), "02")] });
        let Document::Index(digest) = Document::parse(index.to_string().as_bytes()).unwrap() else {
            panic!("not an index")
        };
        assert!(digest.hex().starts_with("0202"));
        let other = json!({ "schemaVersion": 2, "manifests": [entry("s390x", "01")] });
        assert!(Document::parse(other.to_string().as_bytes()).is_err());
    }
}
