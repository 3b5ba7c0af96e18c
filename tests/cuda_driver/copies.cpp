// Copies and fills, in stream order.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

using namespace cuda_driver;

namespace {

// Bytes copied so far.
size_t host_to_device, device_to_host;

char* host(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

// Page-locked host memory is read and written when the copy has its turn, any other before the call returns.
CUresult copy(const char* call, void* handle, CUdeviceptr to, bool to_device, CUdeviceptr from, bool from_device, size_t bytes) {
  Locked lock;
  if (stuck()) return stuck();
  auto stream = stream_of(handle, call);
  if (!stream) return INVALID_HANDLE;
  if (CUresult error = lost_capture(stream)) return error;
  if (!bytes) return SUCCESS;
  for (CUdeviceptr address : {to_device ? 0 : to, from_device ? 0 : from})
    if (in_device_memory(host(address)))
      return complain(INVALID_VALUE, "%s: the host's address %s", call, describe(address).c_str());
  // The real one may read or write it whenever the recording is replayed.
  if ((!from_device && !is_pinned(host(from))) || (!to_device && !is_pinned(host(to))))
    if (CUresult error = not_while_captured(stream, call)) return error;
  if (!from_device) host_to_device += bytes;
  if (!to_device) device_to_host += bytes;
  std::shared_ptr<std::vector<char>> staged;
  if (!from_device && !is_pinned(host(from)))
    staged = std::make_shared<std::vector<char>>(host(from), host(from) + bytes);
  enqueue(stream, call, [=, call = std::string(call)] {
    if (to_device && !check_range(call + " to", to, bytes)) return;
    if (from_device && !check_range(call + " from", from, bytes)) return;
    memmove(host(to), staged ? staged->data() : host(from), bytes);
  });
  if (!to_device && !is_pinned(host(to))) run_stream(stream);
  return stuck();
}

CUresult copy_now(const char* call, CUdeviceptr to, bool to_device, CUdeviceptr from, bool from_device, size_t bytes) {
  const CUresult result = copy(call, nullptr, to, to_device, from, from_device, bytes);
  if (result || (to_device && from_device)) return result;  // between device memories the host does not wait
  Locked lock;
  run_stream(stream_of(nullptr, call));
  return stuck();
}

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

void cuda_driver::tell_copies() {
  if (getenv("CUDA_EMULATOR_COPIES"))
    fprintf(stderr, "copies: %zu bytes to the device, %zu bytes from it\n", host_to_device, device_to_host);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, void* stream) {
  return copy("cuMemcpyHtoDAsync", stream, to, true, address_of(from), false, bytes);
}
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, void* stream) {
  return copy("cuMemcpyDtoHAsync", stream, address_of(to), false, from, true, bytes);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, void* stream) {
  return copy("cuMemcpyDtoDAsync", stream, to, true, from, true, bytes);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return copy_now("cuMemcpyHtoD", to, true, address_of(from), false, bytes);
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return copy_now("cuMemcpyDtoH", address_of(to), false, from, true, bytes);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return copy_now("cuMemcpyDtoD", to, true, from, true, bytes);
}

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, void* handle) {
  Locked lock;
  if (stuck()) return stuck();
  auto stream = stream_of(handle, __func__);
  if (!stream) return INVALID_HANDLE;
  if (CUresult error = lost_capture(stream)) return error;
  enqueue(stream, "cuMemsetD8Async", [=] {
    if (bytes && check_range("cuMemsetD8Async", to, bytes)) memset(host(to), value, bytes);
  });
  return stuck();
}
API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
  return cuMemsetD8Async(to, value, bytes, nullptr);
}
