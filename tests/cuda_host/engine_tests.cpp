// The engine's own tests: instructions give what a plain loop gives, and each broken rule is reported as such.
#include <atomic>
#include <cstdio>
#include <vector>

#include "engine.h"
#include "primitives.cuh"

using cuda_host::KernelError, cuda_host::launch, cuda_host::Options, cuda_host::Schedule, cuda_host::TensorCore;

static std::atomic<int> checks{0}, failures{0};

static void check(bool good, const char* what) {
  checks++;
  if (good) return;
  printf("engine: %s: wrong\n", what);
  failures++;
}

template <class Run>
static void each_schedule(Run run) {
  for (Schedule schedule : {Schedule::up, Schedule::shuffled, Schedule::newest_first}) {
    Options options;
    options.schedule = schedule;
    options.workers = 2;
    run(options);
  }
}

// `body` must end in a KernelError that contains `message`, whatever the schedule.
static void refused(const char* message, int threads, const std::function<void()>& body, size_t shared = 32768) {
  each_schedule([&](const Options& options) {
    checks++;
    std::string got = "nothing";
    try {
      launch(options, 1, threads, shared, body);
    } catch (const KernelError& error) {
      got = error.what();
    }
    if (strstr(got.c_str(), message)) return;
    printf("engine: expected '%s', got '%s'\n", message, got.c_str());
    failures++;
  });
}

// `body` runs without an error; it checks its results itself.
static void accepted(const char* what, int threads, const std::function<void()>& body, size_t shared = 32768) {
  each_schedule([&](const Options& options) {
    try {
      launch(options, 3, threads, shared, body);
    } catch (const KernelError& error) {
      printf("engine: %s: %s\n", what, error.what());
      failures++;
    }
  });
}

// Small whole numbers, so that every order of summation gives the same.
static float a_of(int row, int k) { return float((row * 5 + k * 3) % 7 - 3); }
static float b_of(int k, int column) { return float((column * 3 + k * 5) % 9 - 4); }
static float product(int row, int column, int ks) {
  float sum = 0;
  for (int k = 0; k < ks; k++) sum += a_of(row, k) * b_of(k, column);
  return sum;
}
static uint16_t bits(float x) { return to_bf16(x).bits; }
static int tid() { return int(threadIdx.x); }

alignas(16) static uint16_t global[64 * 64];
static void* at(int offset) { return dynamic_shared_memory() + offset; }

// ---- What instructions give -----------------------------------------------------------------------------------------

static void test_mma() {
  accepted("mma and ldmatrix", 32, [] {
    uint16_t* a = static_cast<uint16_t*>(at(0));      // 16 x 16
    uint16_t* b = static_cast<uint16_t*>(at(1024));   // [column][k], 8 x 16 used twice
    uint16_t* bt = static_cast<uint16_t*>(at(2048));  // [k][column], 16 x 16
    for (int i = tid(); i < 256; i += 32) {
      a[i] = bits(a_of(i / 16, i % 16));
      b[i] = bits(b_of(i % 16, i / 16));
      bt[i] = bits(b_of(i / 16, i % 16));
    }
    warp_barrier();
    const int lane = tid(), row = lane % 8, matrix = lane / 8;
    uint32_t ra[4], rb[4], rt[4];
    ldmatrix_x4(ra, a + (row + matrix % 2 * 8) * 16 + matrix / 2 * 8);
    ldmatrix_x4(rb, b + (row + matrix / 2 * 8) * 16 + matrix % 2 * 8);
    ldmatrix_x4_transposed(rt, bt + (row + matrix % 2 * 8) * 16 + matrix / 2 * 8);
    for (int half = 0; half < 2; half++) {
      float d[4] = {1, 1, 1, 1}, e[4] = {};
      mma_bf16_16x8x16(d, ra, rb + 2 * half);
      mma_bf16_16x8x16(e, ra, rt + 2 * half);
      for (int i = 0; i < 4; i++) {
        const float expected = product(lane / 4 + i / 2 * 8, 8 * half + lane % 4 * 2 + i % 2, 16);
        check(d[i] == expected + 1 && e[i] == expected, "mma of ldmatrix");
      }
    }
    check(shuffle_xor(float(lane), 5) == float(lane ^ 5), "shuffle_xor");
    check(shuffle_index(float(lane), (lane + 3) % 32) == float((lane + 3) % 32), "shuffle_index");
    check(any_lane(lane == 9) && !any_lane(lane == 32), "any_lane");
  });
}

