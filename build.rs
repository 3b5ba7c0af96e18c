//! Compiles `kernels/*.cu` to PTX for feature `cuda`; does nothing without it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    compile_kernels()?;
    Ok(())
}

/// One constant a file, its name in capitals, in `$OUT_DIR/kernels.rs`.
#[cfg(feature = "cuda")]
fn compile_kernels() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=kernels");
    let mut headers = vec![];
    for entry in std::fs::read_dir("kernels")? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "cuh") {
            headers.push(path);
        }
    }
    // Sorted: their contents are hashed in order, and folders list files in any.
    headers.sort();
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    cudaforge::KernelBuilder::new()
        .source_dir("kernels")
        .watch(headers)
        .compute_cap_arch("90a")
        .args(["-std=c++17", "-O3"])
        .build_ptx()
        .map_err(|e| format!("{e}\nthe toolkit is set up by: eval \"$(scripts/setup_cuda.sh)\""))?
        .write(out.join("kernels.rs"))?;
    Ok(())
}
