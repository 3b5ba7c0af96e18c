// Streams and events. Work runs as late as the rules allow, so that a missing synchronisation shows; or at once.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <tuple>

#include "driver.h"
#include "pool.h"

namespace cuda_driver {

struct Work {
  std::string what;
  std::function<bool()> run;  // whether it is done: else it is run again
  bool waits_for_others = false;  // for another process
};

// What a stream was given between the begin of a capture and its end.
struct Graph {
  std::vector<Work> work;
  std::map<CUdeviceptr, size_t> memory;
  std::set<CUdeviceptr> released;
  size_t bytes = 0, bytes_max = 0;  // of them at a time
  int mode;                         // what is refused meanwhile: on every OS thread, on the one that captures, on none
  std::thread::id thread = std::this_thread::get_id();
  bool lost = false;
  int launches = 0;
  ~Graph() {
    for (auto& [address, _] : memory) forget(address);
  }
};

struct Stream {
  std::deque<Work> queue;
  std::shared_ptr<Graph> captured;
  uint64_t done = 0;
  bool blocking = false;  // waits for the legacy default stream, and it for this one
  bool at_once = false;
  uint64_t end() const { return done + queue.size(); }
};

struct Event {
  bool timing;
  Place place;  // the record's
  std::shared_ptr<std::chrono::steady_clock::time_point> time = std::make_shared<std::chrono::steady_clock::time_point>();
};

namespace {

enum class Mode { late, first_late, at_once };

Mode mode() {
  static const Mode mode = [] {
    const char* text = getenv("CUDA_EMULATOR");
    const std::string name = text ? text : "late";
    if (name == "late") return Mode::late;
    if (name == "first-late") return Mode::first_late;
    if (name == "at-once") return Mode::at_once;
    fprintf(stderr, "cuda-emulator: CUDA_EMULATOR is late, first-late or at-once, not %s\n", text);
    exit(2);
  }();
  return mode;
}

// Longer queues only cost memory.
constexpr size_t QUEUE_MAX = 20000;

auto& streams = lasting<std::map<void*, std::shared_ptr<Stream>>>();
auto& graphs = lasting<std::map<Graph*, std::shared_ptr<Graph>>>();
// Executable ones; the pointer is the handle.
auto& executables = lasting<std::map<std::shared_ptr<Graph>*, std::unique_ptr<std::shared_ptr<Graph>>>>();
size_t graph_launches;
auto& events = lasting<std::map<Event*, std::unique_ptr<Event>>>();
const bool trace = getenv("CUDA_EMULATOR_TRACE");

std::shared_ptr<Stream> make_stream(bool blocking) {
  static int made = 0;
  auto stream = std::make_shared<Stream>();
  stream->blocking = blocking;
  stream->at_once = mode() == Mode::at_once || (mode() == Mode::first_late && made > 0);
  made++;
  return stream;
}

std::shared_ptr<Stream>& legacy_stream() {
  static auto& stream = *new auto(make_stream(false));
  return stream;
}

std::shared_ptr<Stream>& thread_stream() {
  thread_local std::shared_ptr<Stream> stream;
  if (!stream) {
    stream = make_stream(true);
    streams[stream.get()] = stream;
  }
  return stream;
}

enum class Patience { none, until_done };

// Whether all of it is done. With patience it is, unless the process sticks.
bool run_until(const Place& place, Patience patience) {
  Stream& stream = *place.stream;
  while (stream.done < place.count && !stream.queue.empty()) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    bool is_done = true;
    if (!stuck()) {
      std::string before = std::move(running);
      running = work.what;
      is_done = work.run();
      running = std::move(before);
    }
    if (is_done) {
      stream.done++;
      continue;
    }
    stream.queue.push_front(std::move(work));
    if (patience == Patience::none) return false;
    Unlocked unlocked;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return stream.done >= place.count;
}

Place end_of(const std::shared_ptr<Stream>& stream) { return {stream, stream->end()}; }

void add(const std::shared_ptr<Stream>& stream, std::string what, std::function<bool()> run) {
  stream->queue.push_back({std::move(what), std::move(run)});
}

// What the legacy default stream and those that block on it owe each other.
void add_implicit_waits(const std::shared_ptr<Stream>& stream) {
  std::vector<Place> places;
  if (stream == legacy_stream()) {
    for (auto& [_, other] : streams)
      if (other->blocking && !other->queue.empty()) places.push_back(end_of(other));
  } else if (stream->blocking && !legacy_stream()->queue.empty()) {
    places.push_back(end_of(legacy_stream()));
  }
  if (places.empty()) return;
  add(stream, "the default stream's order", [places] {
    for (const Place& place : places)
      if (!run_until(place, Patience::none)) return false;
    return true;
  });
}

}  // namespace

std::string& running = lasting<std::string>();

std::shared_ptr<Stream> stream_of(void* handle, const char* call) {
  const uintptr_t number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) {
    if (need_context(call)) return nullptr;
    return number == 2 ? thread_stream() : legacy_stream();
  }
  auto found = streams.find(handle);
  if (found != streams.end()) return found->second;
  complain(INVALID_HANDLE, "%s: no such stream, or it was destroyed", call);
  return nullptr;
}