// a [64 rows][64 k] and b [64 columns][64 k] in swizzled tiles, K- or MN-major.
static void fill_tiles(bool a_mn, bool b_mn) {
  for (int i = tid(); i < 64 * 64; i += 128) {
    const int row = i / 64, column = i % 64;
    const uint16_t a = bits(a_mn ? a_of(column, row) : a_of(row, column));
    const uint16_t b = bits(b_mn ? b_of(row, column) : b_of(column, row));
    memcpy(at(swizzle_128(i * 2)), &a, 2);
    memcpy(at(8192 + swizzle_128(i * 2)), &b, 2);
  }
  fence_proxy_async();
  block_barrier();
}

template <Major a_major, Major b_major, bool registers>
static void test_wgmma() {
  accepted("wgmma", 128, [] {
    fill_tiles(a_major == Major::MN, b_major == Major::MN);
    const int lane = tid() % 32, row = tid() / 32 * 16 + lane / 4;
    float d[32];
    uint32_t a[4][4];
    for (int step = 0; step < 4; step++)
      for (int i = 0; i < 4; i++) {
        const int k = step * 16 + lane % 4 * 2 + i / 2 * 8;
        a[step][i] = pack_bf16(a_of(row + i % 2 * 8, k), a_of(row + i % 2 * 8, k + 1));
      }
    wgmma_fence();
    for (int step = 0; step < 4; step++) {
      const uint64_t a_at = wgmma_descriptor(at(step * (a_major == Major::K ? 32 : 2048)));
      const uint64_t b_at = wgmma_descriptor(at(8192 + step * (b_major == Major::K ? 32 : 2048)));
      if (registers)
        wgmma_m64n64k16_bf16<b_major>(d, a[step], b_at, step > 0);
      else
        wgmma_m64n64k16_bf16<a_major, b_major>(d, a_at, b_at, step > 0);
    }
    wgmma_commit();
    check(d[5] != d[5], "a wgmma result before the wait is NaN");
    wgmma_wait<0>();
    wgmma_hold(d);
    for (int i = 0; i < 32; i++)
      check(d[i] == product(row + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2, 64), "wgmma");
  });
}

static void test_copies() {
  for (int i = 0; i < 64 * 64; i++) global[i] = bits(a_of(i / 64, i % 64));
  accepted("cp.async", 32, [] {
    float* to = static_cast<float*>(at(tid() * 16));
    copy_async_16(to, global + tid() * 8, tid() != 3);
    copy_async_commit();
    check(to[0] != to[0], "a copy's target before the wait is NaN");
    copy_async_wait<1>();
    check(to[0] != to[0], "a copy's target while its group may be in flight is NaN");
    copy_async_wait<0>();
    const uint16_t zeros[8] = {};
    check(memcmp(to, tid() == 3 ? zeros : global + tid() * 8, 16) == 0, "cp.async");
  });
  // A producer warp fills through TMA and cp.async, a consumer warp waits on the mbarrier.
  uint64_t opaque[16];
  const uint32_t sizes[3] = {64, 4, 16}, box[3] = {64, 1, 32};
  const uint64_t strides[2] = {128, 512};
  cuda_host::tensor_map(opaque, 3, global, sizes, strides, box);
  TensorMap map;
  memcpy(map.opaque, opaque, sizeof opaque);
  accepted("TMA", 64, [&] {
    uint64_t* full = static_cast<uint64_t*>(at(0));
    if (tid() == 0) mbarrier_init(full, 33);
    fence_proxy_async();
    block_barrier();
    if (tid() < 32) {
      if (tid() == 0) {
        mbarrier_arrive_expect(full, 32 * 128);
        tma_load_3d(at(1024), &map, full, 0, 1, 2);
      }
      copy_async_16(at(8192 + tid() * 16), global + tid() * 8, true);
      mbarrier_arrive_copies(full);
      copy_async_wait<0>();
    } else {
      mbarrier_wait(full, 0);
      bool good = memcmp(at(8192), global, 512) == 0;
      for (int row = 0; row < 32; row++)
        for (int i = 0; i < 64; i++) {
          uint16_t got, expected = row < 14 ? global[((row + 2) * 4 + 1) * 64 + i] : 0;
          memcpy(&got, at(1024 + swizzle_128(row * 128 + i * 2)), 2);
          good &= got == expected;
        }
      check(good, "TMA, mbarrier");
    }
    block_barrier();
  });
}

static void test_barriers() {
  accepted("named barriers", 96, [] {
    int* box = static_cast<int*>(at(0));
    for (int round = 0; round < 3; round++) {
      if (tid() < 32) {
        if (tid() == 0) *box = round;
        named_barrier_arrive(1, 64);
        named_barrier_sync(2, 64);
      } else if (tid() < 64) {
        named_barrier_sync(1, 64);
        check(*box == round, "named barrier");
        named_barrier_arrive(2, 64);
      }
    }
    block_barrier();
  });
}

