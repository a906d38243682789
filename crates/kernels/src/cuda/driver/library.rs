//! The foreign libraries of a GPU: whether they are there, and where they were looked for. The dynamic linker is asked
//! first (`LD_LIBRARY_PATH`, its cache), then the folders where toolkits are usually unpacked.

use std::path::{Path, PathBuf};

use cudarc::{cublas, cublaslt, driver, nvrtc};

use crate::cuda::CudaError;

/// Folders behind the linker's own.
const FOLDERS: [&str; 4] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/opt/cuda/lib64",
    "/usr/lib/wsl/lib",
];

/// One library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: comes with the kernel module of the GPU.
    Driver,
    /// `libnvrtc`: compiles kernel texts.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libcublas`: grouped matrix products.
    Cublas,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Cublas];

    /// What people call it.
    pub fn title(self) -> &'static str {
        match self {
            Library::Driver => "CUDA driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Cublas => "cuBLAS",
        }
    }

    fn stem(self) -> &'static str {
        match self {
            Library::Driver => "cuda",
            Library::Nvrtc => "nvrtc",
            Library::CublasLt => "cublasLt",
            Library::Cublas => "cublas",
        }
    }

    fn remedy(self) -> &'static str {
        match self {
            Library::Driver => "install the NVIDIA driver",
            Library::Nvrtc => {
                "install CUDA 12 or 13, or `pip install nvidia-cuda-nvrtc`, and name its folder in LD_LIBRARY_PATH"
            }
            Library::CublasLt | Library::Cublas => {
                "install CUDA 12 or 13, or `pip install nvidia-cublas`, and name its folder in LD_LIBRARY_PATH"
            }
        }
    }

    /// File names under which it is opened, without those that no CUDA of today has.
    fn names(self) -> [String; 4] {
        let stem = self.stem();
        let versions: [&str; 4] =
            if self == Library::Driver { ["", ".1", ".13", ".12"] } else { ["", ".13", ".12", ".11"] };
        versions.map(|version| format!("lib{stem}.so{version}"))
    }

    /// Whether the bindings find it.
    fn is_found(self) -> bool {
        // SAFETY: opening a library runs its initialisers; these are NVIDIA's own, made to be opened this way.
        unsafe {
            match self {
                Library::Driver => driver::sys::is_culib_present(),
                Library::Nvrtc => nvrtc::sys::is_culib_present(),
                Library::CublasLt => cublaslt::sys::is_culib_present(),
                Library::Cublas => cublas::sys::is_culib_present(),
            }
        }
    }

    /// Fails with one sentence where the library is not on this machine. To be called before any of its functions.
    pub fn require(self) -> Result<(), CudaError> {
        if self.is_found() {
            return Ok(());
        }
        // A library that is open already is found under its own name, wherever it was opened.
        let found = FOLDERS.iter().flat_map(|folder| self.names().map(|name| Path::new(folder).join(name)));
        let opened = found.into_iter().any(|path| path.exists() && open(&path).is_ok());
        if opened && self.is_found() {
            return Ok(());
        }
        Err(CudaError::MissingLibrary {
            library: self.title(),
            looked_for: format!(
                "{} in LD_LIBRARY_PATH, the linker's cache and {}",
                self.names().join(", "),
                FOLDERS.join(", ")
            ),
            remedy: self.remedy(),
        })
    }

    /// Whether it has a function that older ones lack. The library must have been required.
    pub(super) fn has(self, function: &str) -> bool {
        // SAFETY: the library was found; the symbol is looked up and not called.
        unsafe {
            let library = match self {
                Library::Driver => driver::sys::culib(),
                Library::Nvrtc => nvrtc::sys::culib(),
                Library::CublasLt => cublaslt::sys::culib(),
                Library::Cublas => cublas::sys::culib(),
            };
            library.get::<*const ()>(function).is_ok()
        }
    }

    /// The file that is in use, once a function was called: `maps` is the process's list of mapped files (on Linux
    /// `/proc/self/maps`).
    pub fn path_in(self, maps: &str) -> Option<PathBuf> {
        let start = format!("lib{}.so", self.stem());
        let files = maps.lines().filter_map(|line| line.find('/').map(|i| PathBuf::from(&line[i..])));
        let is_it =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&start));
        files.into_iter().find(is_it)
    }
}

/// Opens the library at `path` for the whole process, so that it is the one that is found from now on.
pub fn open(path: &Path) -> Result<(), String> {
    // SAFETY: as in `is_found`; who names a file answers for its initialisers.
    let library = unsafe { libloading::Library::new(path) }.map_err(|error| error.to_string())?;
    std::mem::forget(library);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_sentence_that_says_what_was_looked_for() {
        for library in Library::ALL {
            let Err(error) = library.require() else { continue };
            let text = error.to_string();
            assert!(text.starts_with(&format!("no {} found (looked for lib", library.title())), "{text}");
            assert!(text.contains(".so.12") && text.contains("/usr/local/cuda/lib64"), "{text}");
            assert!(text.contains("): install ") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn the_file_in_use_is_found_among_the_mapped_ones() {
        let maps = "55d0-55d1 r--p 00000000 fe:00 12 /usr/bin/plica\n\
                    7f10-7f20 r--p 00000000 fe:00 12 /opt/cuda/lib/libcublasLt.so.13\n7f30-7f40 rw-p 0 00:00 0\n";
        assert_eq!(Library::CublasLt.path_in(maps), Some("/opt/cuda/lib/libcublasLt.so.13".into()));
        assert_eq!(Library::Cublas.path_in(maps), None);
    }

    #[test]
    fn a_file_that_is_no_library_is_refused() {
        assert!(open(Path::new(file!())).is_err());
    }
}
