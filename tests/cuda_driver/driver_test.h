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

struct Outcome {
  int status;
  std::string text;
};

// In a process of its own: an error stays for the rest of a process, and some end it.
inline Outcome run(const char* mode, const std::function<void()>& test) {
  int ends[2];
  if (pipe(ends) != 0) exit(2);
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    close(ends[0]);
    setenv("CUDA_EMULATOR", mode, 1);
    test();
    exit(0);
  }
  close(ends[1]);
  Outcome outcome;
  char part[4096];
  for (ssize_t count; (count = ::read(ends[0], part, sizeof part)) > 0;) outcome.text.append(part, size_t(count));
  close(ends[0]);
  waitpid(child, &outcome.status, 0);
  return outcome;
}

inline void fail(const char* name, const char* mode, const Outcome& outcome) {
  failures++;
  printf("driver: %s (%s): status %d: %s\n", name, mode, outcome.status, outcome.text.c_str());
}

// The test passes, and the driver has nothing to say.
inline void accepted(const char* name, const std::function<void()>& test, std::vector<const char*> modes = {"late", "first-late", "at-once"}) {
  for (const char* mode : modes) {
    tests++;
    const Outcome outcome = run(mode, test);
    if (outcome.status != 0 || !outcome.text.empty()) fail(name, mode, outcome);
  }
}

// The driver says `message`, in late mode and at once.
inline void refused(const char* name, const char* message, const std::function<void()>& test) {
  for (const char* mode : {"late", "at-once"}) {
    tests++;
    const Outcome outcome = run(mode, [&] {
      context();
      test();
      cuCtxSynchronize();
    });
    if (outcome.text.find(message) == std::string::npos) fail(name, mode, outcome);
  }
}

inline void clean(std::vector<Device> buffers, void* module) {
  for (Device buffer : buffers) must(cuMemFree_v2(buffer));
  must(cuModuleUnload(module));
  must(cuDevicePrimaryCtxRelease_v2(0));
}

// graph_tests.cpp
void test_graphs();
// product_tests.cpp
void test_products();
