// Device memory: guard pages, poison, what was freed; page-locked host memory.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "driver.h"

namespace cuda_driver {
namespace {

constexpr size_t PAGE = 4096;
constexpr size_t ARENA_BYTES = size_t(1) << 42;
// A GPU of so many MiB, for what is to be refused.
const char* const MEMORY_MIB = getenv("CUDA_EMULATOR_MEMORY_MIB");
const size_t DEVICE_BYTES = MEMORY_MIB ? strtoull(MEMORY_MIB, nullptr, 10) << 20 : size_t(80) << 30;
// What others take of it after it was asked how much is free.
const char* const TAKEN_MIB = getenv("CUDA_EMULATOR_TAKEN_MIB");
const size_t OWN_BYTES = DEVICE_BYTES - (TAKEN_MIB ? strtoull(TAKEN_MIB, nullptr, 10) << 20 : 0);
constexpr unsigned char POISON = 0xff;  // NaN in every float type
constexpr unsigned char SLACK = 0xa5;

enum class State { reserved, used, freed };

struct Buffer {
  size_t bytes;
  char* pages;
  size_t page_bytes;
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
  used_bytes += buffer.bytes;
  if (used_bytes > peak_bytes) peak_bytes = used_bytes;
}

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
  used_bytes -= buffer.bytes;
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
  if (getenv("CUDA_EMULATOR_PEAK")) fprintf(stderr, "device memory: %zu bytes at most\n", peak_bytes);
  size_t count = 0, bytes = 0;
  for (auto& [address, buffer] : buffers)
    if (buffer.state != State::freed) count++, bytes += buffer.bytes;
  if (count) fprintf(stderr, "cuda-emulator: leaked at exit: %zu buffers, %zu bytes\n", count, bytes);
  if (!pinned.empty()) fprintf(stderr, "cuda-emulator: leaked at exit: %zu page-locked host buffers\n", pinned.size());
}

}  // namespace cuda_driver

using namespace cuda_driver;

API CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  if (!bytes) return complain(INVALID_VALUE, "cuMemAlloc: of no bytes");
  if (used_bytes + bytes > OWN_BYTES || !(*address = reserve(bytes))) return OUT_OF_MEMORY;
  allocate(*address);
  return SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  run_everything();
  if (stuck() || !address) return stuck();
  return stick(release(address, "cuMemFree"));
}

API CUresult cuMemAllocAsync(CUdeviceptr* address, size_t bytes, void* handle) {
  Locked lock;
  auto stream = stream_of(handle, __func__);
  if (!stream || stuck()) return stuck() ? stuck() : INVALID_HANDLE;
  *address = 0;
  if (!bytes) return SUCCESS;
  if (used_bytes + bytes > OWN_BYTES || !(*address = reserve(bytes))) return OUT_OF_MEMORY;
  if (is_captured(stream)) captured_allocation(stream, *address);
  enqueue(stream, "cuMemAllocAsync", [at = *address] { allocate(at); });
  return SUCCESS;
}

API CUresult cuMemFreeAsync(CUdeviceptr address, void* handle) {
  Locked lock;
  auto stream = stream_of(handle, __func__);
  if (!stream || stuck()) return stuck() ? stuck() : INVALID_HANDLE;
  if (!address) return SUCCESS;
  if (!is_buffer(address)) return complain(INVALID_VALUE, "cuMemFreeAsync: %s", describe(address).c_str());
  if (is_captured(stream))
    if (CUresult error = captured_release(stream, address)) return error;
  enqueue(stream, "cuMemFreeAsync", [address] { stick(release(address, "cuMemFreeAsync")); });
  return SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  *total = DEVICE_BYTES;
  *free = DEVICE_BYTES - used_bytes;
  return SUCCESS;
}

// The one pool there is, and how much of what is freed it keeps; nothing here gives memory back.
static int the_pool;
static unsigned long long release_threshold;

API CUresult cuDeviceGetDefaultMemPool(void** pool, int device) {
  if (device != 0) return complain(INVALID_VALUE, "cuDeviceGetDefaultMemPool: of device %d", device);
  return *pool = &the_pool, SUCCESS;
}

API CUresult cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
  if (pool != &the_pool || attribute != 4) return complain(INVALID_VALUE, "cuMemPoolSetAttribute: attribute %d", attribute);
  return release_threshold = *static_cast<unsigned long long*>(value), SUCCESS;
}

API CUresult cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
  if (pool != &the_pool || attribute != 4) return complain(INVALID_VALUE, "cuMemPoolGetAttribute: attribute %d", attribute);
  return *static_cast<unsigned long long*>(value) = release_threshold, SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = DEVICE_BYTES, SUCCESS; }

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
