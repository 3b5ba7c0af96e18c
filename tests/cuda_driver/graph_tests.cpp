// Recorded launches: what is right works in every mode, and each check fires once.
#include <thread>

#include "driver_test.h"

namespace {

void* end(void* on) {
  void *graph, *executable;
  must(cuStreamEndCapture(on, &graph));
  must(cuGraphInstantiateWithFlags(&executable, graph, 0));
  must(cuGraphDestroy(graph));
  return executable;
}

void* begin(void* on = stream()) {
  must(cuStreamBeginCapture_v2(on, 1));
  return on;
}

// Memory that a recording takes and gives back.
Device passing(size_t bytes, void* on) {
  Device made = taken(bytes, on);
  must(cuMemFreeAsync(made, on));
  return made;
}

// A recording that something was refused in is lost.
void expect_lost(void* on) {
  void* graph;
  expect(cuStreamEndCapture(on, &graph) == 901, "the recording is lost");
}

// The driver says `message` of what `call` does while `on` is captured, with memory from before; the recording is lost.
void refused_while_captured(const char* name, const char* message, const std::function<void(Device x, void* on)>& call) {
  refused(name, message, [&] {
    Device x = floats({1});
    void* on = begin();
    call(x, on);
    expect_lost(on);
  });
}

}  // namespace

