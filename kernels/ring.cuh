// A ring of stages in shared memory for tiles. All warps fill a stage together with cp.async; each warp
// reads it at its own pace. It uses mbarriers, no barrier of the whole block.
#pragma once

#include "primitives.cuh"

// Stage i % stages holds the i-th pair of tiles; at most `copies_ahead` pairs are in flight.
template <int stages_, int copies_ahead_, int warps, int tile_bytes>
struct Ring {
  static constexpr int stages = stages_, copies_ahead = copies_ahead_;
  static constexpr int bytes = stages * (2 * tile_bytes + 2 * static_cast<int>(sizeof(uint64_t)));
  static_assert(stages > copies_ahead, "a warp must not wait for a stage that it holds itself");

  unsigned char* tiles;  // 1024-byte aligned; the barriers follow them
  int count;             // number of pairs

  static PRIMITIVE int stage(int i) { return static_cast<uint32_t>(i) % stages; }
  static PRIMITIVE int parity(int i) { return static_cast<uint32_t>(i) / stages % 2; }

  PRIMITIVE unsigned char* first(int i) const { return tiles + stage(i) * (2 * tile_bytes); }
  PRIMITIVE unsigned char* second(int i) const { return first(i) + tile_bytes; }
  // A stage is filled: one arrival per warp.
  PRIMITIVE uint64_t* full(int i) const {
    return reinterpret_cast<uint64_t*>(tiles + stages * 2 * tile_bytes) + stage(i);
  }
  // A stage was read: one arrival per warp that reads.
  PRIMITIVE uint64_t* empty(int i) const { return full(i) + stages; }

  // Called by one thread, before a block_barrier.
  PRIMITIVE void init(int readers) const {
    for (int i = 0; i < stages; i++) {
      mbarrier_init(full(i), warps);
      mbarrier_init(empty(i), readers);
    }
    fence_proxy_async();
  }

  // Starts this thread's share of the copy of pair i: `start(i)`.
  template <class Start>
  PRIMITIVE void copy(int i, const Start& start) const {
    if (i < count) {
      if (i >= stages) mbarrier_wait(empty(i), parity(i - stages));
      start(i);
    }
    copy_async_commit();
  }

  // Starts the first copies, before the first `pass`.
  template <class Start>
  PRIMITIVE void begin(const Start& start) const {
    for (int i = 0; i < copies_ahead - 1; i++) copy(i, start);
  }

  // Starts the copy of a later pair, and signals this thread's share of pair i.
  template <class Start>
  PRIMITIVE void pass(int i, int thread, const Start& start) const {
    copy(i + copies_ahead - 1, start);
    copy_async_wait<copies_ahead - 1>();
    fence_proxy_async();
    warp_barrier();
    if (thread % 32 == 0) mbarrier_arrive(full(i));
  }

  PRIMITIVE void wait(int i) const { mbarrier_wait(full(i), parity(i)); }

  PRIMITIVE void release(int i, int thread) const {
    warp_barrier();
    if (thread % 32 == 0) mbarrier_arrive(empty(i));
  }
};
