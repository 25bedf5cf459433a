//! Sends a layer of an image on this disk to the server, part by part.

use crate::failure::Failure;
use k8e_api::v1::create_template_request::Message;
use k8e_api::{CHUNK_BYTES, v1};
use k8e_image::LocalImage;
use std::io::Read as _;
use tokio::sync::mpsc;

/// Sends the layer with that digest. A server that stops listening says why in its answer.
pub(super) async fn send(
    image: Option<&LocalImage>,
    digest: &str,
    requests: &mpsc::Sender<v1::CreateTemplateRequest>,
) -> Result<(), Failure> {
    let unknown = || Failure::request("the server asked for a layer of no image", "internal");
    let digest = digest.parse()?;
    let mut layer = image.ok_or_else(unknown)?.layer(&digest)?;
    let requests = requests.clone();
    let sending = tokio::task::spawn_blocking(move || {
        loop {
            let mut data = vec![0; CHUNK_BYTES];
            let read = layer.read(&mut data)?;
            data.truncate(read);
            let part = v1::LayerPart {
                data: data.into(),
                last: read == 0,
            };
            let message = Some(Message::Part(part));
            let sent = requests.blocking_send(v1::CreateTemplateRequest { message });
            if sent.is_err() || read == 0 {
                return Ok(());
            }
        }
    });
    let sent: Result<std::io::Result<()>, _> = sending.await;
    sent.unwrap_or_else(|error| Err(std::io::Error::other(error)))
        .map_err(|error| Failure::io("read a layer", &error))
}
