// Device memory: guard pages, poison, what was freed; page-locked host memory.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "pool.h"

namespace cuda_driver {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t ARENA_BYTES = size_t(1) << 42;
// Bytes of a setting in MiB.
size_t bytes_of(const char* setting, size_t otherwise) {
  const char* text = getenv(setting);
  return text ? strtoull(text, nullptr, 10) << 20 : otherwise;
}
// A GPU of so many MiB, for what is to be refused.
size_t device_bytes() {
  static const size_t bytes = bytes_of("CUDA_EMULATOR_MEMORY_MIB", size_t(80) << 30);
  return bytes;
}
constexpr unsigned char POISON = 0xff;  // NaN in every float type
constexpr unsigned char SLACK = 0xa5;

enum class State { reserved, used, freed };

struct Buffer {
  size_t bytes;
  char* pages;
  size_t page_bytes;
  bool of_graph = false;  // the driver keeps a graph's memory between launches
  State state = State::reserved;
};

auto& buffers = lasting<std::map<CUdeviceptr, Buffer>>();
auto& pinned = lasting<std::map<uintptr_t, size_t>>();
size_t used_bytes, peak_bytes;
char *arena, *arena_next;

void make_arena() {
  if (arena) return;
  void* made = mmap(nullptr, ARENA_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) {
    perror("cuda-emulator: address space for device memory");
    abort();
  }
  arena = arena_next = static_cast<char*>(made);
}

// The last buffer that starts at or before `address`.
std::map<CUdeviceptr, Buffer>::iterator buffer_before(CUdeviceptr address) {
  auto after = buffers.upper_bound(address);
  return after == buffers.begin() ? buffers.end() : std::prev(after);
}

}  // namespace

size_t own_bytes() {
  static const size_t taken = bytes_of("CUDA_EMULATOR_TAKEN_MIB", 0);
  return device_bytes() - taken;
}

CUdeviceptr reserve(size_t bytes) {
  make_arena();
  const size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  const size_t page_bytes = (rounded + PAGE - 1) / PAGE * PAGE;
  if (arena_next + page_bytes + PAGE > arena + ARENA_BYTES) return 0;
  char* pages = arena_next;
  arena_next += page_bytes + PAGE;
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(pages + page_bytes - rounded);
  buffers[address] = {bytes, pages, page_bytes};
  return address;
}

void allocate(CUdeviceptr address) {
  Buffer& buffer = buffers[address];
  if (mprotect(buffer.pages, buffer.page_bytes, PROT_READ | PROT_WRITE) != 0) {
    perror("cuda-emulator: device memory");
    abort();
  }
  char* start = reinterpret_cast<char*>(address);
  char* end = buffer.pages + buffer.page_bytes;
  memset(start, POISON, buffer.bytes);
  memset(start + buffer.bytes, SLACK, end - start - buffer.bytes);
  buffer.state = State::used;
  if (!buffer.of_graph) used_bytes += buffer.bytes;
  note_peak();
}

void note_peak() { peak_bytes = std::max(peak_bytes, used_bytes + pool_graph_bytes()); }

CUresult release(CUdeviceptr address, const char* call) {
  auto found = buffers.find(address);
  if (found == buffers.end() || found->second.state != State::used)
    return complain(INVALID_VALUE, "%s: %s", call, describe(address).c_str());
  Buffer& buffer = found->second;
  CUresult result = SUCCESS;
  const char* start = reinterpret_cast<char*>(address);
  const char* end = buffer.pages + buffer.page_bytes;
  for (const char* at = start + buffer.bytes; at < end && !result; at++)
    if (static_cast<unsigned char>(*at) != SLACK)
      result = complain(ILLEGAL_ADDRESS, "%s: something wrote past the end of a buffer of %zu bytes, at byte %zu", call,
                        buffer.bytes, size_t(at - start));
  madvise(buffer.pages, buffer.page_bytes, MADV_DONTNEED);
  mprotect(buffer.pages, buffer.page_bytes, PROT_NONE);
  buffer.state = State::freed;
  if (!buffer.of_graph) used_bytes -= buffer.bytes;
  return result;
}

void forget(CUdeviceptr address) {
  Buffer& buffer = buffers[address];
  if (buffer.state == State::reserved) buffer.state = State::freed;
}

bool is_buffer(CUdeviceptr address) { return buffers.count(address); }

bool in_device_memory(const void* pointer) {
  const char* at = static_cast<const char*>(pointer);
  return arena && at >= arena && at < arena + ARENA_BYTES;
}

std::string describe(CUdeviceptr address) {
  char text[160];
  auto found = buffer_before(address);
  if (!in_device_memory(reinterpret_cast<void*>(address)) || found == buffers.end()) {
    snprintf(text, sizeof text, "%#zx is no address of device memory", size_t(address));
    return text;
  }
  static const char* states[] = {"whose allocation has not had its turn", "in use", "freed before"};
  const Buffer& buffer = found->second;
  snprintf(text, sizeof text, "%#zx is byte %zu of a buffer of %zu bytes %s", size_t(address),
           size_t(address - found->first), buffer.bytes, states[int(buffer.state)]);
  return text;
}

