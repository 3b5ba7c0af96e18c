// The kernels' tests on the CPU: errors against f64, row bits, bits from run to run. README.md lists them.
//   suite [small] [forward] [mma | hopper | mma_128 | hopper_128 | ops | an op family] [errors | limits | rows | chunks | repeats]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

#include "cases.h"
#include "op_checks.h"
#include "oracle.h"

using cuda_host::Options, cuda_host::Schedule, cuda_host::TensorCore;

namespace suite {

namespace {

constexpr double WORSE_THAN_BF16_MAX = 2;  // times the error of plain bf16
constexpr double LSE_ERROR_MAX = 1e-6;     // relative to LSE or to the largest scores, whichever is larger

// Each way to run: every schedule, and every tensor core.
struct Way {
  const char* name;
  Schedule schedule;
  TensorCore tensor_core;
};
const std::vector<Way> WAYS = {
    {"up, chain", Schedule::up, TensorCore::chain},
    {"newest first, hopper", Schedule::newest_first, TensorCore::hopper},
    {"shuffled, hashed", Schedule::shuffled, TensorCore::hashed},
};
const Way SCHEDULES[] = {
    {"up", Schedule::up, TensorCore::chain},
    {"newest first", Schedule::newest_first, TensorCore::chain},
    {"shuffled", Schedule::shuffled, TensorCore::chain},
};

Options options_of(const Way& way) {
  Options options;
  options.schedule = way.schedule;
  options.tensor_core = way.tensor_core;
  return options;
}

// The first failure ends the program: what follows would say the same again.
[[noreturn]] void miss(const std::string& check, const std::string& text) {
  printf("caught by %s: %s\n", check.c_str(), text.c_str());
  exit(1);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
void expect_same(const std::vector<T>& a, const std::vector<T>& b, const std::string& check, const char* tensor) {
  if (!same_bits(a, b)) miss(check, std::string(tensor) + " differs in bits");
}

std::vector<double> wide(const std::vector<bf16>& x) {
  std::vector<double> all(x.size());
  for (size_t i = 0; i < x.size(); i++) all[i] = to_float(x[i]);
  return all;
}
std::vector<double> wide(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// dk or dv without the gaps between rows, which must be as they were.
std::vector<double> key_gradient(const Problem& problem, const std::vector<bf16>& x, const std::string& check) {
  std::vector<double> all;
  for (int row = 0; row < problem.keys(); row++)
    for (int i = 0; i < problem.kv_stride(); i++) {
      const bf16 value = x[size_t(row) * problem.kv_stride() + i];
      if (i < problem.kv_heads * problem.head_dim)
        all.push_back(to_float(value));
      else if (value.bits != 0xffff)
        miss(check, "a gap between rows was written");
    }
  return all;
}

// ---- Errors ---------------------------------------------------------------------------------------------------------

struct Worst {
  double ratio = 0;  // of an error to plain bf16's
  std::string where;
};
std::map<std::string, Worst> worst;  // by tensor and kind
Worst worst_lse;                     // see LSE_ERROR_MAX

void compare(const std::string& check, const char* tensor, const std::vector<double>& got,
             const std::vector<double>& exact, const std::vector<double>& plain) {
  const Error ours = distance(got, exact), theirs = distance(plain, exact);
  for (const auto& [kind, own, other] :
       {std::make_tuple("maximum", ours.largest, theirs.largest), std::make_tuple("RMS", ours.rms, theirs.rms)}) {
    const double ratio = own == 0 ? 0 : own / other;
    Worst& known = worst[std::string(tensor) + ", " + kind];
    if (ratio > known.ratio) known = {ratio, check};
    if (ratio <= WORSE_THAN_BF16_MAX) continue;
    char text[160];
    snprintf(text, sizeof text, "%s: %s error %.3g, of plain bf16 %.3g", tensor, kind, own, other);
    miss(check, text);
  }
}

// LSE stays in f32 throughout: its error is some roundings, not bf16's. `score`: about the largest.
void compare_lse(const std::string& check, const std::vector<float>& got, const std::vector<double>& exact,
                 double score) {
  for (size_t i = 0; i < got.size(); i++) {
    const double error = std::fabs(got[i] - exact[i]) / std::max(score, std::fabs(exact[i]));
    if (error > worst_lse.ratio) worst_lse = {error, check};
    if (error <= LSE_ERROR_MAX) continue;
    char text[160];
    snprintf(text, sizeof text, "LSE of row %zu is %.9g, not %.9g", i, double(got[i]), exact[i]);
    miss(check, text);
  }
}

void test_errors(const Family& family, const std::vector<Shape>& shapes, bool with_backward) {
  for (const Shape& shape : shapes) {
    const Problem problem = make(shape, family.head_dim, 1);
    const Reference reference = exact(problem), plain = plain_bf16(problem);
    for (const Way& way : WAYS) {
      const std::string check = std::string("errors, ") + shape.name + ", " + way.name;
      try {
        Results got;
        forward(options_of(way), family, problem, got);
        compare(check, "O", wide(got.out), reference.out, plain.out);
        // Hashed products are off by more than a tensor core's.
        if (way.tensor_core == TensorCore::hashed)
          compare(check, "LSE", wide(got.lse), reference.lse, plain.lse);
        else
          compare_lse(check, got.lse, reference.lse, 4 * shape.score_size);
        if (!with_backward || shape.paged) continue;
        backward(options_of(way), family, problem, got);
        compare(check, "dQ", wide(got.dq), reference.dq, plain.dq);
        compare(check, "dK", key_gradient(problem, got.dk, check), reference.dk, plain.dk);
        compare(check, "dV", key_gradient(problem, got.dv, check), reference.dv, plain.dv);
        compare(check, "ds", wide(got.dsinks), reference.dsinks, plain.dsinks);
      } catch (const cuda_host::KernelError& error) {
        miss(check, error.what());
      }
    }
  }
}

// ---- Row bits: decode = prefill in pieces of any size = training; the spread walk = the serial walk -----------------

void test_rows(const Family& family, const std::vector<Shape>& shapes, const std::vector<Way>& ways,
               const std::vector<int>& pieces, const std::vector<int>& launches) {
  for (const Shape& shape : shapes) {
    const Problem training = make(shape, family.head_dim, 2);
    for (const Way& way : ways) {
      const Options options = options_of(way);
      const std::string where = std::string(", ") + shape.name + ", " + way.name;
      Results whole, other;
      forward(options, family, training, whole);
      for (int piece : pieces) {
        const std::string check = "row bits, pieces of " + std::to_string(piece) + where;
        forward(options, family, in_pieces(training, piece), other);
        expect_same(whole.out, other.out, check, "O");
        expect_same(whole.lse, other.lse, check, "LSE");
      }
      for (int together : launches) {
        const std::string check = "spread, chunks of keys a launch: " + std::to_string(together) + where;
        forward_spread(options, family, training, other, together);
        expect_same(whole.out, other.out, check, "O");
        expect_same(whole.lse, other.lse, check, "LSE");
      }
    }
  }
}

// ---- Bits from run to run, whatever the schedule and the company ------------------------------------------------------

void test_repeats(const Family& family, const std::vector<Shape>& shapes) {
  for (const Shape& shape : shapes) {
    const Problem problem = make(shape, family.head_dim, 3);
    Results first;
    for (const Way& way : SCHEDULES) {
      const std::string check = std::string("repeats, ") + shape.name + ", " + way.name;
      Results got;
      forward(options_of(way), family, problem, got);
      backward(options_of(way), family, problem, got);
      if (&way == SCHEDULES) first = got;
      expect_same(first.out, got.out, check, "O");
      expect_same(first.lse, got.lse, check, "LSE");
      expect_same(first.dq, got.dq, check, "dQ");
      expect_same(first.dk, got.dk, check, "dK");
      expect_same(first.dv, got.dv, check, "dV");
      expect_same(first.dsinks, got.dsinks, check, "ds");
    }
    const std::string check = std::string("alone or packed, ") + shape.name;
    for (int sequence = 0; sequence < problem.sequences(); sequence++) {
      const Problem one = alone(problem, sequence);
      Results got;
      forward(Options(), family, one, got);
      backward(Options(), family, one, got);
      const auto expect_part = [&](const std::vector<bf16>& all, const std::vector<bf16>& part, size_t at,
                                   const char* tensor) {
        if (!part.empty() && memcmp(&all[at], part.data(), part.size() * sizeof(bf16)))
          miss(check, std::string(tensor) + " differs in bits");
      };
      const size_t row = size_t(Problem::first(problem.q_lengths, sequence)) * problem.heads() * problem.head_dim;
      expect_part(first.out, got.out, row, "O");
      expect_part(first.dq, got.dq, row, "dQ");
      const size_t key = size_t(Problem::first(problem.k_lengths, sequence)) * problem.kv_stride();
      expect_part(first.dk, got.dk, key, "dK");
      expect_part(first.dv, got.dv, key, "dV");
    }
  }
}

// ---- Sizes at which 32 bits do not suffice ----------------------------------------------------------------------------

// A window of 2^31 - 1 keys, and tensors too large for this machine of which a part is there: the same bits as without.
void test_limits(const Family& family) {
  if (const std::string wrong = wrong_place(); !wrong.empty()) miss("places", wrong);
  const auto expect_all = [](const Results& a, const Results& b, const std::string& check) {
    expect_same(a.out, b.out, check, "O");
    expect_same(a.lse, b.lse, check, "LSE");
    expect_same(a.dq, b.dq, check, "dQ");
    expect_same(a.dk, b.dk, check, "dK");
    expect_same(a.dv, b.dv, check, "dV");
  };
  const auto run = [&](const Problem& problem, Far far, const Results* delta) {
    Results results;
    forward(Options(), family, problem, results, far);
    if (delta) results.delta = delta->delta;
    backward(Options(), family, problem, results, far);
    return results;
  };
  Problem problem = make({"", {66, 3}, {66, 2}, 2, 3, 0, 1, {0.5f, -1, 2, 0, 1}}, family.head_dim, 4);
  const Results near = run(problem, {}, nullptr);
  for (const Far far : {Far{1 << 25, 1 << 22, 1024}, Far{0, 64, 1 << 26}})
    expect_all(near, run(problem, far, &near),
               "far away, token " + std::to_string(far.tokens) + ", key row " + std::to_string(far.keys) + ", stride " +
                   std::to_string(far.kv_token_stride));
  problem.window = 0x7fffffff;
  expect_all(near, run(problem, {}, nullptr), "window of 2^31 - 1");
}

// Runs a check of a family, unless another was asked for.
template <class Run>
void timed(const char* what, const std::string& asked, const char* family, Run run) {
  if (!asked.empty() && asked != what) return;
  const auto start = std::chrono::steady_clock::now();
  try {
    run();
  } catch (const cuda_host::KernelError& error) {
    miss(what, error.what());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("  %-10s %-12s good  %5.1f s\n", family, what, seconds);
  fflush(stdout);
}

}  // namespace

void run(bool small, bool with_backward, const std::string& only, const std::string& asked) {
  const std::vector<Shape>& error_shapes = small ? small_shapes() : shapes();
  std::vector<Shape> row_shapes, repeat_shapes;
  if (small) {
    row_shapes = {{"150 and 3 tokens, window 70", {150, 3}, {}, 1, 3, 70}};
    repeat_shapes = {{"70 and 20 tokens", {70, 20}, {}, 2, 2}};
  } else {
    row_shapes = {{"150, 1 and 67 tokens", {150, 1, 67}, {}, 2, 8, 0, 1, {0.5f, -2}},
                  {"260 tokens, window 128", {260}, {}, 1, 8, 128},
                  {"140 tokens, window 5", {140}, {}, 1, 5, 5}};
    repeat_shapes = {{"200, 0, 1 and 77 tokens", {200, 0, 1, 77}, {}, 2, 8},
                     {"160 and 65 tokens, window 70", {160, 65}, {}, 1, 5, 70}};
  }
  const std::vector<int> pieces = small ? std::vector<int>{1, 33} : std::vector<int>{1, 7, 64, 100};
  for (const Family& family : families()) {
    if (!only.empty() && only != family.name) continue;
    timed("errors", asked, family.name, [&] { test_errors(family, error_shapes, with_backward); });
    timed("limits", asked, family.name, [&] { test_limits(family); });
    timed("rows", asked, family.name, [&] { test_rows(family, row_shapes, WAYS, pieces, {}); });
    timed("chunks", asked, family.name, [&] {
      if (small) {
        test_rows(family, small_chunk_shapes(), {WAYS[2]}, {1}, {1 << 20});
        test_rows(family, {chunk_shapes().back()}, {WAYS[0]}, {1}, {1 << 20});  // a hashed 0 is none
      } else {
        test_rows(family, chunk_shapes(), WAYS, {1, 2, 5}, {1, 2, 1 << 20});
      }
    });
    if (with_backward) timed("repeats", asked, family.name, [&] { test_repeats(family, repeat_shapes); });
  }
  for (const OpFamily& family : OP_FAMILIES) {
    if (!only.empty() && only != "ops" && only != family.name) continue;
    timed("all", asked, family.name, [&] {
      for (const Way& way : WAYS) try {
          if (const std::string wrong = family.wrong(options_of(way), small); !wrong.empty()) miss(way.name, wrong);
        } catch (const cuda_host::KernelError& error) {
          miss(way.name, error.what());
        }
    });
  }
  if (worst.empty()) return;
  for (const auto& [what, largest] : worst)
    printf("  largest error of %-12s %.3g of plain bf16's (%s)\n", what.c_str(), largest.ratio, largest.where.c_str());
  printf("  largest error of LSE: %.3g (%s)\n", worst_lse.ratio, worst_lse.where.c_str());
}

bool is_family(const std::string& name) {
  return std::any_of(families().begin(), families().end(), [&](const Family& family) { return name == family.name; });
}

bool is_op_family(const std::string& name) {
  return std::any_of(OP_FAMILIES.begin(), OP_FAMILIES.end(), [&](const OpFamily& family) { return name == family.name; });
}

}  // namespace suite

int main(int count, char** arguments) {
  bool small = false, with_backward = true;
  std::string only, asked;  // family, check
  for (int i = 1; i < count; i++) {
    const std::string argument = arguments[i];
    if (argument == "small") {
      small = true;
    } else if (argument == "forward") {
      with_backward = false;
    } else if (argument == "ops" || suite::is_family(argument) || suite::is_op_family(argument)) {
      only = argument;
    } else if (argument == "errors" || argument == "limits" || argument == "rows" || argument == "chunks" ||
               argument == "repeats") {
      asked = argument;
    } else {
      fprintf(stderr, "usage: suite [small] [forward] [mma | hopper | mma_128 | hopper_128 | ops | an op family] [errors | limits | rows | chunks | repeats]\n");
      return 2;
    }
  }
  suite::run(small, with_backward, only, asked);
  // A single check may leave a kernel out, or what fills its memory; attention's small cases fill no whole ring.
  if (asked.empty() && (only == "ops" || suite::is_op_family(only)))
    for (const std::string& found : cuda_host::unused_shared_memory()) suite::miss("shared memory", found);
}
