//! `k8e template …`: images that sessions can have as their root file system.

mod credentials;
mod upload;

use crate::failure::Failure;
use crate::output;
use crate::table::{self, Column, Format, FormatArgs, Table};
use clap::{Args, Subcommand};
use k8e_api::client::Client;
use k8e_api::status::{Status, from_status};
use k8e_api::v1::create_template_event::Event;
use k8e_api::v1::create_template_request::Message;
use k8e_api::v1::create_template_start;
use k8e_api::{convert, v1};
use k8e_image::{ImageError, LocalImage, Reference, Source};
use k8e_model::{Code, Template};
use serde::Serialize;
use std::collections::BTreeMap;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

/// What `k8e template --help` begins with.
pub(crate) const LONG_ABOUT: &str = "\
Make images usable as the root file system of sessions.

A template is a name for an image whose layers are on the server, unpacked and shared by all sessions
that use it. A session keeps the image that it was made with, also when the name is given to another.

  k8e template create py --from python:3.12
  k8e template create mine --from docker-archive:image.tar
  k8e sandbox run 'import sys; print(sys.version)' --lang python --template py

Templates belong to the server: those who run it create and delete them, everybody may use them.";

/// Requests that wait to be sent: parts of layers.
const REQUESTS_MAX: usize = 4;

const MIB: u64 = 1024 * 1024;

/// The commands of `k8e template`.
#[derive(Subcommand, Debug)]
pub enum TemplateCommand {
    /// Create a template, or make one stand for another image
    Create(CreateArgs),
    /// List templates
    List(ListArgs),
    /// Show a template: its layers, and what its image says about commands
    Show(NameArgs),
    /// Delete a template that no session uses
    Delete(NameArgs),
}

/// Arguments of `k8e template create`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e template create py --from python:3.12
  k8e template create web --from registry.example:5000/team/web@sha256:…
  k8e template create mine --from oci:layout-directory:latest
  k8e template create mine --from oci-archive:image.tar
  docker save app -o app.tar && k8e template create app --from docker-archive:app.tar
  k8e template create mine --from dir:rootfs

The server fetches from registries: by TLS and at public addresses, unless it was started with
--registry-insecure or --registry-private. Credentials are taken from ~/.docker/config.json (or
$DOCKER_CONFIG) of this client, sent with the request, and not stored.")]
pub struct CreateArgs {
    /// Its name: letters, digits and ._-/:
    name: String,

    /// The image: a registry reference, oci:DIR or oci:DIR:TAG, oci-archive:FILE, docker-archive:FILE
    /// (also compressed), or dir:DIR, a directory with a root file system
    #[arg(long, value_name = "IMAGE")]
    from: String,
}

/// Arguments of `k8e template list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    format: FormatArgs,
}

const COLUMNS: [Column; 7] = [
    Column::new("NAME"),
    Column::new("SIZE"),
    Column::new("AGE"),
    Column::new("SESSIONS"),
    Column::new("SOURCE"),
    Column::wide("CREATED BY"),
    Column::wide("DIGEST"),
];

/// Arguments of commands about one template.
#[derive(Args, Debug)]
pub struct NameArgs {
    /// Its name
    name: String,
}

#[derive(Serialize)]
struct TemplatesJson {
    templates: Vec<TemplateJson>,
}

#[derive(Serialize)]
struct TemplateJson {
    name: String,
    digest: String,
    source: String,
    bytes: u64,
    layers: Vec<LayerJson>,
    env: BTreeMap<String, String>,
    user: String,
    workdir: String,
    entrypoint: Vec<String>,
    cmd: Vec<String>,
    created_at: i64,
    created_by: String,
    sessions: u32,
}

#[derive(Serialize)]
struct LayerJson {
    diff_id: String,
    bytes: u64,
}

#[derive(Serialize)]
struct DeletedJson {
    ok: bool,
    name: String,
}

