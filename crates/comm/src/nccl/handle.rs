//! One communicator of the library. All are asynchronous: a call returns at once, [`Handle::is_ready`] tells when it
//! has been taken up, and giving up ends what is going on, also on the GPU. Calls of one communicator are made one at a
//! time. Element types and reductions are numbered as in NCCL's `nccl.h`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plica_kernels::DType;

use super::library::{Config, Functions, IN_PROGRESS, Library, NO_COLOR, NcclError, Raw, UniqueId};
use crate::communicator::Reduce;

/// A stream as the library takes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamPointer(pub(super) *mut c_void);
// SAFETY: a stream may be used by any thread; it lives as long as its device, which the world of the rank holds.
unsafe impl Send for StreamPointer {}

/// A communicator, from the moment when it is asked for.
pub(super) struct Handle {
    loaded: Arc<Library>,
    /// Where the library writes the communicator, perhaps later than the call returns.
    place: Box<AtomicPtr<c_void>>,
    /// Whether it may still be used.
    is_live: Mutex<bool>,
    /// What it was split off.
    parent: Option<Arc<Handle>>,
}

fn element_type(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::I32 => 2,
        DType::I64 => 4,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
    }
}

fn reduction(op: Reduce) -> c_int {
    match op {
        Reduce::Sum => 0,
        Reduce::Max => 2,
        Reduce::Min => 3,
    }
}

impl Handle {
    fn new(library: &Arc<Library>, parent: Option<Arc<Handle>>) -> Handle {
        let place = Box::new(AtomicPtr::new(std::ptr::null_mut()));
        Handle { loaded: library.clone(), place, is_live: Mutex::new(true), parent }
    }

    /// Begins to join the communicator of `id` as `rank` of `size`.
    pub(super) fn join(
        library: &Arc<Library>,
        id: UniqueId,
        (rank, size): (usize, usize),
        ctas_max: Option<u32>,
    ) -> Result<Handle, NcclError> {
        let handle = Handle::new(library, None);
        let mut config = Config::asynchronous(ctas_max);
        let init = library.functions.comm_init;
        // SAFETY: the place outlives the communicator; the configuration is only read during the call.
        let code = unsafe { init(handle.place.as_ptr(), size as c_int, id, rank as c_int, &mut config) };
        library.check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
        Ok(handle)
    }

    /// Begins to split: every member calls it, those of one `color` get a communicator, in the order of `key`.
    pub(super) fn split(
        self: &Arc<Handle>,
        color: Option<usize>,
        key: usize,
        ctas_max: Option<u32>,
    ) -> Result<Option<Handle>, NcclError> {
        let child = Handle::new(&self.loaded, Some(self.clone()));
        let mut config = Config::asynchronous(ctas_max);
        let number = color.map_or(NO_COLOR, |color| color as c_int);
        let place = child.place.as_ptr();
        self.call("ncclCommSplit", |functions, raw| {
            // SAFETY: a live communicator; the place outlives the new one.
            unsafe { (functions.comm_split)(raw, number, key as c_int, place, &mut config) }
        })?;
        Ok(color.map(|_| child))
    }

    /// The communicator, locked, where it may be used.
    fn live(&self, call: &'static str) -> Result<(MutexGuard<'_, bool>, Raw), NcclError> {
        let is_live = self.is_live.lock().unwrap_or_else(PoisonError::into_inner);
        if !*is_live {
            return Err(NcclError::GivenUp { call });
        }
        Ok((is_live, self.place.load(Ordering::Acquire)))
    }

    fn call(&self, name: &'static str, call: impl FnOnce(&Functions, Raw) -> c_int) -> Result<(), NcclError> {
        let (_live, raw) = self.live(name)?;
        self.loaded.check(name, call(&self.loaded.functions, raw), raw)
    }

