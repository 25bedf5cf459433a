//! Images on the client's own disk: an OCI layout (a directory or a tar of one), and what `docker save`
//! writes, also compressed; and a plain directory. Read by the command line, which sends manifest, configuration and layers to the server.

mod place;

use crate::decode::{Compression, read_bounded};
use crate::error::ImageError;
use crate::hash::{Hasher, digest_of};
use crate::manifest::{
    CONFIG_BYTES_MAX, Document, IMAGE_COMPRESSED_BYTES_MAX, MANIFEST_BYTES_MAX, Manifest,
    WireDescriptor, choose, json,
};
use crate::reference::Reference;
use crate::tar::{Archive, Kind};
use k8e_model::Digest;
use place::{Place, Source as FileSource};
use serde::Deserialize;
use serde_json::json;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Of a compressed archive, when it is not compressed: the largest image, and its names.
const UNCOMPRESSED_BYTES_MAX: u64 = IMAGE_COMPRESSED_BYTES_MAX + (1 << 30);

/// Files of an archive that are looked at: a blob for each layer, and names for them.
const FILES_MAX: usize = 10_000;

/// Manifests that name each other.
const INDEXES_MAX: usize = 3;

/// Links from name to name in what `docker save` writes.
const LINKS_MAX: usize = 4;

/// The annotation with a tag.
const REF_NAME: &str = "org.opencontainers.image.ref.name";

/// Where an image comes from, as it is typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A registry.
    Registry(Reference),
    /// `oci:DIR[:TAG]`: an OCI layout.
    OciLayout {
        /// The directory.
        dir: PathBuf,
        /// Which of its images; none when it has one.
        tag: Option<String>,
    },
    /// `oci-archive:FILE`: a tar of an OCI layout.
    OciArchive(PathBuf),
    /// `docker-archive:FILE`: what `docker save` writes.
    DockerArchive(PathBuf),
    /// `dir:DIR`: a directory with a root file system.
    Directory(PathBuf),
}

/// An image on this disk.
#[derive(Debug)]
pub struct LocalImage {
    /// The bytes of its manifest.
    pub manifest: Vec<u8>,
    /// The bytes of its configuration.
    pub config: Vec<u8>,
    layers: HashMap<Digest, Place>,
}

/// The files of an image, by their names.
enum Files {
    Directory(PathBuf),
    Tar {
        archive: PathBuf,
        files: HashMap<Vec<u8>, Place>,
        links: HashMap<Vec<u8>, Vec<u8>>,
    },
}

#[derive(Deserialize)]
struct WireIndex {
    manifests: Vec<WireDescriptor>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct WireSaved {
    config: String,
    layers: Vec<String>,
}

// === impl Source ===

impl FromStr for Source {
    type Err = ImageError;
    fn from_str(text: &str) -> Result<Self, ImageError> {
        let path = |path: &str| match path {
            "" => Err(ImageError::invalid(format!("{text:?} names no file"))),
            path => Ok(PathBuf::from(path)),
        };
        match text.split_once(':') {
            Some(("oci", rest)) => {
                // A directory may have a colon in its name; a tag has no slash.
                let (dir, tag) = match rest.rsplit_once(':') {
                    Some((dir, tag)) if !tag.contains('/') && !Path::new(rest).is_dir() => {
                        (dir, Some(tag.to_owned()))
                    }
                    _ => (rest, None),
                };
                let dir = path(dir)?;
                Ok(Self::OciLayout { dir, tag })
            }
            Some(("oci-archive", rest)) => path(rest).map(Self::OciArchive),
            Some(("docker-archive", rest)) => path(rest).map(Self::DockerArchive),
            Some(("dir", rest)) => path(rest).map(Self::Directory),
            _ => {
                let reference = text.strip_prefix("docker://").unwrap_or(text);
                reference.parse().map(Self::Registry)
            }
        }
    }
}

// === impl LocalImage ===

impl LocalImage {
    /// Reads what describes the image. Reads all of a `docker save` once, for the digests of its layers.
    ///
    /// # Errors
    ///
    /// When it is not there, or is not an image for this machine's platform; for a registry.
    pub fn open(source: &Source) -> Result<Self, ImageError> {
        match source {
            Source::Registry(reference) => Err(ImageError::invalid(format!(
                "{reference} is on a registry, not on this disk"
            ))),
            Source::OciLayout { dir, tag } => {
                layout(&Files::Directory(dir.clone()), tag.as_deref())
            }
            Source::OciArchive(file) => layout(&Files::scan(file)?, None),
            Source::DockerArchive(file) => saved(&Files::scan(file)?),
            Source::Directory(dir) => directory(dir),
        }
    }