/// What is asked for, read and checked; nothing is sent yet.
pub(crate) enum Request {
    Create(Box<Create>),
    List(Format),
    Show(String),
    Delete(String),
}

/// A template to be made.
pub(crate) struct Create {
    start: v1::CreateTemplateStart,
    /// Of an upload.
    image: Option<LocalImage>,
}

// === impl TemplateCommand ===

impl TemplateCommand {
    /// Whether standard output is JSON; errors are printed as JSON then too.
    pub(crate) fn prints_json(&self) -> bool {
        match self {
            Self::List(args) => args.format.is_json(),
            Self::Create(_) | Self::Show(_) | Self::Delete(_) => true,
        }
    }

    pub(crate) fn request(self) -> Result<Request, Failure> {
        let checked = |args: NameArgs| {
            convert::template_name(&args.name)?;
            Ok::<_, Failure>(args.name)
        };
        match self {
            Self::Create(args) => Create::new(args.name, &args.from)
                .map(Box::new)
                .map(Request::Create),
            Self::List(args) => Ok(Request::List(args.format.chosen())),
            Self::Show(args) => checked(args).map(Request::Show),
            Self::Delete(args) => checked(args).map(Request::Delete),
        }
    }
}

pub(crate) async fn run(request: Request, mut client: Client) -> Result<u8, Failure> {
    let templates = &mut client.templates;
    match request {
        Request::Create(create) => {
            let made = create.send(&mut client).await?;
            output::json(&TemplateJson::from(made))?;
        }
        Request::List(format) => {
            let listed = templates
                .list_templates(v1::ListTemplatesRequest {})
                .await?;
            let listed = listed.into_inner().templates.into_iter();
            let templates: Vec<TemplateJson> = listed.map(TemplateJson::from).collect();
            match format {
                Format::Json => output::json(&TemplatesJson { templates })?,
                format @ (Format::Table | Format::Wide | Format::Name) => {
                    table_of(&templates).print(format)?
                }
            }
        }
        Request::Show(name) => {
            let shown = templates
                .get_template(v1::GetTemplateRequest { name })
                .await?;
            output::json(&TemplateJson::from(shown.into_inner()))?;
        }
        Request::Delete(name) => {
            let request = v1::DeleteTemplateRequest { name: name.clone() };
            templates.delete_template(request).await?;
            output::json(&DeletedJson { ok: true, name })?;
        }
    }
    Ok(0)
}

fn table_of(templates: &[TemplateJson]) -> Table {
    let mut table = Table::new(&COLUMNS);
    for template in templates {
        table.row(vec![
            template.name.clone(),
            table::bytes(template.bytes),
            table::ago(template.created_at),
            template.sessions.to_string(),
            template.source.clone(),
            template.created_by.clone(),
            template.digest.clone(),
        ]);
    }
    table
}

/// Fetches the image of a template that is not there, when its name reads like that of an image: with a
/// tag, a registry or a path.
pub(super) async fn ensure(client: &mut Client, template: &str) -> Result<(), Failure> {
    let Ok(Template::Image { name, .. }) = template.parse() else {
        return Ok(());
    };
    let like_an_image = template.contains([':', '/', '@']);
    if !like_an_image || template.parse::<Reference>().is_err() {
        return Ok(());
    }
    let asked = v1::GetTemplateRequest {
        name: name.to_string(),
    };
    match client.templates.get_template(asked).await {
        Ok(_) => return Ok(()),
        Err(status) if is_not_found(&status) => {}
        Err(status) => return Err(status.into()),
    }
    let create = Create::new(name.to_string(), template)?;
    create.send(client).await.map(drop)
}

