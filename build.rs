//! Compiles `kernels/*.cu` for feature `cuda`, to machine code and to PTX; does nothing without it.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    kernels::compile()?;
    Ok(())
}

#[cfg(feature = "cuda")]
mod kernels {
    use std::error::Error;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    const ARGUMENTS: [&str; 2] = ["-std=c++17", "-O3"];

    /// `$OUT_DIR/kernels.rs`: a file's stem, its machine code and its PTX, for every file.
    pub fn compile() -> Result<(), Box<dyn Error>> {
        println!("cargo:rerun-if-changed=kernels");
        let (sources, headers) = (files("cu")?, files("cuh")?);
        let out = PathBuf::from(std::env::var("OUT_DIR")?);
        let help = |e: &dyn std::fmt::Display| {
            format!("{e}\nthe toolkit is set up by: eval \"$(scripts/setup_cuda.sh)\"")
        };
        cudaforge::KernelBuilder::new()
            .source_dir("kernels")
            .watch(headers)
            .compute_cap_arch("90a")
            .args(ARGUMENTS)
            .build_ptx()
            .map_err(|e| help(&e))?;
        let nvcc = cudaforge::CudaToolkit::detect().map_err(|e| help(&e))?.nvcc_path;
        std::thread::scope(|threads| {
            let compile = |source: &'_ PathBuf| {
                let (nvcc, out, source) = (&nvcc, &out, source.clone());
                threads.spawn(move || machine_code(nvcc, &source, out).map_err(|e| e.to_string()))
            };
            let running: Vec<_> = sources.iter().map(compile).collect();
            running.into_iter().try_for_each(|one| one.join().map_err(|_| "a compiler's thread broke off")?)
        })?;
        let rows: String = sources.iter().map(|source| row(source)).collect();
        let table = format!("pub const IMAGES: &[(&str, &[u8], &str)] = &[\n{rows}];\n");
        Ok(std::fs::write(out.join("kernels.rs"), table)?)
    }

    /// Sorted: their contents are hashed in order, and folders list files in any.
    fn files(extension: &str) -> std::io::Result<Vec<PathBuf>> {
        let mut found = vec![];
        for entry in std::fs::read_dir("kernels")? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
        found.sort();
        Ok(found)
    }

    fn stem(source: &Path) -> String {
        source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The machine code that scripts/check_kernels.sh looks into: its flags.
    fn machine_code(nvcc: &Path, source: &Path, out: &Path) -> Result<(), Box<dyn Error>> {
        let status = Command::new(nvcc)
            .arg("-gencode=arch=compute_90a,code=sm_90a")
            .args(ARGUMENTS)
            .arg("-cubin")
            .arg("-o")
            .arg(out.join(stem(source) + ".cubin"))
            .arg(source)
            .status()?;
        if status.success() { Ok(()) } else { Err(format!("{} does not compile", source.display()).into()) }
    }

    fn row(source: &Path) -> String {
        let stem = stem(source);
        let at = |kind: &str| format!("concat!(env!(\"OUT_DIR\"), \"/{stem}.{kind}\")");
        format!("(\"{stem}\", include_bytes!({}), include_str!({})),\n", at("cubin"), at("ptx"))
    }
}
