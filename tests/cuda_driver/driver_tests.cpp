// The emulated driver's own tests: what is right works in every mode, and each of its checks is made to fire once.
//
//   driver_tests MODULE PTX            the tests; faulty.cu as ./nvcc's cubin and PTX
//   driver_tests same FILE.ptx...      nvcc's own PTX takes what the emulated modules take
#include <cmath>
#include <thread>

#include "driver_test.h"

namespace {

// ---- What is right --------------------------------------------------------------------------------------------------

void test_accepted() {
  accepted("a launch, with a parameter that changes after it", [] {
    Session s;
    Device x = s.floats({1, 2, 3});
    int count = 3;
    void* places[] = {&x, &count};
    must(cuLaunchKernel(s.kernel("add_one"), 1, 1, 1, 40, 1, 1, 0, nullptr, places, nullptr));
    count = 0;
    expect(read(x, 3) == std::vector<float>{2, 3, 4}, "x + 1");
  });
  accepted("a struct by value, from PTX", [] {
    Session s(module_ptx);
    Device from = s.floats({1, 2, 3}), to = s.floats({0, 0, 0});
    must(launch(s.kernel("copy"), 1, 32, nullptr, 0, Copy{from, to, 3}));
    expect(read(to, 3) == std::vector<float>{1, 2, 3}, "the copy");
  });
  accepted("events order two streams, a host copy waits for its own", [] {
    Session s;
    void *first = s.stream(), *second = s.stream(), *event = s.event();
    Device x = s.floats({0});
    for (int i = 0; i < 3; i++) must(launch(s.kernel("add_one"), 1, 1, first, 0, x, 1));
    must(cuEventRecord(event, first));
    must(cuStreamWaitEvent(second, event, 0));
    must(launch(s.kernel("add_one"), 1, 1, second, 0, x, 1));
    expect(read_async(x, second) == 4, "four additions");
  });
  accepted("the default stream and a blocking one wait for each other", [] {
    Session s;
    void* blocking = s.stream(0);
    Device x = s.floats({0});
    must(launch(s.kernel("add_one"), 1, 1, blocking, 0, x, 1));
    must(cuMemsetD8Async(x, 0, 4, nullptr));
    must(launch(s.kernel("add_one"), 1, 1, blocking, 0, x, 1));
    must(cuStreamSynchronize(blocking));
    expect(read(x, 1)[0] == 1, "set between two additions");
  });
  accepted("a host buffer may change after a copy from it", [] {
    Session s;
    void* on = s.stream();
    Device x = taken(4, on);
    float value = 7;
    must(cuMemcpyHtoDAsync_v2(x, &value, 4, on));
    value = 8;
    expect(read_async(x, on) == 7, "what the copy read");
    must(cuMemFreeAsync(x, on));
  });
  accepted("fresh memory, device and shared, is no number", [] {
    Session s;
    Device fresh;
    must(cuMemAlloc_v2(&fresh, 8));
    expect(std::isnan(read(s.own(fresh), 2)[1]), "fresh device memory");
    Device out = s.floats({0, 0});
    must(launch(s.kernel("read_shared"), 1, 2, nullptr, 8, out));
    expect(std::isnan(read(out, 2)[1]), "fresh shared memory");
  });
  accepted("two modules of one image", [] {
    Session s;
    void *second = load(), *function = kernel("bounded", second);
    expect(s.kernel("bounded") != function, "functions of their own");
    must(cuModuleUnload(s.module));
    must(launch(function, 1, 32, nullptr, 0));
    must(cuCtxSynchronize());
    s.module = second;
  });
  accepted("attributes of a kernel", [] {
    Session s;
    void* function = s.kernel("bounded");
    int value;
    must(cuFuncGetAttribute(&value, 0, function));
    expect(value == 64, "launch bounds");
    must(cuFuncSetAttribute(function, SHARED_BYTES_MAX, 227 << 10));
    must(cuFuncSetAttribute(function, CARVEOUT, 100));
    must(launch(function, 1, 64, nullptr, 227 << 10));
    must(cuFuncGetAttribute(&value, CARVEOUT, function));
    expect(value == 100, "carve-out");
  });
}

// ---- The memory pool ------------------------------------------------------------------------------------------------

enum { RELEASE_THRESHOLD = 4, RESERVED, RESERVED_HIGH, USED, USED_HIGH };
constexpr uint64_t MIB = 1 << 20, KEPT_ALL = UINT64_MAX;

void* pool() {
  void* found;
  must(cuDeviceGetDefaultMemPool(&found, 0));
  return found;
}

uint64_t held(int attribute) {
  uint64_t value;
  must(cuMemPoolGetAttribute(pool(), attribute, &value));
  return value;
}

void set(int attribute, uint64_t value) { must(cuMemPoolSetAttribute(pool(), attribute, &value)); }

void test_pool() {
  accepted("a wait gives back what is free beyond the threshold", [] {
    Session s(NO_MODULE);
    void* on = s.stream();
    for (uint64_t threshold : {uint64_t(0), KEPT_ALL}) {
      set(RELEASE_THRESHOLD, threshold);
      must(cuMemFreeAsync(taken(3 * MIB, on), on));
      expect(held(RESERVED) == 4 * MIB && held(USED) == 0, "reserved until the wait");
      must(cuStreamSynchronize(on));
      expect(held(RESERVED) == (threshold ? 4 * MIB : 0), "after the wait");
    }
    size_t free, total;
    must(cuMemGetInfo_v2(&free, &total));
    expect(total - free == 4 * MIB, "what is kept is not free");
  });
  accepted("the smallest hole that suffices, and holes that adjoin are one", [] {
    Session s(NO_MODULE);
    void* on = s.stream();
    set(RELEASE_THRESHOLD, KEPT_ALL);
    Device blocks[4];
    const size_t bytes[] = {MIB, MIB / 2, MIB / 4, MIB / 4};
    const auto free = [&](std::vector<int> which) {
      for (int i : which) must(cuMemFreeAsync(blocks[i], on));
    };
    for (int i = 0; i < 4; i++) blocks[i] = taken(bytes[i], on);
    expect(held(RESERVED) == 2 * MIB && held(USED) == 2 * MIB, "all of it");
    free({0, 2});
    blocks[2] = taken(MIB / 4, on);
    blocks[0] = taken(MIB, on);
    expect(held(RESERVED) == 2 * MIB, "the small one in the small hole, the large one in the large");
    free({0, 1});
    blocks[0] = taken(MIB + MIB / 2, on);
    expect(held(RESERVED) == 2 * MIB, "two holes as one");
    free({2});
    blocks[1] = taken(MIB / 4 + 1, on);
    expect(held(RESERVED) == 4 * MIB, "a hole too small by a byte");
    free({0, 1, 3});
  });
  accepted("another stream waits for the free's turn", [] {
    Session s(NO_MODULE);
    void *first = s.stream(), *second = s.stream();
    set(RELEASE_THRESHOLD, KEPT_ALL);
    must(cuMemFreeAsync(taken(2 * MIB, first), first));
    Device x = taken(2 * MIB, second);
    expect(held(RESERVED) == 4 * MIB, "not yet had its turn");
    must(cuStreamSynchronize(first));
    Device y = taken(2 * MIB, second);
    expect(held(RESERVED) == 4 * MIB, "had its turn");
    for (Device buffer : {x, y}) must(cuMemFreeAsync(buffer, second));
  }, {"late"});
  accepted("high marks stay until they are reset", [] {
    Session s(NO_MODULE);
    void* on = s.stream();
    must(cuMemFreeAsync(taken(2 * MIB, on), on));
    must(cuStreamSynchronize(on));
    expect(held(RESERVED_HIGH) == 2 * MIB && held(USED_HIGH) == 2 * MIB && held(RESERVED) == 0, "high marks");
    set(RESERVED_HIGH, 0);
    set(USED_HIGH, 0);
    expect(held(RESERVED_HIGH) == 0 && held(USED_HIGH) == 0, "reset");
  });
  accepted("what is kept goes back when room is wanted", [] {
    setenv("CUDA_EMULATOR_MEMORY_MIB", "4", 1);
    Session s(NO_MODULE);
    void* on = s.stream();
    set(RELEASE_THRESHOLD, KEPT_ALL);
    must(cuMemFreeAsync(taken(3 * MIB, on), on));
    Device x, y;
    must(cuMemAlloc_v2(&x, 2 * MIB));
    s.own(x);
    expect(held(RESERVED) == 0, "given back");
    expect(cuMemAllocAsync(&y, 3 * MIB, on) == 2, "no room beside it");
  });
  refused("a high mark is only reset", "cuMemPoolSetAttribute: attribute 6 to 1", [] {
    uint64_t value = 1;
    cuMemPoolSetAttribute(pool(), RESERVED_HIGH, &value);
  });
}

// ---- What late work shows -------------------------------------------------------------------------------------------

// A host read of page-locked memory without waiting for the copy to it.
float unsynchronised() {
  Session s(NO_MODULE);
  void* on = s.stream();
  Device x = s.floats({3});
  void* memory;
  must(cuMemHostAlloc(&memory, 4, 0));
  must(cuMemcpyDtoHAsync_v2(memory, x, 4, on));
  float seen;
  memcpy(&seen, memory, 4);
  must(cuStreamSynchronize(on));
  expect(*static_cast<float*>(memory) == 3, "the copy after waiting");
  must(cuMemFreeHost(memory));
  return seen;
}

// Two streams without an event between them: the second reads what the first wrote, or not.
float unordered() {
  Session s;
  void *first = s.stream(), *second = s.stream();
  Device x = s.floats({3});
  must(launch(s.kernel("add_one"), 1, 1, first, 0, x, 1));
  return read_async(x, second);
}

void test_late() {
  accepted("late work shows a missing wait", [] { expect(std::isnan(unsynchronised()), "not there yet"); }, {"late", "first-late"});
  accepted("work at once hides a missing wait", [] { expect(unsynchronised() == 3, "there"); }, {"at-once"});
  accepted("late work shows a missing event", [] { expect(unordered() == 3, "not yet added"); }, {"late"});
  accepted("work at once hides a missing event", [] { expect(unordered() == 4, "added"); }, {"at-once"});
  said("use before allocation", "whose allocation has not had its turn", [] {
    context();
    void *first = stream(), *second = stream();
    cuMemsetD8Async(taken(4, first), 0, 4, second);
    cuStreamSynchronize(second);
  });
}

// ---- What is wrong --------------------------------------------------------------------------------------------------

// Launches a kernel of a module of its own: one block, no shared memory.
template <class... P>
int start(const char* name, int threads, P... parameters) {
  return launch(kernel(name), 1, threads, nullptr, 0, parameters...);
}

void test_refused_memory() {
  refused("read past the end", "read_at: a read in block (0,0,0), thread (5,0,0)",
          [] { start("read_at", 32, floats({1, 2, 3, 4}), floats({0}), int64_t(4)); });
  refused("what byte it was", "is byte 16 of a buffer of 16 bytes in use",
          [] { start("read_at", 32, floats({1, 2, 3, 4}), floats({0}), int64_t(4)); });
  refused("write past the end, in another block", "write_at: a write in block (1,0,0), thread (5,0,0)",
          [] { launch(kernel("write_at"), 2, 32, nullptr, 0, floats({1, 2, 3, 4}), int64_t(16)); });
  refused("write within what rounds a buffer up", "wrote past the end of a buffer of 4 bytes, at byte 6", [] {
    Device x = floats({1});
    launch(kernel("write_at"), 2, 32, nullptr, 0, x, int64_t(6));
    cuMemFree_v2(x);
  });
  refused("misaligned access", "read_at: a misaligned access in block (0,0,0), thread (5,0,0)",
          [] { start("read_at", 32, floats({1, 2}) + 2, floats({0}), int64_t(0)); });
  refused("freed buffer as parameter", "add_one: parameter 0: ", [] { start("add_one", 1, freed(), 1); });
  refused("freed buffer in a struct", "copy: parameter 0, field from: ",
          [] { start("copy", 1, Copy{freed(), floats({0}), 1}); });
  refused("host pointer as parameter", "add_one: parameter 0: ", [] {
    float x = 1;
    start("add_one", 1, &x, 1);
  });
  refused("host pointer in a struct", "is no address of device memory", [] {
    static float x = 1;
    start("copy", 1, Copy{floats({1}), reinterpret_cast<Device>(&x), 1});
  });
  refused("freed in stream order before use", "freed before", [] {
    Device x = floats({1});
    must(cuMemFreeAsync(x, nullptr));
    start("add_one", 1, x, 1);
  });
  refused("freed twice", "cuMemFree: ", [] { cuMemFree_v2(freed()); });
  refused("free of what is no buffer", "cuMemFreeAsync: ", [] { cuMemFreeAsync(floats({1}) + 2, nullptr); });
  refused("copy past the end", "cuMemcpyHtoD to, 8 bytes: ", [] {
    float values[2] = {};
    cuMemcpyHtoD_v2(floats({1}), values, 8);
  });
  refused("copy between buffers past the end", "cuMemcpyDtoDAsync from, 8 bytes: ",
          [] { cuMemcpyDtoDAsync_v2(floats({1, 2}), floats({1}), 8, nullptr); });
  refused("fill past the end", "cuMemsetD8Async, 5 bytes: ", [] { cuMemsetD8Async(floats({1}), 0, 5, nullptr); });
  refused("copy to the host at a device address", "the host's address",
          [] { cuMemcpyDtoH_v2(reinterpret_cast<void*>(floats({1})), floats({1}), 4); });
  refused("the host touches device memory", "outside any kernel: a read by the host",
          [] { printf("%f", *reinterpret_cast<volatile float*>(freed())); });
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
  refused("launch bounds", "bounded: blocks of 96 threads, its launch bounds are 64", [] { start("bounded", 96); });
  refused("too many threads", "add_one: blocks of 1056x1x1 threads", [] { start("add_one", 1056, floats({1}), 1); });
  refused("an empty grid", "add_one: a grid of 0x1x1 blocks", [] { launch(kernel("add_one"), 0, 1, nullptr, 0, floats({1}), 1); });
  refused("shared memory not asked for", "bounded: 49153 bytes of dynamic shared memory, it may have 49152",
          [] { launch(kernel("bounded"), 1, 32, nullptr, 49153); });
  refused("more shared memory than there is", "bounded: 232449 bytes of dynamic shared memory",
          [] { cuFuncSetAttribute(kernel("bounded"), SHARED_BYTES_MAX, (227 << 10) + 1); });
  refused("a carve-out that is none", "a carve-out of 101 percent", [] { cuFuncSetAttribute(kernel("bounded"), CARVEOUT, 101); });
  refused("a rule of the machine", "diverge: block (0,0,0), thread ", [] { start("diverge", 64); });
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
  refused("a default stream without a context", "cuStreamSynchronize: no context is current",
          [] { std::thread([] { cuStreamSynchronize(reinterpret_cast<void*>(2)); }).join(); });
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
  refused("PTX with other launch bounds", "bounded has launch bounds of 128 in the PTX, of 64 here",
          [&] { cuModuleLoadData(&module, ".visible .entry bounded(\n)\n.maxntid 128\n{\n}\n"); });
  accepted("PTX of nvcc's form that agrees", [&] {
    Session("//\n.target sm_90a\n\n.visible .entry copy(\n\t.param .align 8 .b8 copy_param_0[24]\n)\n{\n}\n"
                                 "\n.visible .entry bounded()\n.maxntid 64, 1, 1\n.minnctapersm 1\n{\n}\n");
  });
  refused("what is no image", "neither PTX nor a module", [&] { cuModuleLoadData(&module, "nonsense"); });
  refused("a call that is not emulated", "cuGraphClone is not emulated", [] { cuGraphClone(nullptr, nullptr); });
  refused("a product that is not emulated", "cublasSgemv_v2 is not emulated", [] { cublasSgemv_v2(); });
  refused("an attribute that is not emulated", "device attribute 9999 is not emulated", [] {
    int value;
    cuDeviceGetAttribute(&value, 9999, 0);
  });
  setenv("CUDA_EMULATOR_REFUSES_CUBINS", "1", 1);
  passes("a refused cubin", "late", 1, [&](int) {
    context();
    expect(cuModuleLoadData(&module, module_image.data()) == 209, "no binary for this GPU");
    must(cuModuleLoadData(&module, module_ptx.data()));
    must(cuModuleUnload(module));
  });
  unsetenv("CUDA_EMULATOR_REFUSES_CUBINS");
}

void test_leaks() {
  said("buffers", "leaked at exit: 2 buffers, 12 bytes", [] {
    context();
    floats({1});
    floats({1, 2});
  });
  said("page-locked memory", "leaked at exit: 1 page-locked host buffers", [] {
    context();
    void* memory;
    must(cuMemHostAlloc(&memory, 4, 0));
  });
  said("a module", "leaked at exit: the module of faulty.cu", [] {
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
  test_pool();
  test_late();
  test_refused_memory();
  test_refused_launches();
  test_refused_handles();
  test_refused_images();
  test_products();
  test_graphs();
  test_leaks();
  printf("driver: %d tests, %d failed\n", tests, failures);
  return failures != 0;
}
