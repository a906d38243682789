//! The NCCL library, loaded when it is asked for: its functions by name, with their return codes turned into errors that
//! carry the call, the code and what the library says. Names, codes and the layout of the configuration are those of
//! NCCL's `nccl.h` (NVIDIA); nothing here needs CUDA to build or to load. Leaves out what the functions mean.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The oldest version whose functions are used (2.19.0): `major * 10000 + minor * 100 + patch`.
pub const VERSION_MIN: i32 = 21_900;
/// From this version on, several ranks can share a GPU, where `NCCL_MULTI_RANK_GPU_ENABLE=1` is set.
pub const VERSION_SHARED_GPU: i32 = 23_000;

/// What is tried where no path is given, in this order.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An opaque communicator of the library.
pub(super) type Raw = *mut c_void;

/// The return code of a call that is still going on.
pub(super) const IN_PROGRESS: c_int = 7;
/// The return code of a communicator whose peer is gone.
pub(super) const REMOTE_ERROR: c_int = 6;
/// The color of a rank that takes no part in a split.
pub(super) const NO_COLOR: c_int = -1;

/// What the members of a communicator find each other by.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// Settings of a communicator, in the layout that began with version 2.18; later ones read as many fields as `version`
/// has. `i32::MIN` is "not set".
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Later versions have a field where the layout of 2.18 only has padding.
    padding: c_int,
}

impl Config {
    /// Calls return at once and are asked for their end; at most `ctas_max` blocks a kernel, where given.
    pub(super) fn asynchronous(ctas_max: Option<u32>) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: c_int::MIN,
            min_ctas: c_int::MIN,
            max_ctas: ctas_max.map_or(c_int::MIN, |count| count as c_int),
            net_name: std::ptr::null(),
            split_share: c_int::MIN,
            padding: c_int::MIN,
        }
    }
}

/// A library that cannot be used, or a call of it that was refused.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NcclError {
    /// There is none.
    #[error("no NCCL library found (looked for {looked_for}): install NCCL 2.19 or later, or name its file")]
    Missing {
        /// File names, and what the loader said to them.
        looked_for: String,
    },
    /// A library without a function that is needed.
    #[error("{path} has no function {symbol}: it is no NCCL of version 2.19 or later")]
    Symbol {
        /// The library.
        path: String,
        /// The function.
        symbol: &'static str,
    },
    /// A version that is too old.
    #[error("{path} is NCCL {found}, version 2.19 or later is needed: install a newer one")]
    Version {
        /// The library.
        path: String,
        /// Its version.
        found: String,
    },
    /// A call that was refused, or failed later.
    #[error("{call} failed with code {code}: {text}{}", last.as_ref().map(|last| format!(" ({last})")).unwrap_or_default())]
    Call {
        /// Name of the function.
        call: &'static str,
        /// Its return code.
        code: i32,
        /// What the library says about the code.
        text: String,
        /// What the library says about the last error, where it says anything.
        last: Option<String>,
    },
    /// A communicator that was given up after an earlier error.
    #[error("{call}: the communicator was given up after an earlier error")]
    GivenUp {
        /// Name of the function.
        call: &'static str,
    },
}

