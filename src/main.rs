use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // The Python tool's worker is this same binary, started again; it must not pass through anything else.
    if std::env::args_os().nth(1).is_some_and(|a| a == rloss::interpreter::WORKER_ARGUMENT) {
        std::process::exit(rloss::interpreter::worker_main());
    }
    ExitCode::from(rloss::cli::run())
}
