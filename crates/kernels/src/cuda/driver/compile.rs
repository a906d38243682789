//! Kernel texts to machine code by NVRTC, which needs neither a GPU nor a header: the texts are complete.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::sys as nvrtc;

use super::calls::call;
use super::library::Library;
use crate::cuda::{CudaError, Source};

/// For what a text is compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Machine code of this architecture (`sm_90a`).
    Machine(String),
    /// Code that the driver translates when it loads it (`compute_100`), for a GPU that is newer than the compiler.
    Virtual(String),
}

impl Target {
    /// The target of a GPU of this compute capability with a compiler that knows the architectures `supported` (90 for
    /// sm_90): machine code where it can, code of the newest older architecture otherwise. None where all are newer.
    pub fn of(major: i32, minor: i32, supported: &[i32]) -> Option<Target> {
        let number = major * 10 + minor;
        if supported.contains(&number) {
            return Some(Target::Machine(architecture(major, minor)));
        }
        let older = supported.iter().filter(|s| **s < number).max()?;
        Some(Target::Virtual(format!("compute_{older}")))
    }

    /// As the compiler's option names it.
    pub fn name(&self) -> &str {
        match self {
            Target::Machine(name) | Target::Virtual(name) => name,
        }
    }
}

/// Name of the architecture; from 90 on with what only this architecture has.
pub(super) fn architecture(major: i32, minor: i32) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// A compiled text.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// What a driver loads: an ELF file, or PTX with its ending zero.
    pub image: Vec<u8>,
    /// What the compiler said.
    pub log: String,
}

/// Version of NVRTC.
pub fn compiler_version() -> Result<(i32, i32), CudaError> {
    Library::Nvrtc.require()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two integers.
    unsafe { call!(nvrtc::nvrtcVersion(&mut major, &mut minor)) }?;
    Ok((major, minor))
}

/// Architectures that NVRTC compiles for, as numbers (90 for sm_90).
pub fn supported() -> Result<Vec<i32>, CudaError> {
    Library::Nvrtc.require()?;
    let mut count = 0;
    // SAFETY: the first call writes how many integers the second writes.
    unsafe {
        call!(nvrtc::nvrtcGetNumSupportedArchs(&mut count))?;
        let mut numbers = vec![0; count.max(0) as usize];
        call!(nvrtc::nvrtcGetSupportedArchs(numbers.as_mut_ptr()))?;
        Ok(numbers)
    }
}

/// What the compiler is told beside the text; floating-point arithmetic stays exact (no fast math).
pub(super) fn options(target: &Target) -> Vec<String> {
    vec![format!("--gpu-architecture={}", target.name()), "--std=c++17".into(), "-default-device".into()]
}

/// A program of the compiler.
struct Program(nvrtc::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// Two calls: how many bytes there are, and the bytes.
type Get<P> = unsafe fn(nvrtc::nvrtcProgram, P) -> nvrtc::nvrtcResult;

impl Program {
    fn new(source: &Source) -> Result<Program, CudaError> {
        let text = CString::new(source.complete()).expect("a kernel text has no zero byte");
        let name = CString::new(format!("{}.cu", source.name)).expect("a name has no zero byte");
        let mut program = std::ptr::null_mut();
        // SAFETY: both strings end in zero and are copied; there are no headers.
        unsafe {
            call!(nvrtc::nvrtcCreateProgram(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null()
            ))?;
        }
        Ok(Program(program))
    }

    fn get(&self, size: Get<*mut usize>, bytes: Get<*mut c_char>) -> Option<Vec<u8>> {
        let mut count = 0;
        // SAFETY: the first call writes how many bytes the second writes.
        unsafe {
            if size(self.0, &mut count) != nvrtc::nvrtcResult::NVRTC_SUCCESS {
                return None;
            }
            let mut buffer = vec![0u8; count];
            let code = bytes(self.0, buffer.as_mut_ptr().cast());
            (code == nvrtc::nvrtcResult::NVRTC_SUCCESS).then_some(buffer)
        }
    }
}

/// Compiles a text. `extra` options come behind the usual ones.
pub fn compile(source: &Source, target: &Target, extra: &[&str]) -> Result<Compiled, CudaError> {
    Library::Nvrtc.require()?;
    let options = options(target).into_iter().chain(extra.iter().map(|o| (*o).to_owned()));
    let options: Vec<CString> =
        options.map(|option| CString::new(option).expect("an option has no zero byte")).collect();
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let program = Program::new(source)?;
    // SAFETY: the program is alive; the options are as many C strings as are announced.
    let result =
        unsafe { call!(nvrtc::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr())) };
    let log = program.get(nvrtc::nvrtcGetProgramLogSize, nvrtc::nvrtcGetProgramLog).unwrap_or_default();
    let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_owned();
    let refused = |log: String| CudaError::Compile {
        source_name: format!("{}.cu", source.name),
        architecture: target.name().into(),
        log,
    };
    if let Err(error) = result {
        return Err(refused(if log.is_empty() { error.to_string() } else { log }));
    }
    let image = match target {
        Target::Machine(_) => program.get(nvrtc::nvrtcGetCUBINSize, nvrtc::nvrtcGetCUBIN),
        Target::Virtual(_) => program.get(nvrtc::nvrtcGetPTXSize, nvrtc::nvrtcGetPTX),
    };
    match image {
        Some(image) if !image.is_empty() => Ok(Compiled { image, log }),
        _ => Err(refused(format!("the compiler returned no code\n{log}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_gpus_get_the_newest_code_that_the_compiler_knows() {
        let supported = [80, 86, 89, 90, 100];
        let machine = |name: &str| Some(Target::Machine(name.into()));
        assert_eq!(Target::of(8, 0, &supported), machine("sm_80"));
        assert_eq!(Target::of(9, 0, &supported), machine("sm_90a"));
        assert_eq!(Target::of(10, 0, &supported), machine("sm_100a"));
        assert_eq!(Target::of(10, 3, &supported), Some(Target::Virtual("compute_100".into())));
        assert_eq!(Target::of(8, 7, &supported), Some(Target::Virtual("compute_86".into())));
        assert_eq!(Target::of(7, 5, &supported), None);
    }
}
