// Threads as fibres, their schedule, blocks over OS threads.
#include "engine.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "block.h"

namespace cuda_host {

static thread_local Thread* current = nullptr;

// ThreadSanitizer sees a fibre as a thread: there each thread has its own from the block's start to its end. Elsewhere a
// thread has one from its first instruction to its last, and hands it on: those that never wait share one.
#ifdef CUDA_HOST_TSAN
constexpr bool fibres_handed_on = false;
#else
constexpr bool fibres_handed_on = true;
#endif

static thread_local std::vector<std::unique_ptr<Fibre>> fibres;  // all of this OS thread's
static thread_local std::vector<Fibre*> spare_fibres;

static void thread_main(Fibre& fibre);

static void give_fibre(Thread& thread) {
  if (spare_fibres.empty()) {
    fibres.push_back(std::make_unique<Fibre>());
    fibre_create(*fibres.back(), thread_main);
    spare_fibres.push_back(fibres.back().get());
  }
  thread.fibre = spare_fibres.back();
  thread.fibre->work = &thread;
  spare_fibres.pop_back();
}

static void take_fibre(Thread& thread) {
  spare_fibres.push_back(thread.fibre);
  thread.fibre = nullptr;
}

Thread& self() { return *current; }
const Coordinates& here() { return current->place; }

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const dim3 block = current->place.block;
  char place[96];
  snprintf(place, sizeof place, "block (%u,%u,%u), thread %d: ", block.x, block.y, block.z, current->index);
  throw KernelError(std::string(place) + text);
}

// ---- One block ------------------------------------------------------------------------------------------------------

void Block::wake(Thread& thread) {
  thread.waits_for = nullptr;
  ready[(ready_first + ready_count++) % ready.size()] = &thread;
}

Thread* Block::take() {
  if (ready_count == 0) return nullptr;
  size_t at = 0;
  if (options.schedule == Schedule::newest_first) at = ready_count - 1;
  if (options.schedule == Schedule::shuffled) at = next_random() % ready_count;
  Thread*& place = ready[(ready_first + at) % ready.size()];
  Thread* thread = place;
  if (at == 0) {
    ready_first++;
  } else {
    place = ready[(ready_first + ready_count - 1) % ready.size()];
  }
  ready_count--;
  return thread;
}

void Block::go_on(Thread& from) {
  for (;;) {
    if (Thread* next = take()) {
      current = next;
      if (next != &from) switch_to(from, *next);
      return;
    }
    if (land_something()) continue;
    if (exited < int(threads.size())) fail_stuck();
    Fibre& own = *from.fibre;
    if (fibres_handed_on) take_fibre(from);
    fibre_switch(own, main);
    return;
  }
}

// Returns when `from` goes on, or, on its fibre after its end, another thread begins.
void Block::switch_to(Thread& from, Thread& next) {
  Fibre& own = *from.fibre;
  if (from.exited && fibres_handed_on) {
    take_fibre(from);
    if (!next.fibre) give_fibre(next);  // the one just taken
    if (next.fibre == &own) return;
  } else if (!next.fibre) {
    give_fibre(next);
  }
  fibre_switch(own, *next.fibre);
}

void Block::wait(Thread& thread, const char* what, int line) {
  thread.waits_for = what;
  thread.waits_line = line;
  go_on(thread);
}

void Block::yield(Thread& thread) {
  if (options.schedule != Schedule::shuffled) return;
  wake(thread);
  go_on(thread);
}

void Block::fail_stuck() {
  std::map<std::string, int> states;
  for (auto& thread : threads) {
    std::string state = thread->exited ? "exited" : std::string("waiting at ") + thread->waits_for;
    if (!thread->exited && thread->waits_line) state += " line " + std::to_string(thread->waits_line);
    states[state]++;
  }
  std::string text;
  for (auto& [state, count] : states) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + state;
  fail("deadlock: threads %s", text.c_str());
}

// A fibre's whole life: it runs the kernel for one thread after another, of block after block.
static void thread_main(Fibre& fibre) {
  for (;;) {
    Thread& thread = *static_cast<Thread*>(fibre.work);
    Block& block = *thread.block;
    race_acquire(fibre, &block.start_object);
    try {
      race_leave_engine();
      (*block.body)();
      race_enter_engine();
      check_thread_end(thread);
      thread.exited = true;
      block.go_on(thread);
      continue;  // as another thread
    } catch (...) {
      race_enter_engine();
      block.error = std::current_exception();
    }
    fibre_switch(fibre, block.main);  // for good: a failed block's fibres are dropped
  }
}

void Block::run(dim3 index) {
  const Coordinates& place = threads[0]->place;
  const uint64_t number = index.x + uint64_t(place.grid_size.x) * (index.y + uint64_t(place.grid_size.y) * index.z);
  random = mix(options.seed * 0x9e3779b97f4a7c15ull + number);
  memset(shared, 0xff, shared_bytes);  // NaN, as f32 and as bf16
  in_flight.assign(in_flight.size(), 0);
  unfenced.assign(unfenced.size(), 0);
  for (size_t i = 0; i < warps.size(); i++) {
    warps[i] = Warp();
    warps[i].lanes = int(std::min(size_t(LANES), threads.size() - i * LANES));
  }
  for (NamedBarrier& barrier : barriers) {
    barrier = NamedBarrier();
    barrier.waiting.reserve(threads.size());
  }
  mbarriers.clear();
  wgmma_log.assign((warps.size() + 3) / 4, {});
  ready_first = ready_count = 0;
  exited = 0;
  for (auto& thread : threads) {
    thread->place.block = index;
    thread->exited = false;
    thread->wgmma_fenced = false;
    thread->registers = 0;
    if (!fibres_handed_on) give_fibre(*thread);
    wake(*thread);
  }
  race_release(main, &start_object);
  current = take();
  if (!current->fibre) give_fibre(*current);
  fibre_switch(main, *current->fibre);
  end();
}