static void give(const std::shared_ptr<Stream>& stream, Work work) {
  if (trace)
    fprintf(stderr, "cuda-emulator: stream %p: %s%s\n", static_cast<void*>(stream.get()), work.what.c_str(),
            stream->captured ? ", recorded" : "");
  if (stream->captured) return stream->captured->work.push_back(std::move(work));
  add_implicit_waits(stream);
  stream->queue.push_back(std::move(work));
  if (stream->at_once || stream->queue.size() > QUEUE_MAX) run_until(end_of(stream), Patience::none);
}

void enqueue_waiting(const std::shared_ptr<Stream>& stream, std::string what, std::function<bool()> run) {
  give(stream, {std::move(what), std::move(run), true});
}

void enqueue(const std::shared_ptr<Stream>& stream, std::string what, std::function<void()> run) {
  give(stream, {std::move(what), [run = std::move(run)] { return run(), true; }});
}

std::string waiting_for_others() {
  std::vector<std::shared_ptr<Stream>> all = {legacy_stream()};
  for (auto& [_, stream] : streams) all.push_back(stream);
  for (auto& stream : all) {
    const auto waits = [](const Work& work) { return work.waits_for_others; };
    if (std::none_of(stream->queue.begin(), stream->queue.end(), waits)) continue;
    if (!run_until(end_of(stream), Patience::none)) return stream->queue.front().what;
  }
  return "";
}

bool is_captured(const std::shared_ptr<Stream>& stream) { return stream->captured != nullptr; }

CUresult lost_capture(const std::shared_ptr<Stream>& stream) {
  return stream->captured && stream->captured->lost ? CAPTURE_INVALIDATED : SUCCESS;
}

CUresult lose_capture(const std::shared_ptr<Stream>& stream, CUresult code) {
  stream->captured->lost = true;
  return code;
}

CUresult captured_launch(const std::shared_ptr<Stream>& stream) {
  if (CUresult error = lost_capture(stream)) return error;
  if (!stream->captured) return SUCCESS;
  const char* text = getenv("CUDA_EMULATOR_LOSES_CAPTURE");
  if (++stream->captured->launches == (text ? atoi(text) : 0)) return lose_capture(stream, CAPTURE_INVALIDATED);
  return SUCCESS;
}

CUresult not_while_captured(const std::shared_ptr<Stream>& stream, const char* what) {
  if (!stream->captured) return SUCCESS;
  if (CUresult error = lost_capture(stream)) return error;
  return lose_capture(stream, complain(CAPTURE_UNSUPPORTED, "%s on a stream that is captured", what));
}

CUresult not_while_any_is_captured(const char* what) {
  enum { GLOBAL, THREAD_LOCAL };
  for (auto& [_, stream] : streams) {
    if (!stream->captured) continue;
    const auto& [mode, thread] = std::tie(stream->captured->mode, stream->captured->thread);
    if (mode == GLOBAL || (mode == THREAD_LOCAL && thread == std::this_thread::get_id())) return not_while_captured(stream, what);
  }
  return SUCCESS;
}

void captured_allocation(const std::shared_ptr<Stream>& stream, CUdeviceptr address, size_t bytes) {
  Graph& graph = *stream->captured;
  graph.memory[address] = bytes;
  graph.bytes += bytes;
  if (graph.bytes > graph.bytes_max) graph.bytes_max = graph.bytes;
}

CUresult captured_release(const std::shared_ptr<Stream>& stream, CUdeviceptr address) {
  Graph& graph = *stream->captured;
  if (graph.memory.count(address) && graph.released.insert(address).second) {
    graph.bytes -= graph.memory[address];
    return SUCCESS;
  }
  return lose_capture(
      stream, complain(INVALID_VALUE, "cuMemFreeAsync: not memory of the recording: %s", describe(address).c_str()));
}

void run_stream(const std::shared_ptr<Stream>& stream) {
  run_until(end_of(stream), Patience::until_done);
  pool_waited();
}