/// The command line of a template's image, for `create --entrypoint`.
pub(super) async fn entrypoint(
    client: &mut Client,
    template: &str,
) -> Result<Vec<String>, Failure> {
    let Ok(Template::Image { name, .. }) = template.parse() else {
        return Err(Failure::request(
            "--entrypoint needs --template with an image: the template `host` has no entry point",
            "invalid",
        ));
    };
    let name = name.to_string();
    let found = client
        .templates
        .get_template(v1::GetTemplateRequest { name })
        .await?;
    let found = found.into_inner();
    let line: Vec<String> = found.entrypoint.into_iter().chain(found.cmd).collect();
    match line.is_empty() {
        true => Err(Failure::request(
            format!("the image of template {template} has no entry point and no command"),
            "invalid",
        )),
        false => Ok(line),
    }
}

fn is_not_found(status: &Status) -> bool {
    from_status(status).code == Code::NotFound
}

// === impl Create ===

impl Create {
    fn new(name: String, from: &str) -> Result<Self, Failure> {
        convert::template_name(&name)?;
        let source: Source = from.parse()?;
        let (source, image) = match &source {
            Source::Registry(reference) => {
                let image = v1::RegistryImage {
                    // As it was typed: the server reads it again.
                    reference: reference.to_string(),
                    credentials: credentials::find(reference.registry())?,
                };
                (create_template_start::Source::Registry(image), None)
            }
            Source::OciLayout { .. }
            | Source::OciArchive(_)
            | Source::DockerArchive(_)
            | Source::Directory(_) => {
                let image = LocalImage::open(&source)?;
                let upload = v1::UploadedImage {
                    manifest: image.manifest.clone().into(),
                    config: image.config.clone().into(),
                    origin: from.to_owned(),
                };
                (create_template_start::Source::Upload(upload), Some(image))
            }
        };
        let source = Some(source);
        let start = v1::CreateTemplateStart { name, source };
        Ok(Self { start, image })
    }

    /// Has the server make it, and shows how far that is.
    async fn send(self, client: &mut Client) -> Result<v1::Template, Failure> {
        let (requests, outgoing) = mpsc::channel(REQUESTS_MAX);
        let start = v1::CreateTemplateRequest {
            message: Some(Message::Start(self.start)),
        };
        // It has room for one.
        let _ = requests.try_send(start);
        let answers = client
            .templates
            .create_template(ReceiverStream::new(outgoing))
            .await?;
        let mut answers = answers.into_inner();
        while let Some(answer) = answers
            .message()
            .await
            .inspect_err(|_| output::progress(""))?
        {
            match answer.event {
                Some(Event::Progress(progress)) => show(&progress),
                Some(Event::Wanted(wanted)) => {
                    upload::send(self.image.as_ref(), &wanted.digest, &requests).await?;
                }
                Some(Event::Created(template)) => {
                    output::progress("");
                    return Ok(template);
                }
                None => {}
            }
        }
        output::progress("");
        Err(Failure::request(
            "the server ended the call without an answer",
            "internal",
        ))
    }
}

// === impl TemplateJson ===

impl From<v1::Template> for TemplateJson {
    fn from(template: v1::Template) -> Self {
        let layers = template.layers.into_iter().map(|layer| LayerJson {
            diff_id: layer.diff_id,
            bytes: layer.bytes,
        });
        Self {
            name: template.name,
            digest: template.digest,
            source: template.source,
            bytes: template.bytes,
            layers: layers.collect(),
            env: template.env.into_iter().collect(),
            user: template.user,
            workdir: template.workdir,
            entrypoint: template.entrypoint,
            cmd: template.cmd,
            created_at: template.created_at_unix_ms / 1000,
            created_by: template.created_by,
            sessions: template.sessions,
        }
    }
}

fn show(progress: &v1::LayerProgress) {
    let (layer, layers) = (progress.layer, progress.layers);
    let what = match progress.unpacking {
        true => "unpacking".to_owned(),
        false => format!(
            "{} of {} MiB",
            progress.bytes / MIB,
            progress.bytes_total / MIB
        ),
    };
    output::progress(&format!("layer {layer} of {layers}: {what}"));
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::request(error.to_string(), error.code().as_str())
    }
}
