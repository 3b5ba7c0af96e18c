//! Loads kernels: machine code if the driver accepts it, otherwise PTX, which the driver compiles.
//!
//! By default the driver loads a kernel at its first launch, and may then wait for all work of the GPU. A
//! process whose NCCL kernels wait for another process could hang there, so all kernels are loaded at start.

use crate::ops::sink_attention::kernels::Kernel;
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUfunction_attribute};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDevice, WrapErr, kernels};
use candle_core::{Result, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Shared memory per block that needs no special permission, in bytes.
const SHARED_BYTES_DEFAULT: usize = 48 << 10;
/// Percentage of the on-chip memory of a multiprocessor that is used as shared memory. With all of it,
/// several large blocks fit. All kernels have the same percentage, because a multiprocessor must be idle
/// before it changes.
const SHARED_CARVEOUT_PERCENT: i32 = 100;

/// The modules of candle whose kernels ops and models use, each with the name of one kernel. Their PTX is
/// compiled by the driver when they are loaded.
const CANDLE_MODULES: [(kernels::Module, &str); 6] = [
    (kernels::AFFINE, "affine_f32"),
    (kernels::BINARY, "badd_f32"),
    (kernels::CAST, "cast_bf16_f32"),
    (kernels::FILL, "fill_u8"),
    (kernels::REDUCE, "sum_f32"),
    (kernels::UNARY, "ucopy_f32"),
];

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

/// Loads all kernels of the program, and those of candle that it uses.
///
/// # Errors
/// When the driver fails.
pub(super) fn load_kernels(device: &CudaDevice) -> Result<()> {
    let context = device.cuda_stream().context().clone();
    for (file, names, ..) in IMAGES {
        let module = module(lock_modules().get_or_insert_default(), &context, file)?;
        for name in *names {
            // SAFETY: the function belongs to a loaded module.
            unsafe { sys::cuFuncLoad(module.load_function(name).w()?.cu_function()) }.result().w()?;
        }
    }
    for (module, name) in &CANDLE_MODULES {
        let function = device.get_or_load_func(name, module)?.into_cuda_function();
        for function in functions_beside(&function)? {
            // SAFETY: the function belongs to a loaded module.
            unsafe { sys::cuFuncLoad(function) }.result().w()?;
        }
    }
    Ok(())
}

/// Returns all functions of the module that `function` belongs to.
fn functions_beside(function: &CudaFunction) -> Result<Vec<sys::CUfunction>> {
    let (mut module, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: the function belongs to a loaded module, and the pointers are to locals. The vector has one
    // element for each function.
    unsafe {
        sys::cuFuncGetModule(&mut module, function.cu_function()).result().w()?;
        sys::cuModuleGetFunctionCount(&mut count, module).result().w()?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module).result().w()?;
        Ok(functions)
    }
}

/// Returns the module of a file, which is loaded once per context.
fn module(
    loaded: &mut LoadedModules,
    context: &Arc<CudaContext>,
    file: &'static str,
) -> Result<Arc<CudaModule>> {
    let key = (context.cu_ctx() as Context, file);
    if let Some(module) = loaded.modules.get(&key) {
        return Ok(module.clone());
    }
    let module = load(context, file)?;
    loaded.modules.insert(key, module.clone());
    Ok(module)
}

/// Returns `kernel` on this device, ready for a launch.
///
/// # Errors
/// When the file or the kernel does not exist, or the driver fails.
pub(super) fn function(device: &CudaDevice, kernel: &Kernel) -> Result<CudaFunction> {
    let context = device.cuda_stream().context().clone();
    let key = (context.cu_ctx() as Context, kernel.function);
    let mut guard = lock_modules();
    let loaded = guard.get_or_insert_default();
    if let Some(function) = loaded.functions.get(&key) {
        return Ok(function.clone());
    }
    let function = module(loaded, &context, kernel.file)?.load_function(kernel.function).w()?;
    let mut attributes = vec![(
        CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        SHARED_CARVEOUT_PERCENT,
    )];
    if kernel.shared_bytes > SHARED_BYTES_DEFAULT {
        attributes.push((
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            kernel.shared_bytes as i32,
        ));
    }
    for (attribute, value) in attributes {
        function.set_attribute(attribute, value).w()?;
    }
    loaded.functions.insert(key, function.clone());
    Ok(function)
}

fn load(context: &Arc<CudaContext>, file: &str) -> Result<Arc<CudaModule>> {
    let Some((_, _, code, ptx)) = IMAGES.iter().find(|(name, ..)| *name == file) else {
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

#[cfg(test)]
mod on_device {
    use super::*;
    use crate::ops::cuda::open;

    fn is_loaded(function: sys::CUfunction) -> bool {
        let mut state = sys::CUfunctionLoadingState::CU_FUNCTION_LOADING_STATE_UNLOADED;
        // SAFETY: the function belongs to a loaded module, and the pointer is to a local.
        unsafe { sys::cuFuncIsLoaded(&mut state, function) }.result().unwrap();
        state == sys::CUfunctionLoadingState::CU_FUNCTION_LOADING_STATE_LOADED
    }

    #[test]
    fn all_kernels_are_loaded_at_start() {
        let device = open(0).unwrap();
        let gpu = device.as_cuda_device().unwrap();
        let context = gpu.cuda_stream().context().clone();
        let mut count = 0;
        for (file, names, ..) in IMAGES {
            let module = module(lock_modules().get_or_insert_default(), &context, file).unwrap();
            let first = module.load_function(names[0]).unwrap();
            let functions = functions_beside(&first).unwrap();
            assert_eq!(functions.len(), names.len(), "{file}: kernels that the build does not know");
            assert!(functions.into_iter().all(is_loaded), "{file}");
            count += names.len();
        }
        assert!(count >= 100, "{count}");
        for (module, name) in &CANDLE_MODULES {
            let function = gpu.get_or_load_func(name, module).unwrap().into_cuda_function();
            assert!(functions_beside(&function).unwrap().into_iter().all(is_loaded), "{name}");
        }
    }
}