void tell_leaked_graphs() {
  if (getenv("CUDA_EMULATOR_GRAPHS")) fprintf(stderr, "graphs: %zu launched\n", graph_launches);
  if (!graphs.empty()) fprintf(stderr, "cuda-emulator: leaked at exit: %zu graphs\n", graphs.size());
  if (!executables.empty()) fprintf(stderr, "cuda-emulator: leaked at exit: %zu executable graphs\n", executables.size());
}

void run_everything() {
  run_until(end_of(legacy_stream()), Patience::none);
  std::vector<std::shared_ptr<Stream>> all;
  for (auto& [_, stream] : streams) all.push_back(stream);
  for (auto& stream : all) run_until(end_of(stream), Patience::none);
}

}  // namespace cuda_driver

using namespace cuda_driver;

#define STREAM(handle)                          \
  Locked lock;                                  \
  if (stuck()) return stuck();                  \
  auto stream = stream_of(handle, __func__);    \
  if (!stream) return INVALID_HANDLE

static Event* event_of(void* handle, const char* call) {
  auto found = events.find(static_cast<Event*>(handle));
  if (found != events.end()) return found->second.get();
  complain(INVALID_HANDLE, "%s: no such event, or it was destroyed", call);
  return nullptr;
}

#define EVENT(handle)                        \
  Event* event = event_of(handle, __func__); \
  if (!event) return INVALID_HANDLE

static bool happened(const Event& event) { return !event.place.stream || event.place.stream->done >= event.place.count; }

API CUresult cuStreamCreate(void** handle, unsigned flags) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  constexpr unsigned NON_BLOCKING = 1;
  auto stream = make_stream(!(flags & NON_BLOCKING));
  streams[*handle = stream.get()] = stream;
  return SUCCESS;
}
API CUresult cuStreamCreateWithPriority(void** handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }

API CUresult cuStreamDestroy_v2(void* handle) {
  Locked lock;
  auto stream = stream_of(handle, __func__);
  if (!stream) return INVALID_HANDLE;
  if (CUresult error = not_while_captured(stream, __func__)) return error;
  run_stream(stream);
  streams.erase(handle);
  return stuck();
}

API CUresult cuStreamSynchronize(void* handle) {
  STREAM(handle);
  if (CUresult error = not_while_captured(stream, __func__)) return error;
  run_stream(stream);
  return stuck();
}

API CUresult cuStreamQuery(void* handle) {
  STREAM(handle);
  if (CUresult error = not_while_captured(stream, __func__)) return error;
  if (stream->queue.empty()) return SUCCESS;
  run_until(end_of(stream), Patience::none);  // not done this time, done the next
  return NOT_READY;
}

// CUstreamCaptureStatus: none, active, invalidated.
API CUresult cuStreamIsCapturing(void* handle, int* status) {
  STREAM(handle);
  return *status = !stream->captured ? 0 : stream->captured->lost ? 2 : 1, SUCCESS;
}
API CUresult cuStreamGetCaptureInfo_v2(void* handle, int* status, void*, void*, void*, void*) {
  return cuStreamIsCapturing(handle, status);
}

API CUresult cuStreamBeginCapture_v2(void* handle, int mode) {
  STREAM(handle);
  if (stream == legacy_stream()) return complain(CAPTURE_UNSUPPORTED, "cuStreamBeginCapture: of the default stream");
  if (getenv("CUDA_EMULATOR_REFUSES_CAPTURE")) return NOT_SUPPORTED;
  if (stream->captured) return complain(INVALID_VALUE, "cuStreamBeginCapture: of a stream that is captured");
  stream->captured = std::make_shared<Graph>();
  return stream->captured->mode = mode, SUCCESS;
}

