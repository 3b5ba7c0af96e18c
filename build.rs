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

    /// `$OUT_DIR/kernels.rs`: a file's stem, its kernels, its machine code and its PTX, for every file.
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
        let rows = sources.iter().map(|source| row(source)).collect::<Result<String, _>>()?;
        let table = format!("pub const IMAGES: &[(&str, &[&str], &[u8], &str)] = &[\n{rows}];\n");
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

    /// The names of the kernels in `text`: what follows `__global__ void` and launch bounds.
    fn kernels(text: &str) -> Vec<&str> {
        let declared = text.split("extern \"C\" __global__ void").skip(1).map(str::trim_start);
        let named = declared.map(|rest| match rest.strip_prefix("__launch_bounds__(") {
            Some(bounds) => bounds.split_once(')').map_or("", |(_, rest)| rest.trim_start()),
            None => rest,
        });
        named.filter_map(|rest| Some(rest.split_once('(')?.0)).collect()
    }

    fn row(source: &Path) -> std::io::Result<String> {
        let (stem, text) = (stem(source), std::fs::read_to_string(source)?);
        let at = |kind: &str| format!("concat!(env!(\"OUT_DIR\"), \"/{stem}.{kind}\")");
        let (names, code, ptx) = (kernels(&text), at("cubin"), at("ptx"));
        Ok(format!("(\"{stem}\", &{names:?}, include_bytes!({code}), include_str!({ptx})),\n"))
    }
}
