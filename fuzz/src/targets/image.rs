//! Images: layers, manifests and references, which registries, archives and clients bring.

use crate::outcome;
use k8e_image::fuzzing;

pub(super) fn layers(bytes: &[u8]) -> u64 {
    let (said, paths) = fuzzing::layer(bytes);
    for path in &paths {
        let plain = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        let inside = path.is_empty() || path.split(|byte| *byte == b'/').all(plain);
        assert!(inside, "a path that leads out: {path:?}");
    }
    outcome(&said)
}

pub(super) fn manifests(bytes: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(bytes);
    if let Some((written, again)) = fuzzing::reference(&text) {
        assert_eq!(again, Some(written), "what is written is read as it was");
    }
    outcome(&fuzzing::manifest(bytes))
}
