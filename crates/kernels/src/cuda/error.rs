//! What can go wrong on a GPU: missing libraries, refused calls with their code, kernels that do not compile.

/// A failure of the GPU, its driver or its libraries.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CudaError {
    /// A library is not on this machine.
    #[error("no {library} found (looked for {looked_for}): {remedy}")]
    MissingLibrary {
        /// What it is called by people: "CUDA driver", "NVRTC".
        library: &'static str,
        /// File names and folders that were tried.
        looked_for: String,
        /// What to install or set.
        remedy: &'static str,
    },
    /// No GPU of that number.
    #[error("no CUDA device {ordinal}: {visible} visible (CUDA_VISIBLE_DEVICES limits them)")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// Devices that there are.
        visible: usize,
    },
    /// A call of the driver or of a library that was refused.
    #[error("{call} failed: {name} ({code}): {text}")]
    Call {
        /// Name of the called function.
        call: &'static str,
        /// Its return code.
        code: i64,
        /// The code's name.
        name: String,
        /// What the library says about it.
        text: String,
    },
    /// A kernel text that the compiler refuses.
    #[error("kernel text {source_name} does not compile for {architecture}:\n{log}")]
    Compile {
        /// Which text.
        source_name: String,
        /// For what.
        architecture: String,
        /// The compiler's output.
        log: String,
    },
    /// A kernel that is not in its text, or that failed while it ran.
    #[error("kernel {kernel} of {source_name}: {text}")]
    Kernel {
        /// Which text.
        source_name: &'static str,
        /// Which kernel.
        kernel: String,
        /// What happened.
        text: String,
    },
}

impl CudaError {
    /// Ends the caller by unwinding with this error as the payload: operations have no error of their own for what
    /// no input can cause.
    pub fn unwind(self) -> ! {
        // Without the panic hook: it would print a payload that it cannot name before the message.
        std::panic::resume_unwind(Box::new(self))
    }
}
