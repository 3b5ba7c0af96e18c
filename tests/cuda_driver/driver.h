// What the files of the emulated driver share. One lock guards all of it: Locked, at the head of every call.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernel_table.h"

#define API extern "C" __attribute__((visibility("default")))

// The driver's, by their values.
typedef uint64_t CUdeviceptr;
enum CUresult : int {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  NO_BINARY_FOR_GPU = 209,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_ISOLATION = 905,
};

namespace cuda_driver {

// A global that is never destroyed: work is left to do when the process ends.
template <class T>
T& lasting() {
  return *new T;
}

// ---- Complaints -----------------------------------------------------------------------------------------------------

// Says what was wrong on stderr, keeps it for cuGetErrorString, and returns `code`.
CUresult complain(CUresult code, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Of work on the device: as with the real driver, every later call fails with the first such error.
CUresult stick(CUresult code);
CUresult stuck();

struct Locked {
  Locked();
  ~Locked();
};
// Lets other OS threads make calls while this one waits, however often it has locked.
struct Unlocked {
  Unlocked();
  ~Unlocked();
  int depth;
};

// A context is current on this OS thread, or a complaint.
CUresult need_context(const char* call);

// ---- Memory ---------------------------------------------------------------------------------------------------------

// Addresses are never used twice. A buffer ends where a page begins that nothing may touch, but for what rounds it up to
// ALIGNMENT; that is filled with a pattern and looked at when the buffer is freed. Fresh memory is NaN.
constexpr size_t ALIGNMENT = 16;

// The device's without what others take of it after it was asked how much is free.
size_t own_bytes();
CUdeviceptr reserve(size_t bytes);       // an address; its memory comes with `allocate`
void allocate(CUdeviceptr address);
void note_peak();  // memory of graphs has grown
CUresult release(CUdeviceptr address, const char* call);
void forget(CUdeviceptr address);        // one that never was allocated
bool is_buffer(CUdeviceptr address);     // a buffer's start, freed or not
bool in_device_memory(const void* pointer);
bool is_pinned(const void* pointer);
std::string describe(CUdeviceptr address);
// What is wrong with `bytes` at `address`; empty when they lie in one buffer in use.
std::string wrong_range(CUdeviceptr address, size_t bytes);
// Complains of it, for good.
bool check_range(const std::string& what, CUdeviceptr address, size_t bytes);

// ---- Streams --------------------------------------------------------------------------------------------------------

struct Stream;
struct Place {  // in a stream: after so many pieces of its work
  std::shared_ptr<Stream> stream;
  uint64_t count = 0;
};

std::shared_ptr<Stream> stream_of(void* handle, const char* call);  // null, and a complaint, when there is none
void enqueue(const std::shared_ptr<Stream>& stream, std::string what, std::function<void()> run);
// Work that waits for another process: run again and again until it says that it is done.
void enqueue_waiting(const std::shared_ptr<Stream>& stream, std::string what, std::function<bool()> run);
// What waits for another process and is not done when it is run once more; empty when nothing does.
std::string waiting_for_others();
void run_stream(const std::shared_ptr<Stream>& stream);
// But for what waits for another process.
void run_everything();

// Whether what the stream is given is recorded, not done.
bool is_captured(const std::shared_ptr<Stream>& stream);
// CAPTURE_INVALIDATED where the recording is lost: every call on its stream but the one that ends it says so.
CUresult lost_capture(const std::shared_ptr<Stream>& stream);
// The recording is lost. Returns `code`.
CUresult lose_capture(const std::shared_ptr<Stream>& stream, CUresult code);
// Of every launch: CAPTURE_INVALIDATED where the recording is lost, or is to be lost at this one.
CUresult captured_launch(const std::shared_ptr<Stream>& stream);
// Of what cannot be recorded: complains, and the recording is lost. SUCCESS where none is made.
CUresult not_while_captured(const std::shared_ptr<Stream>& stream, const char* what);
// The same of what is for no stream in particular.
CUresult not_while_any_is_captured(const char* what);
// Memory of a recording: it is there from its allocation to its release, at every replay anew.
void captured_allocation(const std::shared_ptr<Stream>& stream, CUdeviceptr address, size_t bytes);
// Complains where `address` is not the recording's own, or the recording has released it.
CUresult captured_release(const std::shared_ptr<Stream>& stream, CUdeviceptr address);

// What runs on the device now.
extern std::string& running;

// ---- Kernels --------------------------------------------------------------------------------------------------------


// At exit, one line a thing.
void tell_leaks();
void tell_leaked_modules();
void tell_leaked_graphs();
void tell_copies();

}  // namespace cuda_driver