void test_graphs() {
  accepted("a recording is done when it is launched, as often as it is", [] {
    Session s;
    Device x = s.floats({1, 2, 3}), y = s.floats({0, 0, 0});
    void* on = begin(s.stream());
    int status;
    must(cuStreamIsCapturing(on, &status));
    expect(status == 1, "captured");
    Device scratch = taken(12, on);
    must(cuMemcpyDtoDAsync_v2(scratch, x, 12, on));
    must(launch(s.kernel("add_one"), 1, 32, on, 0, scratch, 3));
    must(cuMemcpyDtoDAsync_v2(y, scratch, 12, on));
    must(cuMemFreeAsync(scratch, on));
    void* executable = end(on);
    must(cuStreamSynchronize(on));
    expect(read(y, 3) == std::vector<float>{0, 0, 0}, "nothing was done yet");
    for (float first : {5.f, 7.f}) {
      must(cuMemcpyHtoDAsync_v2(x, &first, 4, on));
      must(cuGraphLaunch(executable, on));
      must(cuStreamSynchronize(on));
      expect(read(y, 3) == std::vector<float>{first + 1, 3, 4}, "what x holds at the launch");
    }
    must(cuGraphLaunch(executable, on));
    must(cuGraphExecDestroy(executable));
    must(cuStreamSynchronize(on));
  });
  accepted("a recording has memory of its own, which the pool must leave to it", [] {
    setenv("CUDA_EMULATOR_MEMORY_MIB", "8", 1);
    Session s(NO_MODULE);
    void *pool, *on = s.stream();
    unsigned long long all = ~0ull;
    must(cuDeviceGetDefaultMemPool(&pool, 0));
    must(cuMemPoolSetAttribute(pool, 4, &all));
    const auto six_mib_fit = [&] {
      Device x;
      if (cuMemAllocAsync(&x, 6 << 20, on)) return false;
      must(cuMemFreeAsync(x, on));
      must(cuStreamSynchronize(on));
      return true;
    };
    expect(six_mib_fit(), "before");
    passing(4 << 20, begin(on));
    void* executable = end(on);
    expect(cuGraphUpload(executable, on) == 2 && cuGraphLaunch(executable, on) == 2, "the pool has it");
    must(cuMemPoolTrimTo(pool, 0));
    must(cuGraphUpload(executable, on));
    must(cuGraphLaunch(executable, on));
    must(cuGraphExecDestroy(executable));
    expect(!six_mib_fit(), "it is kept for the next recording");
  });
  accepted("another thread's calls are no part of a recording", [] {
    Session s(NO_MODULE);
    void* on = begin(s.stream());
    std::thread([] {
      context();
      freed();
      must(cuModuleUnload(load()));
    }).join();
    must(cuGraphExecDestroy(end(on)));
  });
  refused("another thread's calls where a recording forbids them", "cuMemAlloc_v2 on a stream that is captured", [] {
    must(cuStreamBeginCapture_v2(stream(), 0));
    std::thread([] {
      context();
      Device x;
      cuMemAlloc_v2(&x, 4);
    }).join();
  });
  accepted("a recording that is never launched leaves nothing", [] {
    Session s(NO_MODULE);
    void* on = begin(s.stream());
    passing(12, on);
    must(cuGraphExecDestroy(end(on)));
  });
  refused("memory of a recording that is not there", "whose allocation has not had its turn", [] {
    void* on = begin();
    Device scratch = passing(4, on);
    end(on);
    cuMemsetD8Async(scratch, 0, 4, on);
  });
  refused("memory of a recording after it", "freed before", [] {
    void* on = begin();
    Device scratch = passing(4, on);
    must(cuGraphLaunch(end(on), on));
    cuMemsetD8Async(scratch, 0, 4, on);
  });
  refused("a recording that keeps memory", "a graph that keeps 1 of its buffers", [] {
    void* on = begin();
    taken(4, on);
    cuGraphLaunch(end(on), on);
  });
  refused_while_captured("memory of others released in a recording", "not memory of the recording",
                         [](Device x, void* on) { cuMemFreeAsync(x, on); });
  refused_while_captured("a wait while captured", "cuStreamSynchronize on a stream that is captured",
                         [](Device, void* on) { expect(cuStreamSynchronize(on) == 900, "refused"); });
  refused_while_captured("a copy from the host while captured", "cuMemcpyHtoDAsync on a stream that is captured", [](Device x, void* on) {
    const float value = 2;
    cuMemcpyHtoDAsync_v2(x, &value, 4, on);
  });
  refused_while_captured("a copy to the host while captured", "cuMemcpyDtoHAsync on a stream that is captured", [](Device x, void* on) {
    float value;
    cuMemcpyDtoHAsync_v2(&value, x, 4, on);
  });
  refused("memory for good while captured", "cuMemAlloc_v2 on a stream that is captured", [] {
    begin();
    Device x;
    cuMemAlloc_v2(&x, 4);
  });
  refused("a module loaded while captured", "cuModuleLoadData on a stream that is captured", [] {
    begin();
    void* module;
    cuModuleLoadData(&module, module_image.data());
  });
  refused("an event from outside", "an event from outside of what is captured", [] {
    void *event, *on;
    must(cuEventCreate(&event, 2));
    must(cuEventRecord(event, nullptr));
    on = begin();
    cuStreamWaitEvent(on, event, 0);
    expect_lost(on);
  });
  accepted("every call on a lost recording says so, and its end frees the stream", [] {
    setenv("CUDA_EMULATOR_LOSES_CAPTURE", "2", 1);
    Session s;
    void *add_one = s.kernel("add_one"), *event = s.event();
    Device x = s.floats({1}), other;
    void* on = begin(s.stream());
    Device scratch = taken(4, on);
    must(launch(add_one, 1, 1, on, 0, scratch, 1));
    expect(launch(add_one, 1, 1, on, 0, scratch, 1) == 901, "the second launch");
    int status;
    must(cuStreamIsCapturing(on, &status));
    expect(status == 2, "lost");
    float value = 3;
    const int calls[] = {launch(add_one, 1, 1, on, 0, x, 1),
                         cuMemAllocAsync(&other, 4, on),
                         cuMemAllocAsync(&other, 0, on),
                         cuMemFreeAsync(scratch, on),
                         cuMemFreeAsync(0, on),
                         cuMemcpyDtoDAsync_v2(x, scratch, 4, on),
                         cuMemcpyHtoDAsync_v2(x, &value, 4, on),
                         cuMemsetD8Async(x, 0, 4, on),
                         cuEventRecord(event, on),
                         cuStreamWaitEvent(on, event, 0),
                         cuStreamSynchronize(on),
                         cuStreamQuery(on)};
    for (int result : calls) expect(result == 901, "a call on a lost recording");
    expect_lost(on);
    must(cuStreamIsCapturing(on, &status));
    expect(status == 0, "it has ended");
    must(launch(add_one, 1, 1, on, 0, x, 1));
    must(cuStreamSynchronize(on));
    expect(read(x, 1) == std::vector<float>{2}, "x + 1");
  });
  refused_while_captured("memory of no bytes while captured", "cuMemAllocAsync: of no bytes on a stream that is captured",
                         [](Device x, void* on) { expect(cuMemAllocAsync(&x, 0, on) == 1, "refused"); });
  refused_while_captured("no memory released while captured", "cuMemFreeAsync: of no memory on a stream that is captured",
                         [](Device, void* on) { expect(cuMemFreeAsync(0, on) == 1, "refused"); });
  refused("an end without a begin", "of a stream that is not captured", [] {
    void* graph;
    cuStreamEndCapture(stream(), &graph);
  });
  refused("two begins", "of a stream that is captured", [] { cuStreamBeginCapture_v2(begin(), 1); });
  refused("a destroyed graph", "cuGraphLaunch: no such graph, or it was destroyed", [] {
    void *on = begin(), *executable = end(on);
    must(cuGraphExecDestroy(executable));
    cuGraphLaunch(executable, on);
  });
  refused("a graph never destroyed", "leaked at exit: 1 executable graphs", [] { end(begin()); });
}
