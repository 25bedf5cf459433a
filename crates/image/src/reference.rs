//! Image references: `[registry/]repository[:tag][@digest]`, as Docker reads them.

use crate::error::ImageError;
use k8e_model::Digest;
use std::fmt;
use std::str::FromStr;

/// Length of a reference, as it is given and as it is written in full (`docker.io/library/…:latest`): what is
/// stored can be read again.
const REFERENCE_BYTES_MAX: usize = 255;
const TAG_BYTES_MAX: usize = 128;

/// The registry of references that name none, and where it answers.
const DOCKER_HUB: &str = "docker.io";
const DOCKER_HUB_HOST: &str = "registry-1.docker.io";

/// A checked image reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// A host, with a port if one was said.
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

// === impl Reference ===

impl Reference {
    /// The registry as people name it, as in `docker.io` or `registry.example:5000`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Where the registry answers: a host, with a port if one was said.
    pub fn host(&self) -> &str {
        match self.registry.as_str() {
            DOCKER_HUB => DOCKER_HUB_HOST,
            host => host,
        }
    }

    /// Whether a mirror of Docker Hub has it.
    pub fn is_docker_hub(&self) -> bool {
        self.registry == DOCKER_HUB
    }

    /// The path on the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// What the manifest is asked for by: the digest, else the tag.
    pub fn version(&self) -> &str {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.as_str(),
            (None, Some(tag)) => tag,
            (None, None) => "latest",
        }
    }

    /// The digest, when one was said.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }
}

impl FromStr for Reference {
    type Err = ImageError;
    fn from_str(text: &str) -> Result<Self, ImageError> {
        let bad = || {
            let shown: String = text.chars().take(80).collect();
            ImageError::invalid(format!(
                "{shown:?} is not an image reference: write [registry/]repository[:tag][@sha256:…], as in python:3.12"
            ))
        };
        if text.len() > REFERENCE_BYTES_MAX {
            return Err(bad());
        }
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse().map_err(|_| bad())?)),
            None => (text, None),
        };
        let (rest, tag) = match rest.rsplit_once(':') {
            // A colon before a slash is a registry's port.
            Some((rest, tag)) if !tag.contains('/') => (rest, Some(tag.to_owned())),
            _ => (rest, None),
        };
        let is_registry = |first: &str| first.contains(['.', ':']) || first == "localhost";
        let (registry, repository) = match rest.split_once('/') {
            Some((first, path)) if is_registry(first) => (first, path.to_owned()),
            Some(_) => (DOCKER_HUB, rest.to_owned()),
            None => (DOCKER_HUB, format!("library/{rest}")),
        };
        let registry = match registry {
            "index.docker.io" | DOCKER_HUB_HOST => DOCKER_HUB,
            registry => registry,
        };
        let repository = match (registry, repository.contains('/')) {
            (DOCKER_HUB, false) => format!("library/{repository}"),
            _ => repository,
        };
        let good = is_authority(registry)
            && is_repository(&repository)
            && tag.as_deref().is_none_or(is_tag);
        let reference = Self {
            registry: registry.to_owned(),
            repository,
            tag,
            digest,
        };
        if !good || reference.to_string().len() > REFERENCE_BYTES_MAX {
            return Err(bad());
        }
        Ok(reference)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        match (&self.tag, &self.digest) {
            (_, Some(digest)) => write!(f, "@{digest}"),
            (Some(tag), None) => write!(f, ":{tag}"),
            (None, None) => f.write_str(":latest"),
        }
    }
}

/// A host name or IPv4 address, and maybe a port.
pub(crate) fn is_authority(text: &str) -> bool {
    let (host, port) = text.split_once(':').unwrap_or((text, "443"));
    let label = |label: &str| {
        let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        !label.is_empty() && label.bytes().all(inner) && !label.starts_with('-')
    };
    host.split('.').all(label) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_repository(text: &str) -> bool {
    let component = |part: &str| {
        let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        let inner = |b: u8| edge(Some(b)) || matches!(b, b'.' | b'_' | b'-');
        edge(part.bytes().next()) && edge(part.bytes().last()) && part.bytes().all(inner)
    };
    text.split('/').all(component)
}

fn is_tag(text: &str) -> bool {
    let first = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let inner = |b: u8| first(b) || matches!(b, b'.' | b'-');
    text.len() <= TAG_BYTES_MAX && text.bytes().next().is_some_and(first) && text.bytes().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_as_docker_does() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for (text, whole, host) in [
            (
                "python",
                "docker.io/library/python:latest",
                "registry-1.docker.io",
            ),
            (
                "python:3.12",
                "docker.io/library/python:3.12",
                "registry-1.docker.io",
            ),
            (
                "team/app",
                "docker.io/team/app:latest",
                "registry-1.docker.io",
            ),
            (
                "localhost:5000/a/b:1",
                "localhost:5000/a/b:1",
                "localhost:5000",
            ),
            ("localhost/a", "localhost/a:latest", "localhost"),
            ("ghcr.io/a/b_c-d:x.Y", "ghcr.io/a/b_c-d:x.Y", "ghcr.io"),
            (
                "docker.io/python",
                "docker.io/library/python:latest",
                "registry-1.docker.io",
            ),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(
                (reference.to_string().as_str(), reference.host()),
                (whole, host)
            );
        }
        let pinned: Reference = format!("a.example/x:1@{digest}").parse().unwrap();
        assert_eq!(pinned.version(), digest);
        for bad in [
            "",
            ":",
            "/",
            "A",
            "a//b",
            "a/",
            "a:",
            "a:-x",
            "a@",
            "a@sha256:12",
            "../a",
            "a/../b",
            "a b",
            "a\n",
            "host.example:99999/a",
            "host.example:0/a",
            "-h.example/a",
            "a.example/A",
            "a.example/x?y",
            "user@host/x",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_reference_that_is_taken_can_be_written_and_read_again() {
        let longest = REFERENCE_BYTES_MAX - "docker.io/library/:latest".len();
        let reference: Reference = "a".repeat(longest).parse().unwrap();
        assert_eq!(reference.to_string().parse::<Reference>().unwrap(), {
            let tag = Some("latest".to_owned());
            Reference { tag, ..reference }
        });
        assert!("a".repeat(longest + 1).parse::<Reference>().is_err());
    }
}
