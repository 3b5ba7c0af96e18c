//! Loads kernels: machine code if the driver accepts it, otherwise PTX, which the driver compiles.

use crate::ops::sink_attention::kernels::Kernel;
use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Result, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Shared memory per block that needs no special permission, in bytes.
const SHARED_BYTES_DEFAULT: usize = 48 << 10;
/// Percentage of the on-chip memory of a multiprocessor that is used as shared memory. With all of it,
/// several large blocks fit.
const SHARED_CARVEOUT_PERCENT: i32 = 100;

/// The address of a context, which identifies it. The modules keep the context alive.
type Context = usize;

/// The loaded modules by file, and the functions by kernel.
#[derive(Default)]
struct LoadedModules {
    modules: HashMap<(Context, &'static str), Arc<CudaModule>>,
    functions: HashMap<(Context, &'static str), CudaFunction>,
}

static LOADED: Mutex<Option<LoadedModules>> = Mutex::new(None);

/// Locks the table of loaded modules.
fn lock_modules() -> MutexGuard<'static, Option<LoadedModules>> {
    // Poisoning is ignored, because a panic leaves only complete entries.
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unloads all kernels of the process. They are loaded again when needed.
pub fn unload_kernels() {
    *lock_modules() = None;
}

/// Returns `kernel` on this device, ready for a launch.
///
/// # Errors
/// When the file or the kernel does not exist, or the driver fails.
pub(super) fn function(device: &CudaDevice, kernel: &Kernel) -> Result<CudaFunction> {
    let context = device.cuda_stream().context().clone();
    let key = context.cu_ctx() as Context;
    let mut guard = lock_modules();
    let LoadedModules { modules, functions } = guard.get_or_insert_default();
    if let Some(function) = functions.get(&(key, kernel.function)) {
        return Ok(function.clone());
    }
    let module = match modules.get(&(key, kernel.file)) {
        Some(module) => module.clone(),
        None => load(&context, kernel.file)?,
    };
    modules.insert((key, kernel.file), module.clone());
    let function = module.load_function(kernel.function).w()?;
    if kernel.shared_bytes > SHARED_BYTES_DEFAULT {
        let attributes = [
            (
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                kernel.shared_bytes as i32,
            ),
            (
                CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                SHARED_CARVEOUT_PERCENT,
            ),
        ];
        for (attribute, value) in attributes {
            function.set_attribute(attribute, value).w()?;
        }
    }
    functions.insert((key, kernel.function), function.clone());
    Ok(function)
}

fn load(context: &Arc<CudaContext>, file: &str) -> Result<Arc<CudaModule>> {
    let Some((_, code, ptx)) = IMAGES.iter().find(|(name, ..)| *name == file) else {
        bail!("no kernel file {file}");
    };
    match context.load_module(Ptx::from_binary(code.to_vec())) {
        Ok(module) => Ok(module),
        Err(refusal) => {
            // The checks of the shipped machine code do not cover code that the driver compiles, so the user
            // gets a note.
            eprintln!(
                "note: {file}: the driver refuses its machine code ({refusal}) and compiles its PTX instead"
            );
            context.load_module(Ptx::from_src(*ptx)).w()
        }
    }
}
