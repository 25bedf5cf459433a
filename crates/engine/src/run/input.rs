//! Standard input and signals of a running command.

use crate::Error;
use bytes::Bytes;
use k8e_wire::proto::{End, input};
use k8e_wire::{CHUNK_BYTES, Inputs};
use std::sync::Arc;
use tokio::sync::{Mutex, watch};

/// Highest signal number of Linux.
const SIGNAL_MAX: i32 = 64;

/// Sends standard input and signals to a running command. Dropping it closes the command's standard input.
pub struct RunInput {
    inputs: Arc<Mutex<Option<Inputs>>>,
    /// Closed when the run is dropped, also in the middle of a send.
    run: watch::Receiver<()>,
    /// Whether standard input is open.
    open: bool,
    /// A send was dropped half way: the frame is incomplete and the connection unusable.
    torn: bool,
}

/// The run's half of the connection: closing it cancels the command.
pub(super) struct SharedInputs {
    inputs: Arc<Mutex<Option<Inputs>>>,
    _run: watch::Sender<()>,
}

// === impl RunInput ===

impl RunInput {
    /// Sends bytes to the command's standard input, with backpressure: waits while the command does not read.
    ///
    /// Not cancel safe: when it is dropped half way, no more input can be sent.
    pub async fn data(&mut self, mut data: Bytes) -> Result<(), Error> {
        if !self.open {
            return Err(Error::InputClosed(
                "it was started without, or its input was ended",
            ));
        }
        while !data.is_empty() {
            let chunk = data.split_to(data.len().min(CHUNK_BYTES));
            self.send(input::Input::Data(chunk)).await?;
        }
        Ok(())
    }

    /// Ends the command's standard input.
    pub async fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            // Fails only when the command has ended.
            self.send(input::Input::End(End {})).await.ok();
        }
    }

    /// Sends a signal to the command and its group. After the command's end it does nothing.
    pub async fn signal(&mut self, signal: i32) -> Result<(), Error> {
        if !(1..=SIGNAL_MAX).contains(&signal) {
            return Err(Error::Invalid(format!(
                "signal {signal} does not exist: use 1 to {SIGNAL_MAX}"
            )));
        }
        self.send(input::Input::Signal(signal)).await.ok();
        Ok(())
    }

    async fn send(&mut self, input: input::Input) -> Result<(), Error> {
        const OVER: Error = Error::InputClosed("it has ended");
        let mut inputs = self.inputs.lock().await;
        let Some(writer) = inputs.as_mut().filter(|_| !self.torn) else {
            return Err(OVER);
        };
        self.torn = true;
        let sent = tokio::select! {
            biased;
            _ = self.run.changed() => None,
            sent = writer.send(input) => sent.ok(),
        };
        if sent.is_none() {
            *inputs = None;
            return Err(OVER);
        }
        self.torn = false;
        Ok(())
    }
}

impl Drop for RunInput {
    fn drop(&mut self) {
        if !self.open || self.torn {
            return;
        }
        let (inputs, mut run) = (Arc::clone(&self.inputs), self.run.clone());
        let end = async move {
            if let Some(writer) = inputs.lock().await.as_mut() {
                tokio::select! {
                    _ = run.changed() => {}
                    _ = writer.send(input::Input::End(End {})) => {}
                }
            }
        };
        // Without a runtime the process is exiting, which closes the connection.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(end);
        }
    }
}

// === impl SharedInputs ===

impl SharedInputs {
    /// Splits the connection's input: one half for the run, which closes it, one for the writer.
    pub(super) fn split(inputs: Option<Inputs>, open: bool) -> (Self, RunInput) {
        let inputs = Arc::new(Mutex::new(inputs));
        let (sender, run) = watch::channel(());
        let input = RunInput {
            inputs: Arc::clone(&inputs),
            run,
            open,
            torn: false,
        };
        (
            Self {
                inputs,
                _run: sender,
            },
            input,
        )
    }
}

impl Drop for SharedInputs {
    fn drop(&mut self) {
        // A send in progress holds the lock: it sees the closed channel and drops the connection.
        if let Ok(mut inputs) = self.inputs.try_lock() {
            *inputs = None;
        }
    }
}
