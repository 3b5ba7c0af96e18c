// Shared memory, cp.async, mbarriers, TMA. Copies land as late as allowed: their targets hold NaN until someone waits.
#include <algorithm>

#include "block.h"

namespace cuda_host {

// ---- Shared memory --------------------------------------------------------------------------------------------------

unsigned char* shared_memory() { return self().block->shared; }

uint32_t shared_address(const void* shared) {
  const Block& block = *self().block;
  const size_t offset = static_cast<const unsigned char*>(shared) - block.shared;
  if (offset > block.shared_bytes) fail("an address outside shared memory");
  return static_cast<uint32_t>(offset);
}

size_t Block::shared_offset(const void* pointer, size_t bytes, size_t alignment, const char* what) const {
  const size_t offset = static_cast<const unsigned char*>(pointer) - shared;
  if (offset > shared_bytes || bytes > shared_bytes - offset)
    fail("%s: an address outside shared memory (%zu bytes)", what, shared_bytes);
  if (offset % alignment) fail("%s: shared address %zu is not %zu-byte aligned", what, offset, alignment);
  return offset;
}

void Block::check_landed(size_t offset, size_t bytes, const char* what) const {
  for (size_t chunk = offset / 16; chunk < (offset + bytes + 15) / 16; chunk++)
    if (in_flight[chunk])
      fail("%s reads shared byte %zu, where a copy of thread %d is in flight: a wait or a barrier is missing", what,
           chunk * 16, in_flight[chunk] - 1);
}

static void mark_in_flight(Block& block, size_t offset, size_t bytes, int owner, const char* what) {
  for (size_t chunk = offset / 16; chunk < (offset + bytes) / 16; chunk++) {
    if (block.in_flight[chunk]) fail("%s to shared byte %zu, where another copy is in flight", what, chunk * 16);
    block.in_flight[chunk] = owner + 1;
  }
}

// Bytes of an asynchronous copy arrive, as a write of the thread that issued it.
static void land(Block& block, const Thread& issuer, unsigned char* to, const unsigned char* bytes, size_t count,
                 bool generic_proxy) {
  const size_t offset = to - block.shared;
  race_write(issuer.fibre, to, count);
  for (size_t i = 0; i < count; i += 16) {
    memcpy(to + i, bytes + i, 16);
    block.in_flight[(offset + i) / 16] = 0;
    block.unfenced[(offset + i) / 16] = generic_proxy ? issuer.index + 1 : 0;
  }
}

static void poison(unsigned char* to, size_t bytes) {
  race_write(self().fibre, to, bytes);
  for (size_t i = 0; i < bytes; i += 16) memset(to + i, 0xff, 16);
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

static Mbarrier& find_barrier(uint64_t* place, const char* what) {
  for (Mbarrier& barrier : self().block->mbarriers)
    if (barrier.place == place) {
      race_read(self().fibre, place, 8);
      return barrier;
    }
  fail("%s: no mbarrier was made at this place", what);
}

static void count(Block& block, Mbarrier& barrier, int arrivals, int bytes) {
  if (arrivals > barrier.pending) fail("an mbarrier has more arrivals than the %d it expects", barrier.expected);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.expected;
  for (Thread* thread : barrier.waiting) block.wake(*thread);
  barrier.waiting.clear();
}

void mbarrier_init(uint64_t* place, int arrivals) {
  InEngine engine;
  Block& block = *self().block;
  block.shared_offset(place, 8, 8, "mbarrier_init");
  if (arrivals < 1) fail("mbarrier_init: %d arrivals", arrivals);
  for (const Mbarrier& barrier : block.mbarriers)
    if (barrier.place == place) fail("mbarrier_init: made twice");
  race_write(self().fibre, place, 8);
  block.mbarriers.emplace_back();
  Mbarrier& barrier = block.mbarriers.back();
  barrier.place = place;
  barrier.expected = barrier.pending = arrivals;
  barrier.waiting.reserve(block.threads.size());
}

void mbarrier_arrive(uint64_t* place, int bytes) {
  InEngine engine;
  Mbarrier& barrier = find_barrier(place, "mbarrier_arrive");
  race_release(self().fibre, &barrier.object[barrier.phase % 2]);
  count(*self().block, barrier, 1, bytes);
  self().block->yield(self());
}

void mbarrier_arrive_copies(uint64_t* place) {
  InEngine engine;
  Copy event;
  event.kind = Copy::arrive;
  event.barrier = &find_barrier(place, "mbarrier_arrive_copies");
  self().copies.push_back(event);
}

void mbarrier_wait(uint64_t* place, int parity) {
  InEngine engine;
  Thread& thread = self();
  if (parity != 0 && parity != 1) fail("mbarrier_wait: parity %d", parity);
  Mbarrier& barrier = find_barrier(place, "mbarrier_wait");
  // A fresh barrier counts as having ended a phase of parity 1.
  while (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(&thread);
    thread.block->wait(thread, "mbarrier_wait");
  }
  race_acquire(thread.fibre, &barrier.object[parity]);
}

// ---- cp.async -------------------------------------------------------------------------------------------------------

void copy_async_16(void* shared, const void* global, bool valid) {
  InEngine engine;
  Thread& thread = self();
  Block& block = *thread.block;
  const size_t offset = block.shared_offset(shared, 16, 16, "copy_async_16");
  Copy copy;
  copy.kind = Copy::copy;
  copy.to = shared;
  if (valid) {
    if (reinterpret_cast<uintptr_t>(global) % 16) fail("copy_async_16: the global address is not 16-byte aligned");
    memcpy(copy.bytes, global, 16);
  }
  mark_in_flight(block, offset, 16, thread.index, "copy_async_16");
  poison(static_cast<unsigned char*>(shared), 16);
  thread.copies.push_back(copy);
}

void copy_async_commit() {
  InEngine engine;
  self().copies.push_back(Copy());
}

static void land_first(Thread& thread) {
  const Copy copy = thread.copies.front();
  thread.copies.pop_front();
  Block& block = *thread.block;
  if (copy.kind == Copy::copy) land(block, thread, static_cast<unsigned char*>(copy.to), copy.bytes, 16, true);
  if (copy.kind == Copy::arrive) {
    race_release(thread.fibre, &copy.barrier->object[copy.barrier->phase % 2]);
    count(block, *copy.barrier, 1, 0);
  }
}

void copy_async_wait(int groups) {
  InEngine engine;
  Thread& thread = self();
  int committed = 0;
  for (const Copy& copy : thread.copies) committed += copy.kind == Copy::commit;
  while (committed > groups) {
    committed -= thread.copies.front().kind == Copy::commit;
    land_first(thread);
  }
}

void fence_proxy_async() {
  InEngine engine;
  Thread& thread = self();
  for (int& owner : thread.block->unfenced)
    if (owner == thread.index + 1) owner = 0;
}

// ---- TMA ------------------------------------------------------------------------------------------------------------

// Our own layout of the map: address, rank, then sizes, strides in bytes and box.
void tensor_map(uint64_t opaque[16], int rank, const void* base, const uint32_t* sizes, const uint64_t* strides_bytes,
                const uint32_t* box) {
  if (reinterpret_cast<uintptr_t>(base) % 16) throw KernelError("tensor map: the address is not 16-byte aligned");
  if (box[0] != 64) throw KernelError("tensor map: 128-byte swizzle takes rows of 64 elements");
  opaque[0] = reinterpret_cast<uintptr_t>(base);
  opaque[1] = rank;
  for (int i = 0; i < rank; i++) {
    opaque[2 + i] = sizes[i];
    opaque[6 + i] = i ? strides_bytes[i - 1] : 2;
    opaque[10 + i] = box[i];
    if (i && strides_bytes[i - 1] % 16) throw KernelError("tensor map: a stride is no multiple of 16 bytes");
  }
}

void tma_load(void* shared, const uint64_t* map, uint64_t* place, int rank, const int* at) {
  InEngine engine;
  Thread& thread = self();
  Block& block = *thread.block;
  if (map[1] != uint64_t(rank)) fail("tma_load: a map of rank %d, used with rank %d", int(map[1]), rank);
  uint64_t box[4] = {1, 1, 1, 1};
  for (int i = 0; i < rank; i++) box[i] = map[10 + i];
  const size_t rows = box[1] * box[2] * box[3];
  const size_t offset = block.shared_offset(shared, rows * 128, 1024, "tma_load");

  TmaLoad load{&thread, static_cast<unsigned char*>(shared), {}, &find_barrier(place, "tma_load")};
  load.bytes.assign(rows * 128, 0);
  for (size_t row = 0; row < rows; row++) {
    const int64_t y = at[1] + int64_t(row % box[1]);
    const int64_t z = at[2] + int64_t(row / box[1] % box[2]);
    const int64_t w = at[3] + int64_t(row / box[1] / box[2]);
    const auto inside = [&](int i, int64_t x) { return i >= rank || (x >= 0 && x < int64_t(map[2 + i])); };
    if (!inside(1, y) || !inside(2, z) || !inside(3, w)) continue;
    const char* from = reinterpret_cast<const char*>(map[0]) + y * int64_t(map[7]) + z * int64_t(map[8]) +
                       (rank == 4 ? w * int64_t(map[9]) : 0);
    for (int x = 0; x < 64; x++) {
      const size_t linear = row * 128 + x * 2;
      if (inside(0, at[0] + x)) memcpy(&load.bytes[linear ^ (linear >> 3 & 0x70)], from + (at[0] + x) * 2, 2);
    }
  }
  mark_in_flight(block, offset, rows * 128, thread.index, "tma_load");
  poison(load.to, rows * 128);
  block.tma_loads.push_back(std::move(load));
}

// Nobody can run: now, at the latest, an asynchronous copy that someone may wait for lands.
bool Block::land_something() {
  std::vector<Thread*> waiting;
  for (auto& thread : threads)
    if (std::any_of(thread->copies.begin(), thread->copies.end(), [](auto& c) { return c.kind == Copy::arrive; }))
      waiting.push_back(thread.get());
  const size_t choices = waiting.size() + tma_loads.size();
  if (!choices) return false;
  size_t choice = 0;
  if (options.schedule == Schedule::newest_first) choice = choices - 1;
  if (options.schedule == Schedule::shuffled) choice = next_random() % choices;
  if (choice < waiting.size()) {
    Thread& thread = *waiting[choice];
    for (bool arrived = false; !arrived;) {
      arrived = thread.copies.front().kind == Copy::arrive;
      land_first(thread);
    }
    return true;
  }
  choice -= waiting.size();
  TmaLoad load = std::move(tma_loads[choice]);
  tma_loads.erase(tma_loads.begin() + choice);
  land(*this, *load.issuer, load.to, load.bytes.data(), load.bytes.size(), false);
  race_release(load.issuer->fibre, &load.barrier->object[load.barrier->phase % 2]);
  count(*this, *load.barrier, 0, -int(load.bytes.size()));
  return true;
}

}  // namespace cuda_host
