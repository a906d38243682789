//! The calls of the MPI library that the transport needs, each with its return code checked. Counts are C
//! integers in this interface, so a call moves less than 2³¹ bytes. All calls of a process are made by one
//! thread at a time (MPI_THREAD_SERIALIZED), under the lock of the engine.

use std::ffi::{CStr, c_char, c_int, c_void};

use mpi::ffi;

use crate::process::TransportError;

/// Most bytes of one call.
pub(super) const COUNT_MAX: usize = i32::MAX as usize;

/// A started call; its buffer stays where it is until [`test_some`] has reported it.
#[derive(Clone, Copy)]
pub(super) struct Call(ffi::MPI_Request);

/// A communicator that only this transport uses.
#[derive(Clone, Copy)]
pub(super) struct Comm(ffi::MPI_Comm);

// SAFETY: handles of MPI may be used by every thread of the process, by one at a time, since the library was
// initialised with MPI_THREAD_SERIALIZED; the engine's lock sees to that.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Send for Comm {}

/// An error of the transport.
pub(super) fn failed(call: &'static str, text: impl Into<String>) -> TransportError {
    TransportError { transport: "mpi", call, text: text.into() }
}

/// The library's text for a code that is not success.
fn check(call: &'static str, code: c_int) -> Result<(), TransportError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0 as c_char; 1024]; // MPI_MAX_ERROR_STRING is at most 1024 in known libraries
    let mut len = 0;
    // SAFETY: the buffer is as long as the longest text.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut len) };
    if known != ffi::MPI_SUCCESS as c_int {
        return Err(failed(call, format!("code {code}")));
    }
    // SAFETY: the library ends its text with a zero, inside the buffer.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy();
    Err(failed(call, format!("code {code}: {text}")))
}

/// First line of what the library says of itself.
pub(super) fn version() -> Result<String, TransportError> {
    let mut text = vec![0 as c_char; 16 * 1024];
    let mut len = 0;
    // SAFETY: the buffer is longer than MPI_MAX_LIBRARY_VERSION_STRING of known libraries (256 and 8192); the call
    // is allowed before the library is initialised.
    check("MPI_Get_library_version", unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr(), &mut len) })?;
    // SAFETY: the library ends its text with a zero, inside the buffer.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    Ok(text.lines().next().unwrap_or_default().trim().to_string())
}

/// Initialises the library for calls of one thread at a time.
pub(super) fn initialise() -> Result<(), TransportError> {
    let mut is_initialised = 0;
    // SAFETY: allowed at any time; writes one integer.
    check("MPI_Initialized", unsafe { ffi::MPI_Initialized(&mut is_initialised) })?;
    if is_initialised != 0 {
        let text = "the library is initialised already: a process connects once";
        return Err(failed("MPI_Init_thread", text));
    }
    let mut provided = 0;
    // SAFETY: reading a constant of the library.
    let wanted = unsafe { ffi::RSMPI_THREAD_SERIALIZED };
    // SAFETY: null is allowed for both arguments; writes one integer.
    let code =
        unsafe { ffi::MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), wanted, &mut provided) };
    check("MPI_Init_thread", code)?;
    if provided < wanted {
        let text = format!(
            "the library allows threads at level {provided}, level {wanted} (MPI_THREAD_SERIALIZED) is needed: \
             use an MPI that was built with threads"
        );
        return Err(failed("MPI_Init_thread", text));
    }
    Ok(())
}

/// A copy of the communicator of all processes whose errors are returned: communicator, rank, size, largest tag.
pub(super) fn open() -> Result<(Comm, usize, usize, u32), TransportError> {
    // SAFETY: reading constants of the library.
    let (world, returned) = unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN) };
    let mut comm = world;
    let (mut rank, mut size) = (0, 0);
    // SAFETY: the library is initialised; each call writes the one value that it is given.
    unsafe {
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(world, returned))?;
        check("MPI_Comm_dup", ffi::MPI_Comm_dup(world, &mut comm))?;
        check("MPI_Comm_set_errhandler", ffi::MPI_Comm_set_errhandler(comm, returned))?;
        check("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
        check("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut size))?;
    }
    let mut value: *mut c_int = std::ptr::null_mut();
    let mut is_set = 0;
    // SAFETY: the attribute's value is a pointer to an integer, which is written to the given place.
    let code = unsafe {
        let place = (&raw mut value).cast::<c_void>();
        ffi::MPI_Comm_get_attr(comm, ffi::MPI_TAG_UB as c_int, place, &mut is_set)
    };
    check("MPI_Comm_get_attr", code)?;
    if is_set == 0 || value.is_null() {
        return Err(failed("MPI_Comm_get_attr", "the library does not know its largest tag"));
    }
    // SAFETY: the library keeps the integer as long as the communicator.
    let largest_tag = unsafe { *value };
    Ok((Comm(comm), rank as usize, size as usize, largest_tag as u32))
}