API CUresult cuStreamEndCapture(void* handle, Graph** graph) {
  STREAM(handle);
  *graph = nullptr;
  auto captured = std::move(stream->captured);
  if (!captured) return complain(CAPTURE_UNMATCHED, "cuStreamEndCapture: of a stream that is not captured");
  if (captured->lost) return CAPTURE_INVALIDATED;
  graphs[*graph = captured.get()] = captured;
  return SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(std::shared_ptr<Graph>** executable, Graph* graph, unsigned long long flags) {
  Locked lock;
  auto found = graphs.find(graph);
  if (found == graphs.end()) return complain(INVALID_HANDLE, "cuGraphInstantiate: no such graph, or it was destroyed");
  if (flags) return complain(NOT_SUPPORTED, "cuGraphInstantiate: flags %llu are not emulated", flags);
  auto made = std::make_unique<std::shared_ptr<Graph>>(found->second);
  *executable = made.get();
  executables[*executable] = std::move(made);
  return SUCCESS;
}

API CUresult cuGraphLaunch(std::shared_ptr<Graph>* executable, void* stream_handle) {
  STREAM(stream_handle);
  auto found = executables.find(executable);
  if (found == executables.end()) return complain(INVALID_HANDLE, "cuGraphLaunch: no such graph, or it was destroyed");
  if (CUresult error = not_while_captured(stream, __func__)) return error;
  graph_launches++;
  const Graph& graph = **executable;
  // At a second launch it would be allocated twice.
  if (graph.released.size() < graph.memory.size())
    return complain(NOT_SUPPORTED, "cuGraphLaunch: a graph that keeps %zu of its buffers is not emulated",
                    graph.memory.size() - graph.released.size());
  if (!pool_take_for_graphs(graph.bytes_max, own_bytes())) return OUT_OF_MEMORY;
  for (const Work& work : graph.work) give(stream, work);
  return stuck();
}

API CUresult cuGraphUpload(std::shared_ptr<Graph>* executable, void* stream_handle) {
  STREAM(stream_handle);
  auto found = executables.find(executable);
  if (found == executables.end()) return complain(INVALID_HANDLE, "cuGraphUpload: no such graph, or it was destroyed");
  if (CUresult error = lost_capture(stream)) return error;
  return pool_take_for_graphs((*executable)->bytes_max, own_bytes()) ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuGraphExecDestroy(std::shared_ptr<Graph>* executable) {
  Locked lock;
  if (executables.erase(executable)) return SUCCESS;
  return complain(INVALID_HANDLE, "cuGraphExecDestroy: no such graph, or it was destroyed");
}

API CUresult cuGraphDestroy(Graph* graph) {
  Locked lock;
  if (graphs.erase(graph)) return SUCCESS;
  return complain(INVALID_HANDLE, "cuGraphDestroy: no such graph, or it was destroyed");
}

API CUresult cuCtxSynchronize() {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  if (CUresult error = not_while_any_is_captured(__func__)) return error;
  std::vector<std::shared_ptr<Stream>> all = {legacy_stream()};
  for (auto& [_, stream] : streams) all.push_back(stream);
  for (auto& stream : all) run_stream(stream);
  return stuck();
}

API CUresult cuEventCreate(void** handle, unsigned flags) {
  Locked lock;
  if (CUresult error = need_context(__func__)) return error;
  constexpr unsigned DISABLE_TIMING = 2;
  auto event = std::make_unique<Event>();
  event->timing = !(flags & DISABLE_TIMING);
  Event* made = event.get();
  events[made] = std::move(event);
  *handle = made;
  return SUCCESS;
}

API CUresult cuEventDestroy_v2(void* handle) {
  Locked lock;
  EVENT(handle);
  events.erase(event);
  return SUCCESS;
}

API CUresult cuEventRecord(void* handle, void* stream_handle) {
  STREAM(stream_handle);
  EVENT(handle);
  if (CUresult error = not_while_captured(stream, __func__)) return error;
  if (event->timing) {
    enqueue(stream, "cuEventRecord", [time = event->time] { *time = std::chrono::steady_clock::now(); });
  } else {
    add_implicit_waits(stream);
  }
  event->place = end_of(stream);
  return SUCCESS;
}

API CUresult cuEventSynchronize(void* handle) {
  Locked lock;
  EVENT(handle);
  if (event->place.stream) run_until(event->place, Patience::until_done);
  pool_waited();
  return stuck();
}

API CUresult cuEventQuery(void* handle) {
  Locked lock;
  EVENT(handle);
  if (happened(*event)) return stuck();
  run_until(event->place, Patience::none);  // not done this time, done the next
  return NOT_READY;
}

API CUresult cuEventElapsedTime_v2(float* milliseconds, void* from, void* to) {
  Locked lock;
  Event *start = event_of(from, __func__), *end = event_of(to, __func__);
  if (!start || !end) return INVALID_HANDLE;
  for (const Event* event : {start, end})
    if (!event->timing || !event->place.stream)
      return complain(INVALID_HANDLE, "cuEventElapsedTime: of an event without timing, or never recorded");
  if (!happened(*start) || !happened(*end)) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
  return stuck();
}
API CUresult cuEventElapsedTime(float* milliseconds, void* from, void* to) {
  return cuEventElapsedTime_v2(milliseconds, from, to);
}

API CUresult cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
  STREAM(stream_handle);
  EVENT(handle);
  if (CUresult error = lost_capture(stream)) return error;
  if (stream->captured)
    return lose_capture(stream, complain(CAPTURE_ISOLATION, "cuStreamWaitEvent: an event from outside of what is captured"));
  if (!event->place.stream || event->place.stream == stream) return SUCCESS;
  give(stream, {"cuStreamWaitEvent", [place = event->place] { return run_until(place, Patience::none); }});
  return SUCCESS;
}