impl NcclError {
    /// Whether the error only says that another process is gone.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self, NcclError::Call { code: REMOTE_ERROR, .. })
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// The library is NCCL: its functions have the declared parameters.
            unsafe fn load(library: &libloading::Library, path: &str) -> Result<Functions, NcclError> {
                Ok(Functions {
                    $($name: {
                        // SAFETY: the caller's promise.
                        let found = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *found.map_err(|_| NcclError::Symbol { path: path.into(), symbol: $symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion"(*mut c_int) -> c_int;
    get_unique_id = "ncclGetUniqueId"(*mut UniqueId) -> c_int;
    error_string = "ncclGetErrorString"(c_int) -> *const c_char;
    last_error = "ncclGetLastError"(Raw) -> *const c_char;
    comm_init = "ncclCommInitRankConfig"(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> c_int;
    comm_split = "ncclCommSplit"(Raw, c_int, c_int, *mut Raw, *mut Config) -> c_int;
    comm_count = "ncclCommCount"(Raw, *mut c_int) -> c_int;
    comm_user_rank = "ncclCommUserRank"(Raw, *mut c_int) -> c_int;
    comm_async_error = "ncclCommGetAsyncError"(Raw, *mut c_int) -> c_int;
    comm_finalize = "ncclCommFinalize"(Raw) -> c_int;
    comm_destroy = "ncclCommDestroy"(Raw) -> c_int;
    comm_abort = "ncclCommAbort"(Raw) -> c_int;
    group_start = "ncclGroupStart"() -> c_int;
    group_end = "ncclGroupEnd"() -> c_int;
    all_reduce = "ncclAllReduce"(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, c_int, Raw, *mut c_void) -> c_int;
    reduce_scatter = "ncclReduceScatter"(
        *const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void
    ) -> c_int;
    reduce = "ncclReduce"(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Raw, *mut c_void) -> c_int;
    broadcast = "ncclBroadcast"(*const c_void, *mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    send = "ncclSend"(*const c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
    receive = "ncclRecv"(*mut c_void, usize, c_int, c_int, Raw, *mut c_void) -> c_int;
}

/// The loaded library.
pub struct Library {
    pub(super) functions: Functions,
    path: PathBuf,
    version: i32,
    /// Keeps the code of the functions in memory.
    _library: libloading::Library,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NCCL {} ({})", self.version_text(), self.path.display())
    }
}

/// `2.30.7` of 23007.
pub(super) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

impl Library {
    /// Loads NCCL: the file at `path` where one is given, and nothing else then; else `libnccl.so.2`, else
    /// `libnccl.so`, where the system's loader finds them.
    ///
    /// # Errors
    /// No library, one that is no NCCL, or one that is too old.
    pub fn load(path: Option<&Path>) -> Result<Arc<Library>, NcclError> {
        let candidates: Vec<PathBuf> = match path {
            Some(path) => vec![path.to_path_buf()],
            None => NAMES.iter().map(PathBuf::from).collect(),
        };
        let mut looked_for = Vec::new();
        for candidate in candidates {
            // SAFETY: loading runs the library's initialisers; NCCL's do nothing but set up its own state, and naming
            // another library is the user's own doing.
            match unsafe { libloading::Library::new(&candidate) } {
                Ok(library) => return Library::of(library, candidate).map(Arc::new),
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(|cause| cause.to_string());
                    let cause = cause.unwrap_or_else(|| error.to_string());
                    looked_for.push(format!("{} ({cause})", candidate.display()));
                }
            }
        }
        Err(NcclError::Missing { looked_for: looked_for.join("; ") })
    }

    fn of(library: libloading::Library, name: PathBuf) -> Result<Library, NcclError> {
        let shown = name.display().to_string();
        // SAFETY: a library of this name is NCCL; one that has not all of its functions is refused.
        let functions = unsafe { Functions::load(&library, &shown) }?;
        let path = file_of(functions.get_version as *const c_void).unwrap_or(name);
        let mut loaded = Library { functions, path, version: 0, _library: library };
        let mut version = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (loaded.functions.get_version)(&mut version) };
        loaded.check("ncclGetVersion", code, std::ptr::null_mut())?;
        loaded.version = version;
        if version < VERSION_MIN {
            return Err(NcclError::Version { path: shown, found: loaded.version_text() });
        }
        Ok(loaded)
    }

    /// Its version: `major * 10000 + minor * 100 + patch`.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Its version as people write it.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    /// Its file, as far as it is known.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The error of a return code. A call that goes on is none.
    pub(super) fn check(&self, call: &'static str, code: c_int, comm: Raw) -> Result<(), NcclError> {
        if code == 0 || code == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both functions take any code and any live communicator, or none, and return text of the library.
        let (text, last) = unsafe {
            let text = text_of((self.functions.error_string)(code));
            (text.unwrap_or_else(|| "no text".into()), text_of((self.functions.last_error)(comm)))
        };
        Err(NcclError::Call { call, code, text, last })
    }

    /// A new id for a communicator.
    pub(super) fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        let code = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id)
    }
}

/// # Safety
/// Null, or text that ends with a zero.
unsafe fn text_of(pointer: *const c_char) -> Option<String> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_string();
    (!text.is_empty()).then_some(text)
}

/// What the loader knows of an address.
#[repr(C)]
struct AddressInfo {
    file: *const c_char,
    base: *mut c_void,
    symbol: *const c_char,
    symbol_address: *mut c_void,
}

#[cfg(unix)]
unsafe extern "C" {
    /// Writes what is known of an address; 0 where nothing is.
    fn dladdr(address: *const c_void, info: *mut AddressInfo) -> c_int;
}

/// The file that a function was loaded from.
#[cfg(unix)]
fn file_of(function: *const c_void) -> Option<PathBuf> {
    let null = std::ptr::null_mut();
    let mut info = AddressInfo { file: null, base: null.cast(), symbol: null, symbol_address: null.cast() };
    // SAFETY: any address may be asked for; the answer is written to the given place.
    if unsafe { dladdr(function, &mut info) } == 0 {
        return None;
    }
    // SAFETY: null, or text of the loader that lives as long as the library.
    unsafe { text_of(info.file) }.map(PathBuf::from)
}

/// Not known on this system.
#[cfg(not(unix))]
fn file_of(_: *const c_void) -> Option<PathBuf> {
    None
}

/// One line for people: version and file, or why there is none.
pub fn probe(path: Option<&Path>) -> String {
    match Library::load(path) {
        Ok(library) => format!("NCCL {}, {}", library.version_text(), library.path().display()),
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_sentence() {
        let path = Path::new("/nonexistent/libnccl.so.2");
        let text = Library::load(Some(path)).expect_err("no such file").to_string();
        assert!(
            text.starts_with("no NCCL library found (looked for ") && text.contains("/nonexistent/"),
            "{text}"
        );
        assert!(text.ends_with("or name its file") && !text.contains('\n'), "{text}");
        assert_eq!(probe(Some(path)), text);
    }

    #[test]
    fn versions_and_the_configuration() {
        assert_eq!(version_text(23_007), "2.30.7");
        assert_eq!((size_of::<Config>(), size_of::<UniqueId>()), (48, 128));
    }
}