/// Starts to send.
///
/// # Safety
/// The bytes stay there and unchanged until [`test_some`] has reported the call.
pub(super) unsafe fn send(comm: Comm, to: usize, tag: u32, bytes: &[u8]) -> Result<Call, TransportError> {
    assert!(bytes.len() <= COUNT_MAX, "{} bytes in one call", bytes.len());
    let pointer = bytes.as_ptr().cast::<c_void>();
    // SAFETY: the handles are valid; the buffer is as long as the count says, and stays (the caller's promise).
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (count, to, tag) = (bytes.len() as c_int, to as c_int, tag as c_int);
        let code = ffi::MPI_Isend(pointer, count, ffi::RSMPI_UINT8_T, to, tag, comm.0, &mut request);
        check("MPI_Isend", code)?;
        Ok(Call(request))
    }
}

/// Starts to receive at most `len` bytes.
///
/// # Safety
/// The memory stays there and is not used until [`test_some`] has reported the call.
pub(super) unsafe fn receive(
    comm: Comm,
    from: usize,
    tag: u32,
    (pointer, len): (*mut u8, usize),
) -> Result<Call, TransportError> {
    assert!(len <= COUNT_MAX, "{len} bytes in one call");
    // SAFETY: the handles are valid; the memory is as long as the count says, and stays (the caller's promise).
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (count, from, tag) = (len as c_int, from as c_int, tag as c_int);
        let pointer = pointer.cast::<c_void>();
        let code = ffi::MPI_Irecv(pointer, count, ffi::RSMPI_UINT8_T, from, tag, comm.0, &mut request);
        check("MPI_Irecv", code)?;
        Ok(Call(request))
    }
}

/// Source and length of a message of this tag that has come in and is not received yet.
pub(super) fn probe(comm: Comm, tag: u32) -> Result<Option<(usize, usize)>, TransportError> {
    let mut is_there = 0;
    // SAFETY: an all-zero status is a valid place for the library to write one.
    let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
    // SAFETY: the communicator is valid; one integer and one status are written.
    let code =
        unsafe { ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag as c_int, comm.0, &mut is_there, &mut status) };
    check("MPI_Iprobe", code)?;
    if is_there == 0 {
        return Ok(None);
    }
    Ok(Some((status.MPI_SOURCE as usize, count(&status)?)))
}

fn count(status: &ffi::MPI_Status) -> Result<usize, TransportError> {
    let mut bytes = 0;
    // SAFETY: the status was written by the library; one integer is written.
    check("MPI_Get_count", unsafe { ffi::MPI_Get_count(status, ffi::RSMPI_UINT8_T, &mut bytes) })?;
    Ok(bytes as usize)
}

/// Which of the calls are over, by index, with the bytes of their status (received ones for a receive); these
/// are no calls any more.
pub(super) fn test_some(calls: &mut [Call]) -> Result<Vec<(usize, usize)>, TransportError> {
    let n = calls.len();
    let mut requests: Vec<ffi::MPI_Request> = calls.iter().map(|call| call.0).collect();
    let mut indices = vec![0 as c_int; n];
    // SAFETY: all-zero statuses are a valid place for the library to write some.
    let mut statuses: Vec<ffi::MPI_Status> = vec![unsafe { std::mem::zeroed() }; n];
    let mut over = 0;
    // SAFETY: all three arrays are as long as the count says.
    let code = unsafe {
        let (requests, statuses) = (requests.as_mut_ptr(), statuses.as_mut_ptr());
        ffi::MPI_Testsome(n as c_int, requests, &mut over, indices.as_mut_ptr(), statuses)
    };
    // SAFETY: reading a constant of the library.
    let none = unsafe { ffi::RSMPI_UNDEFINED };
    if code == ffi::MPI_ERR_IN_STATUS as c_int {
        for status in statuses.iter().take(over.max(0) as usize) {
            check("MPI_Testsome", status.MPI_ERROR)?;
        }
    }
    check("MPI_Testsome", code)?;
    for (call, request) in calls.iter_mut().zip(requests) {
        call.0 = request;
    }
    if over == none {
        return Ok(Vec::new());
    }
    let one = |i: usize| Ok((indices[i] as usize, count(&statuses[i])?));
    (0..over as usize).map(one).collect()
}

/// Ends all processes of the job.
pub(super) fn abort(exit_code: i32) {
    // SAFETY: allowed from initialisation to the end; it does not return where it works.
    let code = unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, exit_code) };
    tracing::error!(code, "MPI_Abort has returned");
}

/// Orderly end; every process calls it.
pub(super) fn finalise() -> Result<(), TransportError> {
    // SAFETY: no call is under way (the caller's duty), and no other will follow.
    check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
}
