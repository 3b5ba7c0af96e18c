// The emulated driver's own tests: what is right works in every mode, and each of its checks is made to fire once.
//
//   driver_tests MODULE PTX            the tests; faulty.cu as ./nvcc's cubin and PTX
//   driver_tests same FILE.ptx...      nvcc's own PTX takes what the emulated modules take
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "driver_calls.h"

namespace {

constexpr unsigned NON_BLOCKING = 1;
constexpr int SHARED_BYTES_MAX = 8, CARVEOUT = 9;

std::string module_image, module_ptx;

std::string contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (text.str().empty()) fprintf(stderr, "driver_tests: %s cannot be read\n", path), exit(2);
  return text.str();
}

void must(int result) {
  if (!result) return;
  fprintf(stderr, "a call that should pass gave %d\n", result);
  _exit(3);
}

void expect(bool good, const char* what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  _exit(4);
}

void* context() {
  void* made;
  must(cuInit(0));
  must(cuDevicePrimaryCtxRetain(&made, 0));
  must(cuCtxSetCurrent(made));
  return made;
}

void* load(const std::string& image = module_image) {
  void* module;
  must(cuModuleLoadData(&module, image.data()));
  return module;
}

void* kernel(const char* name, void* module = load()) {
  void* function;
  must(cuModuleGetFunction(&function, module, name));
  return function;
}

void* stream(unsigned flags = NON_BLOCKING) {
  void* made;
  must(cuStreamCreate(&made, flags));
  return made;
}

Device floats(const std::vector<float>& values) {
  Device made;
  must(cuMemAlloc_v2(&made, values.size() * 4));
  must(cuMemcpyHtoD_v2(made, values.data(), values.size() * 4));
  return made;
}

