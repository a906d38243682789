//! The thread between a launcher and its processes: each of them holds a connection to it. A byte on it asks for a stop
//! after the step; its end ends the process, so that none is left behind however the launcher ends.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;

/// The byte that asks for a stop.
const STOP: u8 = b's';

/// The launcher's side.
pub(super) struct Watch {
    address: String,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    followers: Vec<TcpStream>,
    stop: bool,
    over: bool,
}

impl Watch {
    /// Listens for the processes to be started.
    pub(super) fn new() -> anyhow::Result<Watch> {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on the loopback")?;
        let address = listener.local_addr()?.to_string();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let of_thread = shared.clone();
        std::thread::Builder::new()
            .name("plica-watch".into())
            .spawn(move || listener.incoming().flatten().for_each(|stream| add(&of_thread, stream)))?;
        Ok(Watch { address, shared })
    }

    /// Where processes connect to.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Asks all to stop after their step.
    pub(super) fn stop(&self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.stop = true;
        // One that is gone needs no stop.
        shared.followers.iter_mut().for_each(|stream| drop(stream.write_all(&[STOP])));
    }

    /// Lets go of all: they end.
    pub(super) fn end(&self) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.over = true;
        shared.followers.clear();
    }
}

fn add(shared: &Mutex<Shared>, mut stream: TcpStream) {
    let mut shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    if shared.over {
        return;
    }
    if shared.stop {
        // One that is gone needs no stop.
        drop(stream.write_all(&[STOP]));
    }
    shared.followers.push(stream);
}

/// The process's side: sets `stop` when the launcher asks for it, and ends this process when the launcher is gone.
///
/// # Errors
/// There is no launcher at that address any more.
pub(in crate::cli) fn follow(address: &str, stop: &'static AtomicBool) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(address).with_context(|| {
        format!("{} = {address}: the launcher that started this process is gone", super::WATCH)
    })?;
    std::thread::Builder::new().name("plica-follow".into()).spawn(move || {
        let mut byte = [0];
        loop {
            match stream.read(&mut byte) {
                Ok(1..) => stop.store(true, Ordering::Relaxed),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => std::process::exit(1),
            }
        }
    })?;
    Ok(())
}
