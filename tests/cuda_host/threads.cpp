// Collectives of a warp, barriers of a block.
#include "block.h"

namespace cuda_host {

void warp_meet(const char* what, void* argument, void (*run)(Warp&, void** arguments), bool whole) {
  Thread& thread = self();
  Block& block = *thread.block;
  Warp& warp = block.warps[thread.index / LANES];
  if (whole && warp.lanes < LANES) fail("%s in a warp of %d threads", what, warp.lanes);
  if (warp.exited) fail("%s: %d lanes of the warp have exited", what, warp.exited);
  if (warp.arrived && warp.what != what)
    fail("warp divergence: this lane is at %s, others at %s", what, warp.what);
  warp.what = what;
  warp.arguments[thread.lane()] = argument;
  if (++warp.arrived < warp.lanes) return block.wait(thread, what);
  warp.arrived = 0;
  run(warp, warp.arguments);
  const int first = thread.index - thread.lane();
  for (int lane = 0; lane < warp.lanes; lane++)
    if (lane != thread.lane()) block.wake(*block.threads[first + lane]);
  block.yield(thread);
}

struct Shuffle {
  uint64_t value, result;
  int source;
};

static uint64_t shuffle(const char* what, uint64_t x, int source, bool whole) {
  InEngine engine;
  if (source < 0 || source >= LANES) fail("%s: lane %d", what, source);
  Shuffle own{x, 0, source};
  warp_meet(what, &own, [](Warp& warp, void** lanes) {
    for (int lane = 0; lane < warp.lanes; lane++) {
      Shuffle& to = *static_cast<Shuffle*>(lanes[lane]);
      // A lane that does not exist gives no number.
      to.result = to.source < warp.lanes ? static_cast<Shuffle*>(lanes[to.source])->value : ~uint64_t(0);
    }
  }, whole);
  return own.result;
}

static float shuffle(const char* what, float x, int source) {
  return __uint_as_float(uint32_t(shuffle(what, __float_as_uint(x), source, true)));
}
float shuffle_xor(float x, int mask) { return shuffle("shuffle_xor", x, self().lane() ^ mask); }
float shuffle_index(float x, int lane) { return shuffle("shuffle_index", x, lane); }

uint64_t shuffle_bits_xor(uint64_t x, int mask) { return shuffle("__shfl_xor_sync", x, self().lane() ^ mask, false); }
uint64_t shuffle_bits_down(uint64_t x, int lanes) {
  const int lane = self().lane();
  return shuffle("__shfl_down_sync", x, lane + lanes < LANES ? lane + lanes : lane, false);
}

bool any_lane(bool holds) {
  InEngine engine;
  warp_meet("any_lane", &holds, [](Warp& warp, void** lanes) {
    bool any = false;
    for (int lane = 0; lane < warp.lanes; lane++) any |= *static_cast<bool*>(lanes[lane]);
    for (int lane = 0; lane < warp.lanes; lane++) *static_cast<bool*>(lanes[lane]) = any;
  }, true);
  return holds;
}

void warp_barrier() {
  InEngine engine;
  Warp& warp = self().block->warps[self().index / LANES];
  char* object = &warp.barrier_object[warp.barrier_phase];
  race_release(*self().fibre, object);
  warp_meet("warp_barrier", nullptr, [](Warp& warp, void**) { warp.barrier_phase ^= 1; }, false);
  race_acquire(*self().fibre, object);
}

static void barrier(int id, int threads, bool waits, int line) {
  Thread& thread = self();
  Block& block = *thread.block;
  NamedBarrier& barrier = block.barriers[id];
  if (barrier.arrived && barrier.expected != threads)
    fail("barrier %d: %d threads expected here, %d by those that arrived before", id, threads, barrier.expected);
  if (barrier.arrived && barrier.line != line)
    fail("barrier divergence: block_barrier at line %d and at line %d", barrier.line, line);
  barrier.expected = threads;
  barrier.line = line;
  char* object = &barrier.object[barrier.phase];
  race_release(*thread.fibre, object);
  barrier.arrived++;
  if (barrier.arrived < threads) {
    if (!waits) return;
    barrier.waiting.push_back(&thread);
    block.wait(thread, id ? "named_barrier_sync" : "block_barrier", line);
  } else {
    barrier.arrived = 0;
    barrier.phase ^= 1;
    for (Thread* waiting : barrier.waiting) block.wake(*waiting);
    barrier.waiting.clear();
    block.yield(thread);
    if (!waits) return;
  }
  race_acquire(*self().fibre, object);
}

void block_barrier(int line) {
  InEngine engine;
  Block& block = *self().block;
  for (auto& thread : block.threads)
    if (block.exited && thread->exited) fail("block_barrier at line %d: thread %d has exited", line, thread->index);
  barrier(0, int(block.threads.size()), true, line);
}

void named_barrier(int id, int threads, bool waits) {
  InEngine engine;
  if (id < 1 || id > 15) fail("named barrier %d: 1 to 15", id);
  if (threads % LANES || threads <= 0 || threads > int(self().block->threads.size()))
    fail("named barrier %d: %d threads: whole warps of the block", id, threads);
  barrier(id, threads, waits, 0);
}

void setmaxnreg(int registers) {
  InEngine engine;
  if (registers % 8 || registers < 24 || registers > 256) fail("setmaxnreg %d: a multiple of 8, 24 to 256", registers);
  self().registers = registers;
}

void check_thread_end(Thread& thread) {
  Block& block = *thread.block;
  Warp& warp = block.warps[thread.index / LANES];
  if (warp.arrived) fail("exits while %d lanes of its warp wait at %s", warp.arrived, warp.what);
  if (block.barriers[0].arrived)
    fail("exits while %d threads wait at block_barrier line %d", block.barriers[0].arrived, block.barriers[0].line);
  for (const Copy& copy : thread.copies)
    if (copy.kind != Copy::commit) fail("exits with a cp.async in flight");
  thread.copies.clear();
  if (!warp.wgmma.empty()) fail("exits with a wgmma in flight");
  warp.exited++;
  block.exited++;
}

void check_block_end(Block& block) {
  for (int id = 0; id < 16; id++)
    if (block.barriers[id].arrived)
      fail("the block ends with %d arrivals at barrier %d, which expects %d", block.barriers[id].arrived, id,
           block.barriers[id].expected);
  if (!block.tma_loads.empty()) fail("the block ends with a TMA load in flight");
  int registers = 0;
  for (auto& thread : block.threads) registers += thread->registers;
  if (registers > 65536) fail("setmaxnreg: %d registers in all, an SM has 65536", registers);
  for (size_t i = 0; i < block.wgmma_log.size(); i++)
    for (size_t warp = 4 * i; warp < 4 * i + 4 && warp < block.warps.size(); warp++)
      if (block.warps[warp].wgmma_issued != block.wgmma_log[i].size())
        fail("warp %zu took part in %zu of its warpgroup's %zu wgmma", warp, block.warps[warp].wgmma_issued,
             block.wgmma_log[i].size());
}

}  // namespace cuda_host