// A block's last warp may be a part of one: its barrier and its shuffles are those of the threads that it has.
static void test_part_warps() {
  accepted("40 threads", 40, [] {
    float* box = static_cast<float*>(at(0));
    box[tid()] = tid();
    warp_barrier();
    const int neighbour = tid() ^ 1, other = tid() + 4;
    check(box[neighbour] == neighbour, "a part warp's barrier");
    check(cuda_host::shuffle_bits_xor(uint64_t(tid()), 1) == uint64_t(neighbour), "a part warp's shuffle");
    const uint64_t down = cuda_host::shuffle_bits_down(uint64_t(tid()), 4);
    if (tid() < 28 || (tid() >= 32 && tid() < 36)) check(down == uint64_t(other), "a part warp's shuffle down");
    if (tid() >= 36) check(down == ~uint64_t(0), "a shuffle from a lane that does not exist");
    block_barrier();
  });
  refused("mma_bf16_16x8x16 in a warp of 8 threads", 40, [] {
    float d[4] = {};
    uint32_t a[4] = {}, b[2] = {};
    mma_bf16_16x8x16(d, a, b);
  });
}

// The tensor-core modes agree to f32's last places, differ in bits, and do not see zero products.
static void test_modes() {
  float results[3][2][4];
  for (TensorCore mode : {TensorCore::chain, TensorCore::hopper, TensorCore::hashed}) {
    Options options;
    options.tensor_core = mode;
    launch(options, 1, 32, 0, [&] {
      for (int zero = 0; zero < 2; zero++) {
        float d[4] = {1.0f / 3, 3, 5.5f, 1e-3f};
        uint32_t a[4], b[2];
        for (int i = 0; i < 4; i++) a[i] = zero ? 0 : pack_bf16(1.01f + tid() * 0.37f + i, 0.7f - tid() * 0.11f);
        for (int i = 0; i < 2; i++) b[i] = pack_bf16(1.3f - tid() * 0.21f, 0.9f + tid() * 0.17f + i);
        mma_bf16_16x8x16(d, a, b);
        if (tid() == 5) memcpy(results[int(mode)][zero], d, sizeof d);
      }
    });
  }
  for (int mode = 1; mode < 3; mode++)
    for (int i = 0; i < 4; i++) {
      check(fabsf(results[mode][0][i] - results[0][0][i]) <= 4e-6f * fabsf(results[0][0][i]), "a mode's size");
      check(results[mode][1][i] == results[0][1][i], "products of zero are invisible");
    }
  check(memcmp(results[0][0], results[1][0], 16) && memcmp(results[0][0], results[2][0], 16), "a mode's own bits");
}

// ---- What is refused ------------------------------------------------------------------------------------------------

static void test_refused_threads() {
  refused("1 to 1024", 1025, [] {});
  refused("the limit is 232448", 32, [] {}, (227 << 10) + 1);
  refused("warp divergence", 32, [] { tid() < 16 ? (void)shuffle_xor(1, 1) : warp_barrier(); });
  refused("any_lane in a warp of 8 threads", 40, [] { any_lane(true); });
  refused("exit", 32, [] {
    if (tid() != 7) shuffle_xor(1, 1);
  });
  refused("exit", 64, [] {
    if (tid() < 32) block_barrier();
  });
  refused("barrier divergence", 64, [] {
    if (tid() < 32)
      block_barrier();
    else
      block_barrier();
  });
  refused("deadlock: threads 32 waiting at mbarrier_wait, 32 waiting at named_barrier_sync", 64, [] {
    uint64_t* barrier = static_cast<uint64_t*>(at(0));
    if (tid() == 0) mbarrier_init(barrier, 1);
    block_barrier();
    tid() < 32 ? named_barrier_sync(1, 64) : mbarrier_wait(barrier, 0);
  });
  refused("threads expected here", 64, [] { named_barrier_arrive(1, tid() == 0 ? 32 : 64); });
  refused("the block ends with 32 arrivals at barrier 3", 64, [] {
    if (tid() < 32) named_barrier_arrive(3, 64);
  });
  refused("1 to 15", 64, [] { named_barrier_sync(0, 64); });
  refused("a multiple of 8", 128, [] { setmaxnreg_increase<100>(); });
}

static void copy(int to, int from) { copy_async_16(at(to), reinterpret_cast<char*>(global) + from, true); }