    /// The bytes of a layer.
    ///
    /// # Errors
    ///
    /// When the image has no such layer, or it cannot be read.
    pub fn layer(&self, digest: &Digest) -> Result<impl Read + Send + use<>, ImageError> {
        let place = self.layers.get(digest);
        let place =
            place.ok_or_else(|| ImageError::invalid(format!("the image has no layer {digest}")))?;
        place.open()
    }
}

// === impl Files ===

impl Files {
    /// Finds out what is where in a tar archive. A compressed one is uncompressed first, into a file
    /// without a name.
    fn scan(archive: &Path) -> Result<Self, ImageError> {
        let step = || ImageError::io::<std::io::Error>(format!("read {}", archive.display()));
        let mut file = File::open(archive).map_err(step())?;
        let mut magic = [0; 4];
        let read = file.read(&mut magic).map_err(step())?;
        file.seek(SeekFrom::Start(0)).map_err(step())?;
        let source = match Compression::of_magic(&magic[..read]) {
            Compression::None => FileSource::Named(archive.to_owned()),
            compressed @ (Compression::Gzip | Compression::Zstd) => {
                let mut plain = place::nameless()?;
                let mut from = compressed.reader(&file, UNCOMPRESSED_BYTES_MAX);
                std::io::copy(&mut from, &mut plain).map_err(ImageError::io(format!(
                    "uncompress {} into a temporary file (TMPDIR says where)",
                    archive.display()
                )))?;
                drop(from);
                plain.seek(SeekFrom::Start(0)).map_err(step())?;
                file = plain.try_clone().map_err(step())?;
                FileSource::Nameless(std::sync::Arc::new(plain), archive.to_owned())
            }
        };
        let mut tar = Archive::new(std::io::BufReader::with_capacity(1 << 20, file));
        let (mut files, mut links) = (HashMap::new(), HashMap::new());
        while let Some(entry) = tar.next()? {
            if files.len() + links.len() >= FILES_MAX {
                return Err(ImageError::too_large("files of the archive", FILES_MAX));
            }
            let name = plain(&entry.path);
            match entry.kind {
                Kind::Regular => {
                    let place = Place {
                        file: source.clone(),
                        offset: tar.position(),
                        bytes: entry.size,
                    };
                    files.insert(name, place);
                }
                Kind::Symlink => {
                    let mut base = name.clone();
                    base.truncate(base.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1));
                    base.extend(&entry.link);
                    links.insert(name, plain(&base));
                }
                Kind::HardLink => {
                    links.insert(name, plain(&entry.link));
                }
                Kind::Directory | Kind::Fifo | Kind::Device | Kind::Other => {}
            }
        }
        Ok(Self::Tar {
            archive: archive.to_owned(),
            files,
            links,
        })
    }

    fn find(&self, name: &str) -> Result<Place, ImageError> {
        let missing = |whole: &Path| {
            ImageError::invalid(format!(
                "{} has no {name}: it is not an image of that kind",
                whole.display()
            ))
        };
        match self {
            Self::Directory(dir) => {
                let file = dir.join(name);
                let meta = std::fs::metadata(&file).map_err(|_| missing(dir))?;
                Ok(Place {
                    file: FileSource::Named(file),
                    offset: 0,
                    bytes: meta.len(),
                })
            }
            Self::Tar {
                archive,
                files,
                links,
            } => {
                let mut name = plain(name.as_bytes());
                for _ in 0..LINKS_MAX {
                    match links.get(&name) {
                        Some(target) => name.clone_from(target),
                        None => break,
                    }
                }
                files.get(&name).cloned().ok_or_else(|| missing(archive))
            }
        }
    }

    fn read(&self, name: &str, max: usize, what: &'static str) -> Result<Vec<u8>, ImageError> {
        read_bounded(self.find(name)?.open()?, max, what)
    }

    fn blob(&self, digest: &Digest, max: usize, what: &'static str) -> Result<Vec<u8>, ImageError> {
        let bytes = self.read(&blob_name(digest), max, what)?;
        let found = digest_of(&bytes);
        match found == *digest {
            true => Ok(bytes),
            false => Err(ImageError::Digest {
                what,
                wanted: digest.to_string(),
                found: found.to_string(),
            }),
        }
    }
}

/// Without dots and slashes at its ends or doubled.
fn plain(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join(&b'/')
}