void Block::end() {
  if (!fibres_handed_on) {
    // Those that a failed block leaves behind count as ended too.
    for (auto& thread : threads) race_release(*thread->fibre, &end_object);
    race_acquire(main, &end_object);
  }
  if (error) {  // its fibres are dropped where they stand
    for (auto& thread : threads)
      if (thread->fibre) thread->fibre->work = nullptr;
    const auto dropped = [](const std::unique_ptr<Fibre>& fibre) { return !fibre->work; };
    fibres.erase(std::remove_if(fibres.begin(), fibres.end(), dropped), fibres.end());
    return;
  }
  if (!fibres_handed_on)
    for (auto& thread : threads) take_fibre(*thread);
  try {
    check_block_end(*this);
  } catch (...) {
    error = std::current_exception();
  }
}

// ---- All blocks -----------------------------------------------------------------------------------------------------

// Launches by their shared memory and threads: whether a block of any has written to the memory's end.
static std::mutex ends_mutex;
static std::map<std::pair<size_t, size_t>, bool> ends;

static void note_end(const Block& block) {
  if (block.shared_bytes < 4) return;
  const unsigned char* last = block.shared + block.shared_bytes - 4;
  const bool written = std::any_of(last, last + 4, [](unsigned char byte) { return byte != 0xff; });
  std::lock_guard<std::mutex> lock(ends_mutex);
  ends[{block.shared_bytes, block.threads.size()}] |= written;
}

std::vector<std::string> unused_shared_memory() {
  std::vector<std::string> found;
  for (auto& [launch, written] : ends)
    if (!written)
      found.push_back("the end of " + std::to_string(launch.first) + " bytes of shared memory, for blocks of " +
                      std::to_string(launch.second) + " threads, is never written");
  return found;
}

static std::unique_ptr<Block> make_block(dim3 block_size, size_t shared_bytes) {
  auto made = std::make_unique<Block>();
  Block& block = *made;
  const int count = int(block_size.x * block_size.y * block_size.z);
  block.ready.resize(count);
  block.warps.resize((count + LANES - 1) / LANES);
  // Exactly as long as asked for, so that AddressSanitizer sees what lies beyond.
  block.shared_bytes = shared_bytes;
  if (posix_memalign(reinterpret_cast<void**>(&block.shared), 1024, shared_bytes ? shared_bytes : 1)) abort();
  block.in_flight.resize((shared_bytes + 15) / 16);
  block.unfenced.resize((shared_bytes + 15) / 16);
  fibre_adopt(block.main);
  for (int i = 0; i < count; i++) {
    auto thread = std::make_unique<Thread>();
    thread->block = &block;
    thread->index = i;
    thread->place.block_size = block_size;
    thread->place.thread = dim3(i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y);
    block.threads.push_back(std::move(thread));
  }
  return made;
}

// Blocks are kept from launch to launch by their shape: a launch of few threads would mostly make them.
static thread_local std::map<std::array<size_t, 4>, std::unique_ptr<Block>> kept;

void launch(const Options& options, dim3 grid, dim3 block_size, size_t shared_bytes,
            const std::function<void()>& body) {
  const uint64_t threads = uint64_t(block_size.x) * block_size.y * block_size.z;
  const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (threads == 0 || threads > 1024)
    throw KernelError("launch: a block has " + std::to_string(threads) + " threads: 1 to 1024");
  if (shared_bytes > SHARED_BYTES_MAX)
    throw KernelError("launch: " + std::to_string(shared_bytes) + " bytes of shared memory, the limit is " +
                      std::to_string(SHARED_BYTES_MAX));
  if (blocks <= options.first_block) throw KernelError("launch: an empty grid");

  std::atomic<uint64_t> next{options.first_block};
  std::mutex mutex;
  std::exception_ptr error;
  auto work = [&] {
    std::unique_ptr<Block>& place = kept[{block_size.x, block_size.y, block_size.z, shared_bytes}];
    if (!place) place = make_block(block_size, shared_bytes);
    Block& block = *place;
    block.options = options;
    block.body = &body;
    fibre_adopt(block.main);
    for (auto& thread : block.threads) thread->place.grid_size = grid;
    for (uint64_t taken; !block.error && (taken = next++) < blocks;) {
      uint64_t number = taken;
      if (options.schedule == Schedule::newest_first) number = blocks - 1 - (taken - options.first_block);
      block.run(dim3(number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y));
      note_end(block);
    }
    if (block.error) {
      next = blocks;
      std::lock_guard<std::mutex> lock(mutex);
      error = block.error;
      place.reset();
    }
  };
  std::vector<std::thread> pool;
  for (uint64_t i = 1; i < blocks && i < uint64_t(options.workers); i++) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace cuda_host
