// The device, its context, errors, and what a process leaves behind.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "driver.h"
#include "faults.h"

namespace cuda_driver {
namespace {

std::recursive_mutex& mutex() {
  static auto& made = lasting<std::recursive_mutex>();
  return made;
}

int lock_depth;  // of the thread that has it
bool is_used;
CUresult sticky = SUCCESS;
auto& last_complaint = lasting<std::string>();
int retained;  // the primary context
int primary_context;
thread_local void* current_context;

// Threads of its own: those of this one are gone by now.
__attribute__((destructor)) void at_exit() {
  // A process that only links it may not be allowed to start threads.
  if (!is_used) return;
  std::thread([] {
    Locked lock;
    run_everything();
    tell_leaks();
    tell_leaked_modules();
    tell_leaked_graphs();
    tell_copies();
  }).join();
}

}  // namespace

Locked::Locked() {
  mutex().lock();
  lock_depth++;
}
Locked::~Locked() {
  lock_depth--;
  mutex().unlock();
}

Unlocked::Unlocked() : depth(lock_depth) {
  lock_depth = 0;
  for (int i = 0; i < depth; i++) mutex().unlock();
}
Unlocked::~Unlocked() {
  for (int i = 0; i < depth; i++) mutex().lock();
  lock_depth = depth;
}

CUresult complain(CUresult code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "cuda-emulator: %s\n", text);
  last_complaint = text;
  return code;
}

CUresult stick(CUresult code) { return sticky = sticky ? sticky : code; }
CUresult stuck() { return sticky; }

CUresult need_context(const char* call) {
  if (!current_context) return complain(INVALID_CONTEXT, "%s: no context is current on this OS thread", call);
  if (!retained) return complain(INVALID_CONTEXT, "%s: the context was released", call);
  return sticky;
}

}  // namespace cuda_driver

using namespace cuda_driver;

// Not emulated, each by its name: not_emulated.c has the functions.
extern "C" int cuda_driver_not_emulated(const char* name) { return complain(NOT_SUPPORTED, "%s is not emulated", name); }

API CUresult cuInit(unsigned) {
  static const bool once = (install_fault_handlers(), true);
  is_used = once;
  return SUCCESS;
}
API CUresult cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
API CUresult cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
API CUresult cuDeviceGet(int* device, int ordinal) { return ordinal ? INVALID_DEVICE : (*device = 0, SUCCESS); }
API CUresult cuDeviceGetName(char* name, int bytes, int) {
  const char* other = getenv("CUDA_EMULATOR_NAME");
  snprintf(name, bytes, "%s", other ? other : "emulated H100");
  return SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(char* uuid, int) { return memset(uuid, 0xe, 16), SUCCESS; }

API CUresult cuDeviceGetAttribute(int* value, int attribute, int) {
  // For good: another thread may ask while the process ends.
  static const std::map<int, int>& values = *new std::map<int, int>{
      {1, 1024},        // threads of a block
      {2, 1024},        // block dimensions
      {3, 1024},
      {4, 64},
      {5, 0x7fffffff},  // grid dimensions
      {6, 65535},
      {7, 65535},
      {8, 48 << 10},    // shared memory of a block
      {10, 32},         // threads of a warp
      {12, 65536},      // registers of a block
      {16, 132},        // multiprocessors
      {39, 2048},       // threads of a multiprocessor
      {75, getenv("CUDA_EMULATOR_OLD") ? 8 : 9},  // compute capability
      {76, 0},
      {81, 228 << 10},  // shared memory of a multiprocessor
      {97, 227 << 10},  // shared memory of a block that asks for it
      {115, 1},         // memory pools
  };
  auto found = values.find(attribute);
  if (found == values.end()) return complain(NOT_SUPPORTED, "device attribute %d is not emulated", attribute);
  return *value = found->second, SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(void** context, int) {
  Locked lock;
  retained++;
  *context = &primary_context;
  return SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(int) {
  Locked lock;
  if (!retained) return complain(INVALID_CONTEXT, "cuDevicePrimaryCtxRelease: released more often than retained");
  if (retained == 1) run_everything();
  retained--;
  return SUCCESS;
}
API CUresult cuCtxSetCurrent(void* context) { return current_context = context, SUCCESS; }
API CUresult cuCtxGetCurrent(void** context) { return *context = current_context, SUCCESS; }

API CUresult cuGetErrorName(int code, const char** text) {
  static const std::map<int, const char*> names = {
      {SUCCESS, "CUDA_SUCCESS"},
      {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
      {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
      {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
      {NOT_READY, "CUDA_ERROR_NOT_READY"},
      {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
      {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
      {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"},
      {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
  };
  auto found = names.find(code);
  return found == names.end() ? INVALID_VALUE : (*text = found->second, SUCCESS);
}
API CUresult cuGetErrorString(int code, const char** text) {
  Locked lock;
  static thread_local std::string copy;
  copy = last_complaint;
  return copy.empty() ? cuGetErrorName(code, text) : (*text = copy.c_str(), SUCCESS);
}