fn blob_name(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// An image of an OCI layout.
fn layout(files: &Files, tag: Option<&str>) -> Result<LocalImage, ImageError> {
    let index = files.read("index.json", MANIFEST_BYTES_MAX, "index.json")?;
    let index: WireIndex = json("index", &index)?;
    let has_tag = |entry: &&WireDescriptor| {
        let names = entry.annotations.as_ref().and_then(|all| all.get(REF_NAME));
        tag.is_none_or(|tag| names.is_some_and(|name| name == tag))
    };
    let entries: Vec<&WireDescriptor> = index.manifests.iter().filter(has_tag).collect();
    let mut digest = match (entries.as_slice(), tag) {
        ([one], _) => one.blob()?.digest,
        ([], Some(tag)) => {
            return Err(ImageError::invalid(format!(
                "the layout has no image with the tag {tag:?}"
            )));
        }
        // One for each platform, or several that a tag tells apart.
        _ if entries.iter().all(|entry| entry.annotations.is_none()) => choose(&index.manifests)?,
        _ => {
            return Err(ImageError::invalid(
                "the layout has several images: name one as oci:DIR:TAG",
            ));
        }
    };
    let what = "the image's manifest";
    for _ in 0..INDEXES_MAX {
        let manifest = files.blob(&digest, MANIFEST_BYTES_MAX, what)?;
        match Document::parse(&manifest)? {
            Document::Index(next) => digest = next,
            Document::Manifest(parsed) => {
                let what = "the image's configuration";
                let config = files.blob(&parsed.config.digest, CONFIG_BYTES_MAX, what)?;
                let layer = |layer: &crate::LayerBlob| {
                    let digest = layer.blob.digest.clone();
                    Ok((digest.clone(), files.find(&blob_name(&digest))?))
                };
                let layers: Result<_, ImageError> = parsed.layers.iter().map(layer).collect();
                return Ok(LocalImage {
                    manifest,
                    config,
                    layers: layers?,
                });
            }
        }
    }
    Err(ImageError::invalid(
        "the layout's indexes name each other without end",
    ))
}

/// An image that `docker save` wrote: its manifest is made here, for it has none.
fn saved(files: &Files) -> Result<LocalImage, ImageError> {
    let saved = files.read("manifest.json", MANIFEST_BYTES_MAX, "manifest.json")?;
    let saved: Vec<WireSaved> = json("manifest.json", &saved)?;
    let [image] = saved.as_slice() else {
        return Err(ImageError::invalid(format!(
            "the archive has {} images: save one",
            saved.len()
        )));
    };
    let config = files.read(&image.config, CONFIG_BYTES_MAX, "the image's configuration")?;
    let mut layers = HashMap::new();
    let mut descriptors = Vec::new();
    for name in &image.layers {
        let place = files.find(name)?;
        let (digest, compression) = hash(&place)?;
        let kind = match compression {
            Compression::None => "tar",
            Compression::Gzip => "tar+gzip",
            Compression::Zstd => "tar+zstd",
        };
        descriptors.push(json!({
            "mediaType": format!("application/vnd.oci.image.layer.v1.{kind}"),
            "digest": digest.as_str(),
            "size": place.bytes,
        }));
        layers.insert(digest, place);
    }
    assembled(config, descriptors, layers)
}

/// A directory as the only layer of an image that says nothing about commands.
#[cfg(unix)]
fn directory(dir: &Path) -> Result<LocalImage, ImageError> {
    let file = place::nameless()?;
    let (digest, bytes) = crate::directory::pack(dir, &file)?;
    let config = json!({
        "os": "linux",
        "architecture": crate::manifest::go_architecture(),
        "rootfs": { "type": "layers", "diff_ids": [digest.as_str()] },
    });
    let descriptor = json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": digest.as_str(),
        "size": bytes,
    });
    let place = Place {
        file: FileSource::Nameless(std::sync::Arc::new(file), dir.to_owned()),
        offset: 0,
        bytes,
    };
    let layers = HashMap::from([(digest, place)]);
    assembled(config.to_string().into_bytes(), vec![descriptor], layers)
}

#[cfg(not(unix))]
fn directory(dir: &Path) -> Result<LocalImage, ImageError> {
    let dir = dir.display();
    Err(ImageError::invalid(format!(
        "{dir} has no owners and modes on this system: make an OCI layout or a `docker save` of it"
    )))
}

/// An image whose manifest is made here.
fn assembled(
    config: Vec<u8>,
    layers: Vec<serde_json::Value>,
    places: HashMap<Digest, Place>,
) -> Result<LocalImage, ImageError> {
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(&config).as_str(),
            "size": config.len(),
        },
        "layers": layers,
    });
    let manifest = manifest.to_string().into_bytes();
    Manifest::parse(&manifest)?;
    Ok(LocalImage {
        manifest,
        config,
        layers: places,
    })
}

/// The digest of what is there, and how it is compressed.
fn hash(place: &Place) -> Result<(Digest, Compression), ImageError> {
    let mut from = place.open()?;
    let mut hasher = Hasher::default();
    let mut buffer = vec![0; 1 << 20];
    let mut compression = None;
    loop {
        let read = from.read(&mut buffer);
        match read.map_err(ImageError::io(format!(
            "read {}",
            place.file.path().display()
        )))? {
            0 => break,
            read => {
                compression.get_or_insert(Compression::of_magic(&buffer[..read]));
                hasher.update(&buffer[..read]);
            }
        }
    }
    Ok((hasher.finish(), compression.unwrap_or(Compression::None)))
}

#[cfg(test)]
mod tests;