static void test_refused_copies() {
  refused("16-byte aligned", 32, [] { copy(tid() * 16 + 8, tid() * 16); });
  refused("global address is not 16-byte aligned", 32, [] { copy(tid() * 16, tid() * 16 + 8); });
  refused("outside shared memory", 32, [] { copy(32768 - 8 + tid() * 16, 0); });
  refused("where another copy is in flight", 32, [] {
    copy(tid() / 2 * 16, 0);
    warp_barrier();
  });
  refused("exits with a cp.async in flight", 32, [] { copy(tid() * 16, 0); });
  refused("a wait or a barrier is missing", 32, [] {  // commit without wait
    uint32_t r[4];
    copy(tid() * 16, tid() * 16);
    copy_async_commit();
    warp_barrier();
    ldmatrix_x4(r, at(tid() * 16));
    copy_async_wait<0>();
  });
  refused("a wait or a barrier is missing", 32, [] {  // the newest group may be in flight
    uint32_t r[4];
    copy(tid() * 16, tid() * 16);
    copy_async_commit();
    copy(1024 + tid() * 16, tid() * 16);
    copy_async_commit();
    copy_async_wait<1>();
    warp_barrier();
    ldmatrix_x4(r, at(1024 + tid() * 16));
    copy_async_wait<0>();
  });
  refused("is not 16-byte aligned", 32, [] {
    uint32_t r[4];
    ldmatrix_x4(r, at(tid() * 16 + 4));
  });
  refused("no mbarrier was made", 32, [] { mbarrier_arrive(static_cast<uint64_t*>(at(0))); });
  refused("more arrivals than the 1", 32, [] {
    uint64_t* barrier = static_cast<uint64_t*>(at(0));
    if (tid() == 0) {
      mbarrier_init(barrier, 1);
      mbarrier_arrive_expect(barrier, 16);
      mbarrier_arrive(barrier);
    }
  });
}

static float registers[128][32];  // a thread's accumulators

static void issue(bool fence = true) {
  if (fence) wgmma_fence();
  wgmma_m64n64k16_bf16<Major::K, Major::K>(registers[tid()], wgmma_descriptor(at(0)), wgmma_descriptor(at(8192)), false);
  wgmma_commit();
}

static void test_refused_wgmma() {
  const size_t shared = 16384;
  refused("without wgmma_fence", 128, [] { issue(false); }, shared);
  refused("exits with a wgmma in flight", 128, [] { issue(); }, shared);
  refused("was written before wgmma_wait", 128, [] {
    issue();
    if (tid() == 77) registers[77][3] = 0;
    wgmma_wait<0>();
  }, shared);
  refused("was changed before wgmma_wait", 128, [] {
    issue();
    if (tid() == 77) memset(at(8192), 0, 16);
    block_barrier();
    wgmma_wait<0>();
  }, shared);
  refused("without its fence_proxy_async", 128, [] {
    for (int i = tid(); i < 512; i += 128) copy(i * 16, i * 16);
    copy_async_commit();
    copy_async_wait<0>();
    block_barrier();
    issue();
  }, shared);
  refused("a wait or a barrier is missing", 128, [] {
    for (int i = tid(); i < 512; i += 128) copy(i * 16, i * 16);
    copy_async_commit();
    issue();
  }, shared);
  refused("took part in 0 of its warpgroup's 1 wgmma", 128, [] {
    if (tid() >= 32) return;
    issue();
    wgmma_wait<0>();
  }, shared);
  refused("outside shared memory", 128, [] { issue(); }, 16384 - 1024);
}

// Two writers of a shared float, a warp barrier or nothing between them: ThreadSanitizer must see the second case.
static void race(bool ordered) {
  launch(Options(), 1, 32, 16, [&] {
    float* shared = static_cast<float*>(at(0));
    if (tid() == 3) *shared = 1;
    if (ordered) warp_barrier();
    if (tid() == 9) *shared = 2;
  });
}

int main(int count, char** arguments) {
  if (count == 2 && !strcmp(arguments[1], "race")) return race(false), 0;
  race(true);
  test_mma();
  test_wgmma<Major::K, Major::K, false>();
  test_wgmma<Major::K, Major::MN, false>();
  test_wgmma<Major::MN, Major::K, false>();
  test_wgmma<Major::MN, Major::MN, true>();
  test_wgmma<Major::K, Major::K, true>();
  test_copies();
  test_barriers();
  test_part_warps();
  test_modes();
  test_refused_threads();
  test_refused_copies();
  test_refused_wgmma();
  printf("engine: %d checks, %d wrong\n", checks.load(), failures.load());
  return failures != 0;
}
