// Twins of the tensor cores' instructions: mma and ldmatrix of a warp, wgmma of a warpgroup.
#include "block.h"
#include "tensor_core.h"

namespace cuda_host {

namespace {

constexpr uint32_t POISON = 0xff85a5a5u;  // a signalling NaN: arithmetic on it changes its bits

float half_of(uint32_t packed, int half) { return bf16_to_float(uint16_t(packed >> 16 * half)); }

// The place of a lane's packed pair `i` of a 16x16 fragment.
int fragment_row(int lane, int i) { return lane / 4 + 8 * (i % 2); }
int fragment_column(int lane, int i) { return lane % 4 * 2 + 8 * (i / 2); }

struct Mma {
  float* d;
  const uint32_t *a, *b;
};

void run_mma(Warp&, void** lanes) {
  float a[16 * 16], b[16 * 8], d[16 * 8];
  for (int lane = 0; lane < LANES; lane++) {
    const Mma& own = *static_cast<Mma*>(lanes[lane]);
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++)
        a[fragment_row(lane, i) * 16 + fragment_column(lane, i) + half] = half_of(own.a[i], half);
      for (int i = 0; i < 2; i++) {
        b[(lane % 4 * 2 + 8 * i + half) * 8 + lane / 4] = half_of(own.b[i], half);
        d[(lane / 4 + 8 * i) * 8 + lane % 4 * 2 + half] = own.d[2 * i + half];
      }
    }
  }
  tensor_core(self().block->options.tensor_core, a, b, d, 8);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++)
      static_cast<Mma*>(lanes[lane])->d[i] = d[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2];
}

struct Ldmatrix {
  uint32_t* r;
  const unsigned char* row;
};

uint16_t element(void** lanes, int row, int column) {
  uint16_t bits;
  memcpy(&bits, static_cast<Ldmatrix*>(lanes[row])->row + 2 * column, 2);
  return bits;
}

template <bool transposed>
void run_ldmatrix(Warp&, void** lanes) {
  for (int lane = 0; lane < LANES; lane++)
    for (int matrix = 0; matrix < 4; matrix++) {
      const int g = lane / 4, t = lane % 4;
      uint32_t pair = 0;
      for (int half = 0; half < 2; half++) {
        const int row = transposed ? 2 * t + half : g, column = transposed ? g : 2 * t + half;
        pair |= uint32_t(element(lanes, 8 * matrix + row, column)) << 16 * half;
      }
      static_cast<Ldmatrix*>(lanes[lane])->r[matrix] = pair;
    }
}

}  // namespace

void mma_bf16_16x8x16(float* d, const uint32_t* a, const uint32_t* b) {
  InEngine engine;
  Mma own{d, a, b};
  warp_meet("mma_bf16_16x8x16", &own, run_mma);
}

void ldmatrix_x4(uint32_t* r, const void* shared, bool transposed) {
  InEngine engine;
  const Block& block = *self().block;
  const char* what = transposed ? "ldmatrix_x4_transposed" : "ldmatrix_x4";
  block.check_landed(block.shared_offset(shared, 16, 16, what), 16, what);
  race_read(self().fibre, shared, 16);
  Ldmatrix own{r, static_cast<const unsigned char*>(shared)};
  warp_meet(what, &own, transposed ? run_ldmatrix<true> : run_ldmatrix<false>);
}

// ---- wgmma ----------------------------------------------------------------------------------------------------------

namespace {

// Rows `first` to `first + rows` of an operand in shared memory, m or n by k, as its descriptor says.
std::vector<uint16_t> read_operand(const Block& block, uint64_t descriptor, bool mn_major, int first, int rows) {
  if (descriptor >> 62 != 1) fail("wgmma: the descriptor's swizzle is not of 128 bytes");
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t columns_apart = (descriptor >> 16 & 0x3fff) << 4, groups_apart = (descriptor >> 32 & 0x3fff) << 4;
  std::vector<uint16_t> operand(rows * 16);
  for (int i = 0; i < rows; i++)
    for (int k = 0; k < 16; k++) {
      const int row = first + i;
      const uint32_t linear = mn_major ? start + row / 64 * columns_apart + k / 8 * groups_apart + k % 8 * 128 + row % 64 * 2
                                       : start + row / 8 * groups_apart + row % 8 * 128 + k * 2;
      const uint32_t place = linear ^ (linear >> 3 & 0x70);
      const unsigned char* from = block.shared + place;
      block.shared_offset(from, 2, 2, "wgmma");
      if (place % 16 == 0) {  // once a chunk
        block.check_landed(place, 16, "wgmma");
        race_read(self().fibre, from, 16);
        if (block.unfenced[place / 16])
          fail("wgmma reads shared byte %u, which thread %d's cp.async wrote, without its fence_proxy_async", place,
               block.unfenced[place / 16] - 1);
      }
      memcpy(&operand[i * 16 + k], from, 2);
    }
  return operand;
}

std::vector<uint16_t> read_a(const Block& block, const Wgmma& op, int warp) {
  if (!op.a_in_registers) return read_operand(block, op.a, op.a_transposed, warp % 4 * 16, 16);
  std::vector<uint16_t> operand(16 * 16);
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < 4; i++)
      for (int half = 0; half < 2; half++)
        operand[fragment_row(lane, i) * 16 + fragment_column(lane, i) + half] = op.a_registers[lane][i] >> 16 * half;
  return operand;
}

