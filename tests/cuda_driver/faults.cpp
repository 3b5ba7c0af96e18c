#include "faults.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>

#include "driver.h"
#include "engine.h"

namespace cuda_driver {
namespace {

thread_local bool in_kernel = false;
struct sigaction segv_before, ill_before;

std::string place() {
  if (!in_kernel) return "by the host";
  const cuda_host::Coordinates& here = cuda_host::here();
  char text[160];
  snprintf(text, sizeof text, "in block (%u,%u,%u), thread (%u,%u,%u)", here.block.x, here.block.y, here.block.z,
           here.thread.x, here.thread.y, here.thread.z);
  return text;
}

bool is_write(const void* context) {
#ifdef __x86_64__
  return static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
  (void)context;
  return false;
#endif
}

// Nothing can go on after it: the process says what it was and ends.
void on_fault(int signal, siginfo_t* info, void* context) {
  if (signal == SIGILL && in_kernel) {
    fprintf(stderr, "cuda-emulator: %s: a misaligned access %s\n", running.c_str(), place().c_str());
    _exit(134);
  }
  if (signal == SIGSEGV && in_device_memory(info->si_addr)) {
    fprintf(stderr, "cuda-emulator: %s: a %s %s: %s\n", in_kernel ? running.c_str() : "outside any kernel",
            is_write(context) ? "write" : "read", place().c_str(),
            describe(reinterpret_cast<CUdeviceptr>(info->si_addr)).c_str());
    _exit(134);
  }
  sigaction(signal, signal == SIGILL ? &ill_before : &segv_before, nullptr);
}

}  // namespace

void install_fault_handlers() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;  // on the stack that faulted: Rust's own for signals is too small for fprintf
  sigaction(SIGSEGV, &action, &segv_before);
  sigaction(SIGILL, &action, &ill_before);
}

InKernel::InKernel() { in_kernel = true; }
InKernel::~InKernel() { in_kernel = false; }

}  // namespace cuda_driver