std::string wrong_range(CUdeviceptr address, size_t bytes) {
  auto found = buffer_before(address);
  const bool good = found != buffers.end() && found->second.state == State::used &&
                    address - found->first <= found->second.bytes &&
                    bytes <= found->second.bytes - (address - found->first);
  return good ? "" : describe(address);
}

bool check_range(const std::string& what, CUdeviceptr address, size_t bytes) {
  if (!bytes) return true;
  const std::string wrong = wrong_range(address, bytes);
  if (wrong.empty()) return true;
  stick(complain(ILLEGAL_ADDRESS, "%s, %zu bytes: %s", what.c_str(), bytes, wrong.c_str()));
  return false;
}

bool is_pinned(const void* pointer) {
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (after == pinned.begin()) return false;
  --after;
  return reinterpret_cast<uintptr_t>(pointer) - after->first < after->second;
}

void tell_leaks() {
  if (getenv("CUDA_EMULATOR_PEAK")) {
    fprintf(stderr, "device memory: %zu bytes at most\n", peak_bytes);
    pool_tell();
  }
  size_t count = 0, bytes = 0;
  for (auto& [address, buffer] : buffers)
    if (buffer.state != State::freed) count++, bytes += buffer.bytes;
  if (count) fprintf(stderr, "cuda-emulator: leaked at exit: %zu buffers, %zu bytes\n", count, bytes);
  if (!pinned.empty()) fprintf(stderr, "cuda-emulator: leaked at exit: %zu page-locked host buffers\n", pinned.size());
}

}  // namespace cuda_driver

using namespace cuda_driver;

// An address, if the device has room for it: in the pool, for a stream.
static CUresult place(CUdeviceptr* address, size_t bytes, const Stream* stream) {
  *address = reserve(bytes);
  if (*address && pool_take(*address, bytes, stream, own_bytes())) return SUCCESS;
  buffers.erase(*address);
  return *address = 0, OUT_OF_MEMORY;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  if (!bytes) return complain(INVALID_VALUE, "cuMemAlloc: of no bytes");
  if (CUresult error = place(address, bytes, nullptr)) return error;
  allocate(*address);
  return SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  run_everything();
  if (stuck() || !address) return stuck();
  *pool_free(address, nullptr) = true;
  return stick(release(address, "cuMemFree"));
}

API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, void* handle) {
  Locked lock;
  auto stream = stream_of(handle, __func__);
  if (!stream || stuck()) return stuck() ? stuck() : INVALID_HANDLE;
  *address = 0;
  if (CUresult error = lost_capture(stream)) return error;
  if (!bytes && is_captured(stream))
    return lose_capture(stream, complain(INVALID_VALUE, "cuMemAllocAsync: of no bytes on a stream that is captured"));
  if (!bytes) return SUCCESS;
  if (is_captured(stream)) {
    if (!(*address = reserve(bytes))) return OUT_OF_MEMORY;
    buffers[*address].of_graph = true;
    captured_allocation(stream, *address, bytes);
  } else if (CUresult error = place(address, bytes, stream.get())) {
    return error;
  }
  enqueue(stream, "cuMemAllocAsync", [at = *address] { allocate(at); });
  return SUCCESS;
}

API CUresult cuMemFreeAsync(CUdeviceptr address, void* handle) {
  Locked lock;
  auto stream = stream_of(handle, __func__);
  if (!stream || stuck()) return stuck() ? stuck() : INVALID_HANDLE;
  if (CUresult error = lost_capture(stream)) return error;
  if (!address && is_captured(stream))
    return lose_capture(stream, complain(INVALID_VALUE, "cuMemFreeAsync: of no memory on a stream that is captured"));
  if (!address) return SUCCESS;
  if (!is_buffer(address)) return complain(INVALID_VALUE, "cuMemFreeAsync: %s", describe(address).c_str());
  if (is_captured(stream)) {
    if (CUresult error = captured_release(stream, address)) return error;
    enqueue(stream, "cuMemFreeAsync", [address] { stick(release(address, "cuMemFreeAsync")); });
    return SUCCESS;
  }
  enqueue(stream, "cuMemFreeAsync", [address, turn = pool_free(address, stream.get())] {
    stick(release(address, "cuMemFreeAsync"));
    *turn = true;
  });
  return SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  *total = device_bytes();
  *free = device_bytes() - std::min(device_bytes(), pool_taken_bytes());
  return SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = device_bytes(), SUCCESS; }

API CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  *pointer = malloc(bytes ? bytes : 1);
  memset(*pointer, POISON, bytes);
  pinned[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  return SUCCESS;
}

API CUresult cuMemFreeHost(void* pointer) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  run_everything();
  if (!pinned.erase(reinterpret_cast<uintptr_t>(pointer)))
    return complain(INVALID_VALUE, "cuMemFreeHost: %p is not page-locked memory of the driver", pointer);
  free(pointer);
  return stuck();
}
