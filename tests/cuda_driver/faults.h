// Signals of a kernel: an access to a guard page or to freed memory, a misaligned one.
#pragma once

namespace cuda_driver {

void install_fault_handlers();

// While it lives, this OS thread runs a kernel.
struct InKernel {
  InKernel();
  ~InKernel();
};

}  // namespace cuda_driver
