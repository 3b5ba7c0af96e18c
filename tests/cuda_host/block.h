// A block while it runs: what the files of the engine share.
#pragma once

#include <cstdarg>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <vector>

#include "engine.h"
#include "fibre.h"

namespace cuda_host {

constexpr int LANES = 32;

uint64_t mix(uint64_t x);  // a hash of 64 bits (splitmix64's finaliser)

struct Block;
struct Mbarrier;

struct Copy {
  enum Kind { copy, commit, arrive } kind = commit;
  void* to = nullptr;
  unsigned char bytes[16] = {};
  Mbarrier* barrier = nullptr;  // of an arrive
};

struct Thread {
  Block* block = nullptr;
  int index = 0;
  Coordinates place;
  Fibre* fibre = nullptr;  // from a pile that launches share, while the thread has one
  const char* waits_for = nullptr;  // null while it can run
  int waits_line = 0;
  bool exited = false;
  std::vector<Copy> copies;    // cp.async in flight, in order
  bool wgmma_fenced = false;
  int registers = 0;           // after setmaxnreg

  int lane() const { return index % LANES; }
};

// A wgmma of one warp: 16 of the 64 rows.
struct Wgmma {
  uint64_t a, b;
  bool a_in_registers, a_transposed, b_transposed, accumulate;
  int columns;
  bool committed = false;
  int group = 0;  // which commit
  float* d[LANES];
  const uint32_t* a_registers[LANES];
  std::vector<float> c;                         // 16 x columns
  std::vector<uint16_t> a_operand, b_operand;   // as read at issue: 16x16, 16 x columns
};

struct Warp {
  int lanes = LANES;  // fewer in a block's last warp
  int arrived = 0, exited = 0;
  const char* what = nullptr;
  void* arguments[LANES];
  int barrier_phase = 0;
  char barrier_object[2];
  std::deque<Wgmma> wgmma;  // in flight
  size_t wgmma_issued = 0;
  int wgmma_groups = 0;         // commits so far
};

struct NamedBarrier {
  int expected = 0, arrived = 0, phase = 0, line = 0;
  std::vector<Thread*> waiting;
  char object[2];
};

struct Mbarrier {
  uint64_t* place;
  int expected, pending;
  int bytes = 0;  // of TMA loads announced and not landed
  int phase = 0;
  std::vector<Thread*> waiting;
  char object[2];
};

struct TmaLoad {
  Thread* issuer;
  unsigned char* to;
  std::vector<unsigned char> bytes;  // as they will lie in shared memory
  Mbarrier* barrier;
};

struct Block {
  Options options;
  const std::function<void()>* body = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::deque<Mbarrier> mbarriers;
  std::vector<TmaLoad> tma_loads;
  // What each four warps' wgmma were, to check that they agree.
  std::vector<std::vector<std::pair<uint64_t, uint64_t>>> wgmma_log;

  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  // For each 16 bytes of shared memory: the thread, plus one, whose cp.async is in flight there, or whose cp.async
  // landed without a proxy fence since.
  std::vector<int> in_flight, unfenced;

  std::vector<Thread*> ready;  // a ring for `up`, else a pile
  size_t ready_first = 0, ready_count = 0;
  int exited = 0;  // threads
  uint64_t random = 0;
  Fibre main;
  std::exception_ptr error;
  char start_object = 0, end_object = 0;

  ~Block() { free(shared); }
  void run(dim3 index);
  void wake(Thread& thread);
  void wait(Thread& thread, const char* what, int line = 0);  // until woken
  void yield(Thread& thread);                                 // in a shuffled schedule, lets others go first
  uint64_t next_random() { return random = mix(random + 0x9e3779b97f4a7c15ull); }

  // Shared memory as the instructions see it.
  size_t shared_offset(const void* pointer, size_t bytes, size_t alignment, const char* what) const;
  void check_landed(size_t offset, size_t bytes, const char* what) const;
  bool land_something();  // when nothing else can run: one asynchronous copy
  void go_on(Thread& from);  // switches to whoever runs next

 private:
  Thread* take();
  void switch_to(Thread& from, Thread& next);
  void end();
  void fail_stuck();
};

// The thread that runs here.
Thread& self();

// Throws a KernelError at this thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A collective of a warp: `run(warp, arguments)` once all its lanes have come to it.
// `whole`: there must be 32.
void warp_meet(const char* what, void* argument, void (*run)(Warp&, void** arguments), bool whole = true);

// Ends of a thread and of a block: nothing may be left in flight.
void check_thread_end(Thread& thread);
void check_block_end(Block& block);

void wgmma_agree(Block& block, int warp, uint64_t a, uint64_t b);

}  // namespace cuda_host
