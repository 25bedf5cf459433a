//! `k8e sandbox log`: the transcript of a session.

use crate::failure::Failure;
use crate::output::Raw;
use clap::Args;
use k8e_api::client::Client;
use k8e_api::v1;
use std::time::Duration;

const FOLLOW_PAUSE: Duration = Duration::from_millis(500);

/// First paragraphs of `k8e sandbox log --help`.
pub(super) const LONG_ABOUT: &str = "\
Print the transcript of a session: the output of its commands, byte for byte. The server keeps the last
8 to 16 MiB; offsets count from the beginning, so that a call can continue where the last one ended.";

/// Arguments of `k8e sandbox log`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  k8e sandbox log $SID
  k8e sandbox log $SID --follow
  k8e sandbox log $SID --offset 4096 --limit 1024")]
pub struct LogArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    session_id: String,

    /// Byte offset to start at
    #[arg(long, default_value_t = 0, value_name = "BYTE")]
    offset: u64,

    /// Largest number of bytes to print; 0 for all
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    limit: u64,

    /// Print new output as it is written, until the session ends
    #[arg(long, short)]
    follow: bool,
}

pub(crate) async fn run(args: LogArgs, mut client: Client) -> Result<u8, Failure> {
    let mut raw = Raw::new();
    let mut offset = args.offset;
    let mut left = if args.limit == 0 {
        u64::MAX
    } else {
        args.limit
    };
    while left > 0 {
        // Read before the page: output up to the end is then still printed.
        let ended = args.follow && super::get::ended(&mut client, &args.session_id).await?;
        let request = v1::GetTranscriptRequest {
            session_id: args.session_id.clone(),
            offset,
            limit: if left == u64::MAX { 0 } else { left },
        };
        let page = client.get_transcript(request).await?.into_inner();
        raw.stdout(&page.output).await?;
        left = left.saturating_sub(page.output.len() as u64);
        let moved = page.next_offset > offset;
        offset = offset.max(page.next_offset);
        if moved && !page.eof {
            continue;
        }
        if !args.follow || ended {
            break;
        }
        tokio::time::sleep(FOLLOW_PAUSE).await;
    }
    Ok(0)
}