std::vector<float> read(Device from, size_t count) {
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

int tests = 0, failures = 0;

struct Outcome {
  int status;
  std::string text;
};

// In a process of its own: an error stays for the rest of a process, and some end it.
Outcome run(const char* mode, const std::function<void()>& test) {
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

void fail(const char* name, const char* mode, const Outcome& outcome) {
  failures++;
  printf("driver: %s (%s): status %d: %s\n", name, mode, outcome.status, outcome.text.c_str());
}

// The test passes, and the driver has nothing to say.
void accepted(const char* name, const std::function<void()>& test, std::vector<const char*> modes = {"late", "first-late", "at-once"}) {
  for (const char* mode : modes) {
    tests++;
    const Outcome outcome = run(mode, test);
    if (outcome.status != 0 || !outcome.text.empty()) fail(name, mode, outcome);
  }
}

// The driver says `message`, in late mode and at once.
void refused(const char* name, const char* message, const std::function<void()>& test) {
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

void clean(std::vector<Device> buffers, void* module) {
  for (Device buffer : buffers) must(cuMemFree_v2(buffer));
  must(cuModuleUnload(module));
  must(cuDevicePrimaryCtxRelease_v2(0));
}

// ---- What is right --------------------------------------------------------------------------------------------------

void test_accepted() {
  accepted("a launch, with a parameter that changes after it", [] {
    context();
    void* module = load();
    Device x = floats({1, 2, 3});
    int count = 3;
    void* places[] = {&x, &count};
    must(cuLaunchKernel(kernel("add_one", module), 1, 1, 1, 40, 1, 1, 0, nullptr, places, nullptr));
    count = 0;
    expect(read(x, 3) == std::vector<float>{2, 3, 4}, "x + 1");
    clean({x}, module);
  });
  accepted("a struct by value, from PTX", [] {
    context();
    void* module = load(module_ptx);
    Device from = floats({1, 2, 3}), to = floats({0, 0, 0});
    must(launch(kernel("copy", module), 1, 32, nullptr, 0, Copy{from, to, 3}));
    expect(read(to, 3) == std::vector<float>{1, 2, 3}, "the copy");
    clean({from, to}, module);
  });
  accepted("events order two streams, a host copy waits for its own", [] {
    context();
    void* module = load();
    void *first = stream(), *second = stream(), *event;
    must(cuEventCreate(&event, 2));
    Device x = floats({0});
    for (int i = 0; i < 3; i++) must(launch(kernel("add_one", module), 1, 1, first, 0, x, 1));
    must(cuEventRecord(event, first));
    must(cuStreamWaitEvent(second, event, 0));
    must(launch(kernel("add_one", module), 1, 1, second, 0, x, 1));
    float value;
    must(cuMemcpyDtoHAsync_v2(&value, x, 4, second));
    expect(value == 4, "four additions");
    must(cuEventDestroy_v2(event));
    must(cuStreamDestroy_v2(first));
    must(cuStreamDestroy_v2(second));
    clean({x}, module);
  });
  accepted("the default stream and a blocking one wait for each other", [] {
    context();
    void* module = load();
    void* blocking = stream(0);
    Device x = floats({0});
    must(launch(kernel("add_one", module), 1, 1, blocking, 0, x, 1));
    must(cuMemsetD8Async(x, 0, 4, nullptr));
    must(launch(kernel("add_one", module), 1, 1, blocking, 0, x, 1));
    must(cuStreamSynchronize(blocking));
    expect(read(x, 1)[0] == 1, "set between two additions");
    must(cuStreamDestroy_v2(blocking));
    clean({x}, module);
  });
  accepted("a host buffer may change after a copy from it", [] {
    context();
    void* module = load();
    void* on = stream();
    Device x;
    must(cuMemAllocAsync(&x, 4, on));
    float value = 7;
    must(cuMemcpyHtoDAsync_v2(x, &value, 4, on));
    value = 8;
    must(cuMemcpyDtoHAsync_v2(&value, x, 4, on));
    expect(value == 7, "what the copy read");
    must(cuMemFreeAsync(x, on));
    must(cuStreamDestroy_v2(on));
    clean({}, module);
  });
  accepted("fresh memory, device and shared, is no number", [] {
    context();
    void* module = load();
    Device fresh;
    must(cuMemAlloc_v2(&fresh, 8));
    expect(std::isnan(read(fresh, 2)[1]), "fresh device memory");
    Device out = floats({0, 0});
    must(launch(kernel("read_shared", module), 1, 2, nullptr, 8, out));
    expect(std::isnan(read(out, 2)[1]), "fresh shared memory");
    clean({fresh, out}, module);
  });
  accepted("two modules of one image", [] {
    context();
    void *first = load(), *second = load();
    void *a, *b;
    must(cuModuleGetFunction(&a, first, "bounded"));
    must(cuModuleGetFunction(&b, second, "bounded"));
    expect(a != b, "functions of their own");
    must(cuModuleUnload(first));
    must(launch(b, 1, 32, nullptr, 0));
    must(cuCtxSynchronize());
    clean({}, second);
  });
  accepted("attributes of a kernel", [] {
    context();
    void* module = load();
    void* function = kernel("bounded", module);
    int value;
    must(cuFuncGetAttribute(&value, 0, function));
    expect(value == 64, "launch bounds");
    must(cuFuncSetAttribute(function, SHARED_BYTES_MAX, 227 << 10));
    must(cuFuncSetAttribute(function, CARVEOUT, 100));
    must(launch(function, 1, 64, nullptr, 227 << 10));
    must(cuFuncGetAttribute(&value, CARVEOUT, function));
    expect(value == 100, "carve-out");
    clean({}, module);
  });
}

// ---- What late work shows -------------------------------------------------------------------------------------------

// A host read of page-locked memory without waiting for the copy to it.
float unsynchronised() {
  context();
  void* on = stream();
  Device x = floats({3});
  void* memory;
  must(cuMemHostAlloc(&memory, 4, 0));
  must(cuMemcpyDtoHAsync_v2(memory, x, 4, on));
  float seen;
  memcpy(&seen, memory, 4);
  must(cuStreamSynchronize(on));
  expect(*static_cast<float*>(memory) == 3, "the copy after waiting");
  must(cuStreamDestroy_v2(on));
  must(cuMemFreeHost(memory));
  clean({x}, load());
  return seen;
}

// Two streams without an event between them: the second reads what the first wrote, or not.
float unordered() {
  context();
  void *module = load(), *first = stream(), *second = stream();
  Device x = floats({3});
  must(launch(kernel("add_one", module), 1, 1, first, 0, x, 1));
  float seen;
  must(cuMemcpyDtoHAsync_v2(&seen, x, 4, second));
  must(cuStreamDestroy_v2(first));
  must(cuStreamDestroy_v2(second));
  clean({x}, module);
  return seen;
}

void test_late() {
  accepted("late work shows a missing wait", [] { expect(std::isnan(unsynchronised()), "not there yet"); }, {"late", "first-late"});
  accepted("work at once hides a missing wait", [] { expect(unsynchronised() == 3, "there"); }, {"at-once"});
  accepted("late work shows a missing event", [] { expect(unordered() == 3, "not yet added"); }, {"late"});
  accepted("work at once hides a missing event", [] { expect(unordered() == 4, "added"); }, {"at-once"});
  tests++;
  const Outcome outcome = run("late", [] {
    context();
    void *first = stream(), *second = stream();
    Device x;
    must(cuMemAllocAsync(&x, 4, first));
    cuMemsetD8Async(x, 0, 4, second);
    cuStreamSynchronize(second);
  });
  if (outcome.text.find("whose allocation has not had its turn") == std::string::npos) fail("use before allocation", "late", outcome);
}

// ---- What is wrong --------------------------------------------------------------------------------------------------

void test_refused_memory() {
  refused("read past the end", "read_at: a read in block (0,0,0), thread (5,0,0)", [] {
    launch(kernel("read_at"), 1, 32, nullptr, 0, floats({1, 2, 3, 4}), floats({0}), int64_t(4));
  });
  refused("what byte it was", "is byte 16 of a buffer of 16 bytes in use", [] {
    launch(kernel("read_at"), 1, 32, nullptr, 0, floats({1, 2, 3, 4}), floats({0}), int64_t(4));
  });
  refused("write past the end, in another block", "write_at: a write in block (1,0,0), thread (5,0,0)", [] {
    launch(kernel("write_at"), 2, 32, nullptr, 0, floats({1, 2, 3, 4}), int64_t(16));
  });
  refused("write within what rounds a buffer up", "wrote past the end of a buffer of 4 bytes, at byte 6", [] {
    Device x = floats({1});
    launch(kernel("write_at"), 2, 32, nullptr, 0, x, int64_t(6));
    cuMemFree_v2(x);
  });
  refused("misaligned access", "read_at: a misaligned access in block (0,0,0), thread (5,0,0)", [] {
    launch(kernel("read_at"), 1, 32, nullptr, 0, floats({1, 2}) + 2, floats({0}), int64_t(0));
  });
  refused("freed buffer as parameter", "add_one: parameter 0: ", [] {
    Device x = floats({1});
    must(cuMemFree_v2(x));
    launch(kernel("add_one"), 1, 1, nullptr, 0, x, 1);
  });
  refused("freed buffer in a struct", "copy: parameter 0, field from: ", [] {
    Device x = floats({1});
    must(cuMemFree_v2(x));
    launch(kernel("copy"), 1, 1, nullptr, 0, Copy{x, floats({0}), 1});
  });
  refused("host pointer as parameter", "add_one: parameter 0: ", [] {
    float x = 1;
    launch(kernel("add_one"), 1, 1, nullptr, 0, &x, 1);
  });
  refused("host pointer in a struct", "is no address of device memory", [] {
    static float x = 1;
    launch(kernel("copy"), 1, 1, nullptr, 0, Copy{floats({1}), reinterpret_cast<Device>(&x), 1});
  });
  refused("freed in stream order before use", "freed before", [] {
    Device x = floats({1});
    must(cuMemFreeAsync(x, nullptr));
    launch(kernel("add_one"), 1, 1, nullptr, 0, x, 1);
  });
  refused("freed twice", "cuMemFree: ", [] {
    Device x = floats({1});
    must(cuMemFree_v2(x));
    cuMemFree_v2(x);
  });
  refused("free of what is no buffer", "cuMemFreeAsync: ", [] { cuMemFreeAsync(floats({1}) + 2, nullptr); });
  refused("copy past the end", "cuMemcpyHtoD to, 8 bytes: ", [] {
    float values[2] = {};
    cuMemcpyHtoD_v2(floats({1}), values, 8);
  });
  refused("copy between buffers past the end", "cuMemcpyDtoDAsync from, 8 bytes: ", [] {
    cuMemcpyDtoDAsync_v2(floats({1, 2}), floats({1}), 8, nullptr);
  });
  refused("fill past the end", "cuMemsetD8Async, 5 bytes: ", [] { cuMemsetD8Async(floats({1}), 0, 5, nullptr); });
  refused("copy to the host at a device address", "the host's address", [] {
    cuMemcpyDtoH_v2(reinterpret_cast<void*>(floats({1})), floats({1}), 4);
  });
  refused("the host touches device memory", "outside any kernel: a read by the host", [] {
    Device x = floats({1});
    must(cuMemFree_v2(x));
    printf("%f", *reinterpret_cast<volatile float*>(x));
  });
  refused("page-locked memory freed twice", "is not page-locked memory", [] {
    void* memory;
    must(cuMemHostAlloc(&memory, 4, 0));
    must(cuMemFreeHost(memory));
    cuMemFreeHost(memory);
  });
  refused("an empty allocation", "cuMemAlloc: of no bytes", [] {
    Device x;
    cuMemAlloc_v2(&x, 0);
  });
}

void test_refused_launches() {
  refused("launch bounds", "bounded: blocks of 96 threads, its launch bounds are 64", [] { launch(kernel("bounded"), 1, 96, nullptr, 0); });
  refused("too many threads", "add_one: blocks of 1056x1x1 threads", [] { launch(kernel("add_one"), 1, 1056, nullptr, 0, floats({1}), 1); });
  refused("an empty grid", "add_one: a grid of 0x1x1 blocks", [] { launch(kernel("add_one"), 0, 1, nullptr, 0, floats({1}), 1); });
  refused("shared memory not asked for", "bounded: 49153 bytes of dynamic shared memory, it may have 49152", [] {
    launch(kernel("bounded"), 1, 32, nullptr, 49153);
  });
  refused("more shared memory than there is", "bounded: 232449 bytes of dynamic shared memory", [] {
    cuFuncSetAttribute(kernel("bounded"), SHARED_BYTES_MAX, (227 << 10) + 1);
  });
  refused("a carve-out that is none", "a carve-out of 101 percent", [] { cuFuncSetAttribute(kernel("bounded"), CARVEOUT, 101); });
  refused("a rule of the machine", "diverge: block (0,0,0), thread ", [] { launch(kernel("diverge"), 1, 64, nullptr, 0); });
  refused("a kernel of an unloaded module", "no such kernel, or its module was unloaded", [] {
    void* module = load();
    void* function = kernel("bounded", module);
    must(cuModuleUnload(module));
    launch(function, 1, 32, nullptr, 0);
  });
  refused("a kernel that is not there", "faulty.cu has no kernel nothing", [] {
    void* function;
    cuModuleGetFunction(&function, load(), "nothing");
  });
  refused("an error stays", "stays: 700", [] {
    Device x = floats({1});
    cuMemsetD8Async(x, 0, 5, nullptr);
    cuCtxSynchronize();
    Device y;
    fprintf(stderr, "stays: %d\n", cuMemAlloc_v2(&y, 4));
  });
}

void test_refused_handles() {
  refused("a destroyed stream", "no such stream, or it was destroyed", [] {
    void* on = stream();
    must(cuStreamDestroy_v2(on));
    cuStreamSynchronize(on);
  });
  refused("a destroyed event", "no such event, or it was destroyed", [] {
    void* event;
    must(cuEventCreate(&event, 0));
    must(cuEventDestroy_v2(event));
    cuEventRecord(event, nullptr);
  });
  refused("time between events without any", "of an event without timing, or never recorded", [] {
    void* event;
    must(cuEventCreate(&event, 0));
    float time;
    cuEventElapsedTime_v2(&time, event, event);
  });
  refused("no context on a thread", "cuMemAlloc_v2: no context is current on this OS thread", [] {
    std::thread([] {
      Device x;
      cuMemAlloc_v2(&x, 4);
    }).join();
  });
  refused("a default stream without a context", "cuStreamSynchronize: no context is current", [] {
    std::thread([] { cuStreamSynchronize(reinterpret_cast<void*>(2)); }).join();
  });
  refused("a released context", "the context was released", [] {
    must(cuDevicePrimaryCtxRelease_v2(0));
    cuCtxSynchronize();
  });
  refused("a module unloaded twice", "or it was unloaded before", [] {
    void* module = load();
    must(cuModuleUnload(module));
    cuModuleUnload(module);
  });
}

void test_refused_images() {
  void* module;
  refused("a file that is not emulated", "the kernels of conv.cu are not emulated", [&] { cuModuleLoadData(&module, "// not emulated: conv.cu\n"); });
  refused("PTX of a module that is gone", "cannot open shared object file", [&] { cuModuleLoadData(&module, "// emulated: gone.so\n"); });
  refused("PTX of an unknown kernel", "no module has kernel unknown", [&] { cuModuleLoadData(&module, ".visible .entry unknown(\n)\n{\n}\n"); });
  refused("PTX with another parameter size", "bounded", [&] {
    cuModuleLoadData(&module, ".visible .entry bounded(\n\t.param .u64 bounded_param_0\n)\n.maxntid 64\n{\n}\n");
  });
  refused("PTX with other launch bounds", "bounded has launch bounds of 128 in the PTX, of 64 here", [&] {
    cuModuleLoadData(&module, ".visible .entry bounded(\n)\n.maxntid 128\n{\n}\n");
  });
  accepted("PTX of nvcc's form that agrees", [&] {
    context();
    void* real;
    must(cuModuleLoadData(&real, "//\n.target sm_90a\n\n.visible .entry copy(\n\t.param .align 8 .b8 copy_param_0[24]\n)\n{\n}\n"
                                 "\n.visible .entry bounded()\n.maxntid 64, 1, 1\n.minnctapersm 1\n{\n}\n"));
    clean({}, real);
  });
  refused("what is no image", "neither PTX nor a module", [&] { cuModuleLoadData(&module, "nonsense"); });
  refused("a call that is not emulated", "cuGraphLaunch is not emulated", [] { cuGraphLaunch(nullptr, nullptr); });
  refused("a product that is not emulated", "cublasSgemv_v2 is not emulated", [] { cublasSgemv_v2(); });
  refused("an attribute that is not emulated", "device attribute 9999 is not emulated", [] {
    int value;
    cuDeviceGetAttribute(&value, 9999, 0);
  });
  tests++;
  setenv("CUDA_EMULATOR_REFUSES_CUBINS", "1", 1);
  const Outcome outcome = run("late", [&] {
    context();
    expect(cuModuleLoadData(&module, module_image.data()) == 209, "no binary for this GPU");
    must(cuModuleLoadData(&module, module_ptx.data()));
    must(cuModuleUnload(module));
  });
  unsetenv("CUDA_EMULATOR_REFUSES_CUBINS");
  if (outcome.status) fail("a refused cubin", "late", outcome);
}

// 2x3 by 3x2, column by column.
int product(Device a, Device b, Device c, int lda) {
  void* blas;
  must(cublasCreate_v2(&blas));
  const float one = 1, zero = 0;
  return cublasGemmStridedBatchedEx(blas, 0, 0, 2, 2, 3, &one, reinterpret_cast<void*>(a), 0, lda, 0, reinterpret_cast<void*>(b), 0,
                                    3, 0, &zero, reinterpret_cast<void*>(c), 0, 2, 0, 1, 68, 0);
}

void test_products() {
  accepted("a product", [] {
    context();
    Device a = floats({1, 2, 3, 4, 5, 6}), b = floats({1, 0, 1, 0, 1, 0}), c = floats({0, 0, 0, 0});
    must(product(a, b, c, 2));
    expect(read(c, 4) == std::vector<float>{6, 8, 3, 4}, "its elements");
    clean({a, b, c}, load());
  });
  refused("a leading dimension too small", "leading dimensions 1, 3, 2", [] { product(floats({1}), floats({1}), floats({1}), 1); });
  refused("a product past the end", "cuBLAS product 2x2x3, batch 1, b, 24 bytes: ", [] {
    product(floats({1, 2, 3, 4, 5, 6}), floats({1, 0, 1, 0, 1}), floats({0, 0, 0, 0}), 2);
  });
}

// The product that cuBLASLt is asked for: a weight of 2x3 by 3 numbers of each of so many rows, to bf16 or f32. Its sums are 0 in the
// order of k and 16 where they begin elsewhere, with 20 bits of each.
struct Light {
  struct Proposal {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
  };
  int rows;
  void *handle, *described, *of_weight, *of_x, *of_y, *preference;
  Device weight, x, y;
  Proposal proposals[8];

  explicit Light(int rows, int type = 14, int leading = 2, int k = 3) : rows(rows) {
    must(cublasLtCreate(&handle));
    must(cublasLtMatmulDescCreate(&described, 68, 0));
    must(cublasLtMatrixLayoutCreate(&of_weight, 14, 2, 3, leading));
    must(cublasLtMatrixLayoutCreate(&of_x, 14, k, rows, k));
    must(cublasLtMatrixLayoutCreate(&of_y, type, 2, rows, 2));
    must(cublasLtMatmulPreferenceCreate(&preference));
    const uint32_t alignment = 16;
    for (int key : {5, 6, 7, 8}) must(cublasLtMatmulPreferenceSetAttribute(preference, key, &alignment, sizeof alignment));
    std::vector<uint16_t> numbers;
    for (int i = 0; i < std::max(rows, 1); i++) numbers.insert(numbers.end(), {0x4580, 0x3f80, 0xc580});
    x = halves(numbers);
    weight = halves({0x4580, 0x4580, 0x3f80, 0x3f80, 0x4580, 0x4580});
    y = floats(std::vector<float>(2 * std::max(rows, 1)));
  }
  static Device halves(const std::vector<uint16_t>& values) {
    Device made;
    must(cuMemAlloc_v2(&made, values.size() * 2));
    must(cuMemcpyHtoD_v2(made, values.data(), values.size() * 2));
    return made;
  }
  int set(int attribute, const void* from, size_t bytes) { return cublasLtMatmulDescSetAttribute(described, attribute, from, bytes); }
  int add(Device bias) {
    const int epilogue = 4;
    set(7, &epilogue, sizeof epilogue);
    return set(8, &bias, sizeof bias);
  }
  int propose() {
    int count = 0;
    cublasLtMatmulAlgoGetHeuristic(handle, described, of_weight, of_x, of_y, of_y, preference, 8, proposals, &count);
    return count;
  }
  int multiply(const void* algorithm) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, described, &one, weight, of_weight, x, of_x, &zero, y, of_y, y, of_y, algorithm, nullptr, 0, nullptr);
  }
  // By the algorithm of this number.
  int multiply(int which) {
    must(propose() != 3);
    return multiply(proposals[which].algorithm);
  }
  void end() {
    must(cublasLtMatmulPreferenceDestroy(preference));
    for (void* layout : {of_weight, of_x, of_y}) must(cublasLtMatrixLayoutDestroy(layout));
    must(cublasLtMatmulDescDestroy(described));
    must(cublasLtDestroy(handle));
  }
};

void test_light_products() {
  const auto sum = [](int rows, int which) {
    Light light(rows, 0);
    must(light.multiply(which));
    const float seen = read(light.y, 1)[0];
    light.end();
    clean({light.weight, light.x, light.y}, load());
    return seen;
  };
  accepted("an algorithm with the order of k at every M", [&] {
    context();
    expect(sum(1, 2) == 0, "one row");
    context();
    expect(sum(1025, 2) == 0, "many rows");
  });
  accepted("an algorithm whose order M chooses", [&] {
    context();
    expect(sum(1, 1) == 16, "one row");
    context();
    expect(sum(3, 1) == 0, "three rows");
  });
  accepted("an algorithm whose order M chooses where it is large", [&] {
    context();
    expect(sum(1, 0) == 0, "one row");
    context();
    expect(sum(1025, 0) == 16, "many rows");
  });
  accepted("every order chosen by M", [&] {
    setenv("CUDA_EMULATOR_CUBLAS", "by-m", 1);
    context();
    expect(sum(1, 2) == 16, "one row of cuBLASLt's");
    context();
    Device a = floats({4096, 4096, 1, 1, 4096, 4096}), b = floats({4096, 1, -4096, 4096, 1, -4096}), c = floats({0, 0, 0, 0});
    must(product(a, b, c, 2));
    expect(read(c, 1)[0] == 1, "two of cuBLAS's");
    clean({a, b, c}, load());
  });
  accepted("a bias, and layouts that end before the launch does", [] {
    context();
    Light light(3, 0);
    Device bias = floats({0.5, -2});
    must(light.add(bias));
    must(light.multiply(2));
    light.end();
    expect(read(light.y, 6) == std::vector<float>{0.5, -2, 0.5, -2, 0.5, -2}, "its elements");
    clean({light.weight, light.x, light.y, bias}, load());
  });
  accepted("no algorithm for operands of which nothing is known", [] {
    context();
    Light light(1);
    void* unknown;
    must(cublasLtMatmulPreferenceCreate(&unknown));
    std::swap(unknown, light.preference);
    const uint32_t little = 2;
    must(cublasLtMatmulPreferenceSetAttribute(light.preference, 5, &little, sizeof little));
    expect(light.propose() == 0, "none");
    must(cublasLtMatmulPreferenceDestroy(unknown));
    light.end();
    clean({light.weight, light.x, light.y}, load());
  });
  refused("an algorithm of no heuristic", "cublasLtMatmul: no algorithm of its heuristic", [] {
    Light light(1);
    const uint64_t other[8] = {};
    light.multiply(other);
  });
  refused("no algorithm", "cublasLtMatmul: no algorithm of its heuristic", [] { Light(1).multiply(nullptr); });
  refused("a weight past the end", "cuBLASLt product 2x1x3 by algorithm 2, a, 12 bytes: ", [] {
    Light light(1);
    light.weight += 16;
    light.multiply(2);
  });
  refused("rows past the end", "cuBLASLt product 2x8x3 by algorithm 2, b, 48 bytes: ", [] {
    Light light(8);
    light.x = Light(1).x;
    light.multiply(2);
  });
  refused("a result past the end", "cuBLASLt product 2x8x3 by algorithm 2, c, 32 bytes: ", [] {
    Light light(8);
    light.y = Light(1).y;
    light.multiply(2);
  });
  refused("a bias past the end", "cuBLASLt product 2x1x3 by algorithm 2, bias, 8 bytes: ", [] {
    Light light(1, 0);
    light.add(floats({1}));
    light.multiply(2);
  });
  refused("a bias that is not there", "cublasLtMatmul: no bias", [] {
    Light light(1, 0);
    light.add(0);
    light.multiply(2);
  });
  refused("a bias to bf16", "types 14, 14, 14, 14 with epilogue 4 are not emulated", [] {
    Light light(1);
    light.add(floats({1, 2}));
    light.propose();
  });
  refused("a misaligned operand", "cublasLtMatmul: an address that is no multiple of 16", [] {
    Light light(8);
    light.x += 6;
    light.multiply(2);
  });
  refused("another type", "types 14, 14, 1, 1 with epilogue 1 are not emulated", [] { Light(1, 1).propose(); });
  refused("a leading dimension too small, of cuBLASLt", "a matrix of 2x3 with leading dimension 1", [] { Light(1, 14, 1).propose(); });
  refused("sizes that do not meet", "2x3 by 4x1 to 2x1", [] { Light(1, 14, 2, 4).propose(); });
  refused("no rows", "a matrix of 3x0 with leading dimension 3", [] { Light(0).propose(); });
  refused("a destroyed layout", "cublasLtMatmulAlgoGetHeuristic: no such object, or it was destroyed", [] {
    Light light(1);
    must(cublasLtMatrixLayoutDestroy(light.of_x));
    light.propose();
  });
  refused("a layout destroyed twice", "cublasLtMatrixLayoutDestroy: no such object, or it was destroyed", [] {
    Light light(1);
    must(cublasLtMatrixLayoutDestroy(light.of_x));
    cublasLtMatrixLayoutDestroy(light.of_x);
  });
  refused("an attribute of a product that is not emulated", "cublasLtMatmulDescSetAttribute: attribute 3 is not emulated", [] {
    const int transposed = 1;
    Light(1).set(3, &transposed, sizeof transposed);
  });
  refused("an attribute of another size", "cublasLtMatmulDescSetAttribute: attribute 7 of 8 bytes, not 4", [] {
    const uint64_t epilogue = 1;
    Light(1).set(7, &epilogue, sizeof epilogue);
  });
  refused("a preference that is not emulated", "cublasLtMatmulPreferenceSetAttribute: attribute 0 is not emulated", [] {
    const int mode = 0;
    cublasLtMatmulPreferenceSetAttribute(Light(1).preference, 0, &mode, sizeof mode);
  });
  refused("sums of another type", "cublasLtMatmulDescCreate: compute type 64, scale type 0 are not emulated", [] {
    void* described;
    cublasLtMatmulDescCreate(&described, 64, 0);
  });
  refused("a call of cuBLASLt that is not emulated", "cublasLtMatrixTransform is not emulated", [] { cublasLtMatrixTransform(); });
}

void test_leaks() {
  const auto leaves = [](const char* name, const char* message, const std::function<void()>& test) {
    tests++;
    const Outcome outcome = run("late", test);
    if (outcome.text.find(message) == std::string::npos) fail(name, "late", outcome);
  };
  leaves("buffers", "leaked at exit: 2 buffers, 12 bytes", [] {
    context();
    floats({1});
    floats({1, 2});
  });
  leaves("page-locked memory", "leaked at exit: 1 page-locked host buffers", [] {
    context();
    void* memory;
    must(cuMemHostAlloc(&memory, 4, 0));
  });
  leaves("a module", "leaked at exit: the module of faulty.cu", [] {
    context();
    load();
  });
}

int same(int count, char** files) {
  context();
  for (int i = 0; i < count; i++) {
    void* module;
    if (cuModuleLoadData(&module, contents(files[i]).c_str()) != 0) failures++;
    else must(cuModuleUnload(module));
  }
  printf("driver: %d of %d PTX files of nvcc take what the emulated kernels take\n", count - failures, count);
  return failures != 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 2 && !strcmp(arguments[1], "same")) return same(count - 2, arguments + 2);
  if (count != 3) return fprintf(stderr, "usage: driver_tests MODULE PTX | same FILE.ptx...\n"), 2;
  module_image = contents(arguments[1]);
  module_ptx = contents(arguments[2]);
  test_accepted();
  test_late();
  test_refused_memory();
  test_refused_launches();
  test_refused_handles();
  test_refused_images();
  test_products();
  test_light_products();
  test_leaks();
  printf("driver: %d tests, %d failed\n", tests, failures);
  return failures != 0;
}
