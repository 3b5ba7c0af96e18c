// What the files of the driver's own tests share: short forms of its calls, and tests in processes of their own.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "driver_calls.h"

constexpr unsigned NON_BLOCKING = 1;
constexpr int SHARED_BYTES_MAX = 8, CARVEOUT = 9;

inline std::string module_image, module_ptx;

inline std::string contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (text.str().empty()) fprintf(stderr, "driver_tests: %s cannot be read\n", path), exit(2);
  return text.str();
}

inline void must(int result) {
  if (!result) return;
  fprintf(stderr, "a call that should pass gave %d\n", result);
  _exit(3);
}

inline void expect(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  _exit(4);
}

inline void* context() {
  void* made;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&made, 0));
  must(cuCtxSetCurrent(made));
  return made;
}

inline void* load(const std::string& image = module_image) {
  void* module;
  must(cuModuleLoadData(&module, image.data()));
  return module;
}

inline void* kernel(const char* name, void* module = load()) {
  void* function;
  must(cuModuleGetFunction(&function, module, name));
  return function;
}

inline void* stream(unsigned flags = NON_BLOCKING) {
  void* made;
  must(cuStreamCreate(&made, flags));
  return made;
}

inline Device floats(const std::vector<float>& values) {
  Device made;
  must(cuMemAlloc_v2(&made, values.size() * 4));
  must(cuMemcpyHtoD_v2(made, values.data(), values.size() * 4));
  return made;
}

inline std::vector<float> read(Device from, size_t count) {
  std::vector<float> values(count);
  must(cuMemcpyDtoH_v2(values.data(), from, count * 4));
  return values;
}

template <class... P>
int launch(void* function, int blocks, int threads, void* on, unsigned shared, P... parameters) {
  void* places[] = {&parameters..., nullptr};
  return cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared, on, places, nullptr);
}

struct Copy {
  Device from, to;
  int count;
};

// ---- Running a test -------------------------------------------------------------------------------------------------

inline int tests = 0, failures = 0;
inline const char* suite = "driver";

struct Outcome {
  int status;  // of the first process that failed
  std::string text;
};

// In processes of their own, told their number: an error stays for the rest of a process, and some end it.
inline Outcome run(const char* mode, int processes, const std::function<void(int)>& test) {
  int ends[2];
  if (pipe(ends) != 0) exit(2);
  fflush(stdout);
  std::vector<pid_t> children;
  for (int number = 0; number < processes; number++) {
    const pid_t child = fork();
    if (child == 0) {
      dup2(ends[1], 2);
      close(ends[0]);
      setenv("CUDA_EMULATOR", mode, 1);
      test(number);
      exit(0);
    }
    children.push_back(child);
  }
  close(ends[1]);
  Outcome outcome = {};
  char part[4096];
  for (ssize_t count; (count = ::read(ends[0], part, sizeof part)) > 0;) outcome.text.append(part, size_t(count));
  close(ends[0]);
  for (pid_t child : children) {
    int status;
    waitpid(child, &status, 0);
    if (outcome.status == 0) outcome.status = status;
  }
  return outcome;
}

inline void fail(const char* name, const char* mode, const Outcome& outcome) {
  failures++;
  printf("%s: %s (%s): status %d: %s\n", suite, name, mode, outcome.status, outcome.text.c_str());
}

// The test passes in every process, and the driver has nothing to say.
inline void passes(const char* name, const char* mode, int processes, const std::function<void(int)>& test) {
  tests++;
  const Outcome outcome = run(mode, processes, test);
  if (outcome.status != 0 || !outcome.text.empty()) fail(name, mode, outcome);
}

// The driver says `message`.
inline void says(const char* name, const char* mode, const char* message, int processes, const std::function<void(int)>& test) {
  tests++;
  const Outcome outcome = run(mode, processes, test);
  if (outcome.text.find(message) == std::string::npos) fail(name, mode, outcome);
}

constexpr const char* MODES[] = {"late", "first-late", "at-once"};

inline void accepted(const char* name, const std::function<void()>& test, std::vector<const char*> modes = {MODES, MODES + 3}) {
  for (const char* mode : modes) passes(name, mode, 1, [&](int) { test(); });
}

inline void said(const char* name, const char* message, const std::function<void()>& test) {
  says(name, "late", message, 1, [&](int) { test(); });
}

// In late mode and at once, in a context that is waited for.
inline void refused(const char* name, const char* message, const std::function<void()>& test) {
  for (const char* mode : {"late", "at-once"})
    says(name, mode, message, 1, [&](int) {
      context();
      test();
      cuCtxSynchronize();
    });
}

// The driver's first stream is another one where no module was loaded.
inline const std::string NO_MODULE;

// A context and a module with what is made for them, given back at the end.
class Session {
  std::vector<Device> buffers;
  std::vector<void*> streams, events;

 public:
  void* module = nullptr;

  explicit Session(const std::string& image = module_image) {
    context();
    if (!image.empty()) module = load(image);
  }
  ~Session() {
    for (void* event : events) must(cuEventDestroy_v2(event));
    for (void* stream : streams) must(cuStreamDestroy_v2(stream));
    for (Device buffer : buffers) must(cuMemFree_v2(buffer));
    if (module) must(cuModuleUnload(module));
    must(cuDevicePrimaryCtxRelease_v2(0));
  }
  Device own(Device buffer) { return buffers.push_back(buffer), buffer; }
  Device floats(const std::vector<float>& values) { return own(::floats(values)); }
  void* stream(unsigned flags = NON_BLOCKING) { return streams.emplace_back(::stream(flags)); }
  void* event() {
    void* made;
    must(cuEventCreate(&made, 2));
    return events.emplace_back(made);
  }
  void* kernel(const char* name) { return ::kernel(name, module); }
};

// A buffer of one number that was freed.
inline Device freed() {
  Device made = floats({1});
  must(cuMemFree_v2(made));
  return made;
}

// Memory in stream order.
inline Device taken(size_t bytes, void* on) {
  Device made;
  must(cuMemAllocAsync(&made, bytes, on));
  return made;
}

inline float read_async(Device from, void* on) {
  float value;
  must(cuMemcpyDtoHAsync_v2(&value, from, 4, on));
  return value;
}

// graph_tests.cpp
void test_graphs();
// product_tests.cpp
void test_products();