    /// Whether all calls so far have been taken up. The errors of them, and later ones of the network, are told here.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        if self.place.load(Ordering::Acquire).is_null()
            && let Some(parent) = &self.parent
            && !parent.is_ready()?
        {
            return Ok(false);
        }
        let (_live, raw) = self.live("ncclCommGetAsyncError")?;
        if raw.is_null() {
            return Ok(false);
        }
        let mut state = 0;
        // SAFETY: a live communicator; writes one integer.
        let code = unsafe { (self.loaded.functions.comm_async_error)(raw, &mut state) };
        self.loaded.check("ncclCommGetAsyncError", code, raw)?;
        self.loaded.check("a communicator", state, raw)?;
        Ok(state != IN_PROGRESS)
    }

    /// Own rank and size, once it is ready.
    pub(super) fn position(&self) -> Result<(usize, usize), NcclError> {
        let (mut rank, mut size) = (0, 0);
        self.call("ncclCommUserRank", |functions, raw| {
            // SAFETY: a live communicator; writes one integer.
            unsafe { (functions.comm_user_rank)(raw, &mut rank) }
        })?;
        self.call("ncclCommCount", |functions, raw| {
            // SAFETY: as above.
            unsafe { (functions.comm_count)(raw, &mut size) }
        })?;
        Ok((rank as usize, size as usize))
    }

    /// Queues calls on a stream, as one that moves on altogether.
    pub(super) fn batch(
        &self,
        stream: StreamPointer,
        calls: impl FnOnce(&mut Batch<'_>),
    ) -> Result<(), NcclError> {
        let (_live, raw) = self.live("ncclGroupStart")?;
        let functions = &self.loaded.functions;
        // SAFETY: begins a group of this thread, which is ended below.
        let code = unsafe { (functions.group_start)() };
        self.loaded.check("ncclGroupStart", code, raw)?;
        let mut batch = Batch { loaded: &self.loaded, raw, stream: stream.0, first: Ok(()) };
        calls(&mut batch);
        let first = batch.first;
        // SAFETY: ends the group that was begun above.
        let code = unsafe { (functions.group_end)() };
        // A refused call also fails the end; it is the cause.
        first.and(self.loaded.check("ncclGroupEnd", code, raw))
    }

    /// Ends everything that goes on, on the GPU too. Later calls are refused.
    pub(super) fn give_up(&self) {
        let mut is_live = self.is_live.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = self.place.load(Ordering::Acquire);
        if std::mem::replace(&mut *is_live, false) && !raw.is_null() {
            // SAFETY: a live communicator, which nobody uses any more.
            let code = unsafe { (self.loaded.functions.comm_abort)(raw) };
            if let Err(error) = self.loaded.check("ncclCommAbort", code, std::ptr::null_mut()) {
                tracing::warn!("{error}");
            }
        }
    }

    /// Begins the orderly end: nothing is queued any more.
    pub(super) fn finalize(&self) -> Result<(), NcclError> {
        // SAFETY: a live communicator.
        self.call("ncclCommFinalize", |functions, raw| unsafe { (functions.comm_finalize)(raw) })
    }

    /// Orderly end once the finalizing is through, which all members have begun; gives up after `limit`.
    pub(super) fn destroy(&self, limit: Duration) -> Result<(), NcclError> {
        let until = Instant::now() + limit;
        while !self.is_ready()? {
            if Instant::now() > until {
                self.give_up();
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let (mut is_live, raw) = self.live("ncclCommDestroy")?;
        *is_live = false;
        // SAFETY: a live communicator, which nobody uses any more.
        let code = unsafe { (self.loaded.functions.comm_destroy)(raw) };
        self.loaded.check("ncclCommDestroy", code, std::ptr::null_mut())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Calls that are queued together. Addresses are of device memory with room for `count` elements, and stay valid until
/// the stream has passed: the caller of [`Handle::batch`] sees to both. The first error is kept.
pub(super) struct Batch<'a> {
    loaded: &'a Arc<Library>,
    raw: Raw,
    stream: *mut c_void,
    first: Result<(), NcclError>,
}

impl Batch<'_> {
    fn note(&mut self, call: &'static str, code: c_int) {
        if self.first.is_ok() {
            self.first = self.loaded.check(call, code, self.raw);
        }
    }

    pub(super) fn all_reduce(&mut self, from: u64, to: u64, count: usize, dtype: DType, op: Reduce) {
        let call = self.loaded.functions.all_reduce;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: a live communicator and stream; the addresses are the caller's promise.
        let code =
            unsafe { call(from, to, count, element_type(dtype), reduction(op), self.raw, self.stream) };
        self.note("ncclAllReduce", code);
    }

    pub(super) fn all_gather(&mut self, from: u64, to: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.all_gather;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: as in `all_reduce`; the output has room for `count` elements of every member.
        let code = unsafe { call(from, to, count, element_type(dtype), self.raw, self.stream) };
        self.note("ncclAllGather", code);
    }

    /// Sums; every member gets `count` elements.
    pub(super) fn reduce_scatter(&mut self, from: u64, to: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.reduce_scatter;
        let (from, to, sum) = (from as *const c_void, to as *mut c_void, reduction(Reduce::Sum));
        // SAFETY: as in `all_reduce`; the input has `count` elements for every member.
        let code = unsafe { call(from, to, count, element_type(dtype), sum, self.raw, self.stream) };
        self.note("ncclReduceScatter", code);
    }

    /// Sums to one member; only there is `to` written.
    pub(super) fn sum_to(&mut self, root: usize, from: u64, to: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.reduce;
        let (from, to, sum) = (from as *const c_void, to as *mut c_void, reduction(Reduce::Sum));
        // SAFETY: as in `all_reduce`.
        let code =
            unsafe { call(from, to, count, element_type(dtype), sum, root as c_int, self.raw, self.stream) };
        self.note("ncclReduce", code);
    }

    /// Only the root's `from` is read.
    pub(super) fn broadcast(&mut self, root: usize, from: u64, to: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.broadcast;
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: as in `all_reduce`.
        let code =
            unsafe { call(from, to, count, element_type(dtype), root as c_int, self.raw, self.stream) };
        self.note("ncclBroadcast", code);
    }

    pub(super) fn send(&mut self, peer: usize, from: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.send;
        let from = from as *const c_void;
        // SAFETY: as in `all_reduce`.
        let code = unsafe { call(from, count, element_type(dtype), peer as c_int, self.raw, self.stream) };
        self.note("ncclSend", code);
    }

    pub(super) fn receive(&mut self, peer: usize, to: u64, count: usize, dtype: DType) {
        let call = self.loaded.functions.receive;
        let to = to as *mut c_void;
        // SAFETY: as in `all_reduce`.
        let code = unsafe { call(to, count, element_type(dtype), peer as c_int, self.raw, self.stream) };
        self.note("ncclRecv", code);
    }
}