// The place of a lane's accumulator `i`.
int accumulator(const Wgmma& op, int lane, int i) {
  return (lane / 4 + 8 * (i / 2 % 2)) * op.columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

template <class Visit>
void each_accumulator(const Wgmma& op, Visit visit) {
  for (int lane = 0; lane < LANES; lane++)
    for (int i = 0; i < op.columns / 2; i++) visit(op.d[lane][i], accumulator(op, lane, i));
}

void check_untouched(const Wgmma& op) {
  each_accumulator(op, [](const float& d, int) {
    if (__float_as_uint(d) != POISON) fail("an accumulator of a wgmma in flight was written before wgmma_wait");
  });
}

struct Issue {
  Wgmma op;
  float* d;
  const uint32_t* a_registers;
};

void run_issue(Warp& warp, void** lanes) {
  Block& block = *self().block;
  const int index = self().index / LANES;
  Wgmma op = static_cast<Issue*>(lanes[0])->op;
  for (int lane = 0; lane < LANES; lane++) {
    const Issue& own = *static_cast<Issue*>(lanes[lane]);
    if (own.op.a != op.a || own.op.b != op.b || own.op.accumulate != op.accumulate)
      fail("wgmma: the lanes disagree about descriptors or accumulate");
    Thread& thread = *block.threads[index * LANES + lane];
    if (!thread.wgmma_fenced) fail("wgmma without wgmma_fence since the last wgmma_commit or wgmma_wait");
    op.d[lane] = own.d;
    op.a_registers[lane] = own.a_registers;
  }
  wgmma_agree(block, index, op.a, op.b * 4 + op.a_transposed * 2 + op.b_transposed);
  op.a_operand = read_a(block, op, index);
  op.b_operand = read_operand(block, op.b, op.b_transposed, 0, op.columns);

  bool in_flight = false;  // the accumulator comes from a wgmma before this one
  for (const Wgmma& before : warp.wgmma) in_flight |= before.d[0] == op.d[0];
  if (in_flight) check_untouched(op);
  op.c.assign(16 * op.columns, 0);
  each_accumulator(op, [&](float& d, int at) {
    if (op.accumulate && !in_flight) op.c[at] = d;
    d = __uint_as_float(POISON);
  });
  warp.wgmma.push_back(std::move(op));
}

void land_first(Warp& warp, int index) {
  Wgmma op = std::move(warp.wgmma.front());
  warp.wgmma.pop_front();
  const Block& block = *self().block;
  if (op.a_operand != read_a(block, op, index) ||
      op.b_operand != read_operand(block, op.b, op.b_transposed, 0, op.columns))
    fail("an operand of a wgmma in flight was changed before wgmma_wait");
  check_untouched(op);

  float a[16 * 16];
  std::vector<float> b(16 * op.columns);
  for (int i = 0; i < 16 * 16; i++) a[i] = bf16_to_float(op.a_operand[i]);
  for (int column = 0; column < op.columns; column++)
    for (int k = 0; k < 16; k++) b[k * op.columns + column] = bf16_to_float(op.b_operand[column * 16 + k]);
  tensor_core(block.options.tensor_core, a, b.data(), op.c.data(), op.columns);

  for (Wgmma& after : warp.wgmma)
    if (after.d[0] == op.d[0]) {  // still in flight: it takes the sum on
      if (after.accumulate) after.c = op.c;
      return;
    }
  each_accumulator(op, [&](float& d, int at) { d = op.c[at]; });
}

}  // namespace

void wgmma_agree(Block& block, int warp, uint64_t a, uint64_t b) {
  auto& log = block.wgmma_log[warp / 4];
  const size_t number = block.warps[warp].wgmma_issued++;
  if (number == log.size()) {
    if (block.warps.size() % 4) fail("wgmma: the block's last warpgroup is not whole");
    log.emplace_back(a, b);
  } else if (log[number] != std::make_pair(a, b)) {
    fail("wgmma: the warps of the warpgroup disagree about the operands");
  }
}

void wgmma(float* d, int columns, const uint32_t* a_registers, uint64_t a, bool a_transposed, uint64_t b,
           bool b_transposed, bool accumulate) {
  InEngine engine;
  Issue own;
  own.op.a = a;
  own.op.b = b;
  own.op.a_in_registers = a_registers != nullptr;
  own.op.a_transposed = a_transposed;
  own.op.b_transposed = b_transposed;
  own.op.accumulate = accumulate;
  own.op.columns = columns;
  own.d = d;
  own.a_registers = a_registers;
  warp_meet("wgmma", &own, run_issue);
}

void wgmma_fence() {
  InEngine engine;
  self().wgmma_fenced = true;
  warp_meet("wgmma_fence", nullptr, [](Warp&, void**) {});
}

void wgmma_commit() {
  InEngine engine;
  self().wgmma_fenced = false;
  warp_meet("wgmma_commit", nullptr, [](Warp& warp, void**) {
    for (Wgmma& op : warp.wgmma) {
      if (!op.committed) op.group = warp.wgmma_groups;
      op.committed = true;
    }
    warp.wgmma_groups++;
  });
}

void wgmma_wait(int groups) {
  InEngine engine;
  self().wgmma_fenced = false;
  warp_meet("wgmma_wait", &groups, [](Warp& warp, void** lanes) {
    const int newest = *static_cast<int*>(lanes[0]);
    const auto due = [&](const Wgmma& op) { return op.committed && op.group < warp.wgmma_groups - newest; };
    while (!warp.wgmma.empty() && due(warp.wgmma.front())) land_first(warp, self().index / LANES);
  });
}

}  // namespace cuda_host
