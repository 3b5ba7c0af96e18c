// The memory pool's account.
#include "pool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace cuda_driver {
namespace {

constexpr size_t GRAIN = 512;

// Bytes of a reservation, in use or free. What is free can be had by the stream that freed it, or by all.
struct Piece {
  size_t bytes;
  bool in_use;
  const Stream* stream;
  Turn freed;
  bool may_go_to(const Stream* taker) const { return !in_use && (stream == taker || *freed); }
};

// By the offset where they begin. Between two reservations lies a gap.
auto& pieces = lasting<std::map<size_t, Piece>>();
auto& reservations = lasting<std::map<size_t, size_t>>();
auto& taken = lasting<std::map<CUdeviceptr, size_t>>();
auto& beside = lasting<std::map<CUdeviceptr, size_t>>();  // bytes of cuMemAlloc's
size_t next_offset, beside_bytes, graph_bytes, times_reserved, times_given_back;
unsigned long long release_threshold;

struct Level {
  unsigned long long now = 0, high = 0;
  void rise(size_t bytes) { high = std::max(high, now += bytes); }
};
Level reserved, used;
size_t reserved_at_most;  // no program resets it

// What a reservation is rounded up to. Fewer KiB are to a small model's tensors what 2 MiB are to a large one's.
size_t reservation_grain() {
  static const char* const text = getenv("CUDA_EMULATOR_POOL_KIB");
  static const size_t bytes = text ? strtoull(text, nullptr, 10) << 10 : size_t(2) << 20;
  return bytes;
}

size_t rounded(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

// The smallest run of adjoining pieces that `stream` may have and that suffices: its first, or the end.
std::map<size_t, Piece>::iterator best_fit(size_t bytes, const Stream* stream) {
  auto best = pieces.end();
  size_t best_bytes = SIZE_MAX;
  for (auto at = pieces.begin(); at != pieces.end();) {
    const auto first = at;
    size_t end = first->first;
    for (; at != pieces.end() && at->first == end && at->second.may_go_to(stream); ++at) end += at->second.bytes;
    const size_t run = end - first->first;
    if (run >= bytes && run < best_bytes) best = first, best_bytes = run;
    if (!run) ++at;
  }
  return best;
}

void take_at(std::map<size_t, Piece>::iterator at, size_t bytes) {
  const size_t begin = at->first;
  size_t had = 0;
  Piece last;
  while (had < bytes) {
    last = at->second;
    had += last.bytes;
    at = pieces.erase(at);
  }
  pieces[begin] = {bytes, true, nullptr, nullptr};
  if (had > bytes) pieces[begin + bytes] = {had - bytes, false, last.stream, last.freed};
}

// Reservations of which nothing is in use or still has its turn to come, until `kept` bytes are left.
void give_back(size_t kept) {
  for (auto at = reservations.begin(); at != reservations.end() && reserved.now > kept;) {
    const auto [begin, bytes] = *at;
    const auto first = pieces.find(begin), end = pieces.lower_bound(begin + bytes);
    if (!std::all_of(first, end, [](auto& piece) { return piece.second.may_go_to(nullptr); })) {
      ++at;
      continue;
    }
    pieces.erase(first, end);
    reserved.now -= bytes;
    times_given_back++;
    at = reservations.erase(at);
  }
}

// Whether `bytes` fit into `room`, if need be after all work is done and what is free has gone back.
bool fits(size_t bytes, size_t room) {
  if (pool_taken_bytes() + bytes <= room) return true;
  run_everything();
  give_back(0);
  return pool_taken_bytes() + bytes <= room;
}

bool reserve_more(size_t bytes, size_t room) {
  if (!fits(bytes, room)) return false;
  bytes = std::min(rounded(bytes, reservation_grain()), room - pool_taken_bytes());
  reservations[next_offset] = bytes;
  pieces[next_offset] = {bytes, false, nullptr, std::make_shared<bool>(true)};
  next_offset += bytes + GRAIN;
  reserved.rise(bytes);
  reserved_at_most = std::max<size_t>(reserved_at_most, reserved.now);
  times_reserved++;
  return true;
}

}  // namespace

bool pool_take(CUdeviceptr address, size_t bytes, const Stream* stream, size_t room) {
  bytes = rounded(bytes, GRAIN);
  if (!stream) {
    if (!fits(bytes, room)) return false;
    beside_bytes += beside[address] = bytes;
    return true;
  }
  auto at = best_fit(bytes, stream);
  if (at == pieces.end()) {
    if (!reserve_more(bytes, room)) return false;
    at = best_fit(bytes, stream);
  }
  taken[address] = at->first;
  take_at(at, bytes);
  used.rise(bytes);
  return true;
}

Turn pool_free(CUdeviceptr address, const Stream* stream) {
  const Turn turn = std::make_shared<bool>(false);
  if (auto found = beside.find(address); found != beside.end()) {
    beside_bytes -= found->second;
    beside.erase(found);
  } else if (auto found = taken.find(address); found != taken.end()) {
    auto at = pieces.find(found->second);
    used.now -= at->second.bytes;
    at->second = {at->second.bytes, false, stream, turn};
    // With what the same stream has freed before: its turn comes no later.
    auto joins = [&](auto piece) { return !piece->second.in_use && piece->second.stream == stream; };
    if (auto after = std::next(at); after != pieces.end() && after->first == at->first + at->second.bytes && joins(after)) {
      at->second.bytes += after->second.bytes;
      pieces.erase(after);
    }
    if (at != pieces.begin()) {
      if (auto before = std::prev(at); before->first + before->second.bytes == at->first && joins(before)) {
        before->second.bytes += at->second.bytes;
        before->second.freed = turn;
        pieces.erase(at);
      }
    }
    taken.erase(found);
  }
  return turn;
}

void pool_waited() { give_back(release_threshold); }

bool pool_take_for_graphs(size_t bytes, size_t room) {
  const size_t more = std::max(bytes, graph_bytes) - graph_bytes;
  if (pool_taken_bytes() + more > room) return false;
  graph_bytes += more;
  note_peak();
  return true;
}

size_t pool_graph_bytes() { return graph_bytes; }

size_t pool_taken_bytes() { return reserved.now + beside_bytes + graph_bytes; }

void pool_tell() {
  fprintf(stderr, "memory pool: %zu bytes reserved at most, %zu times, given back %zu times\n", reserved_at_most,
          times_reserved, times_given_back);
}

}  // namespace cuda_driver

using namespace cuda_driver;

static int the_pool;
enum { RELEASE_THRESHOLD = 4, RESERVED_CURRENT, RESERVED_HIGH, USED_CURRENT, USED_HIGH };

API CUresult cuDeviceGetDefaultMemPool(void** pool, int device) {
  if (device != 0) return complain(INVALID_VALUE, "cuDeviceGetDefaultMemPool: of device %d", device);
  return *pool = &the_pool, SUCCESS;
}

API CUresult cuMemPoolTrimTo(void* pool, size_t kept) {
  Locked lock;
  if (pool != &the_pool) return complain(INVALID_VALUE, "cuMemPoolTrimTo: no such pool");
  return give_back(kept), SUCCESS;
}

API CUresult cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
  Locked lock;
  const auto number = *static_cast<unsigned long long*>(value);
  if (pool == &the_pool && attribute == RELEASE_THRESHOLD) return release_threshold = number, SUCCESS;
  if (pool == &the_pool && attribute == RESERVED_HIGH && !number) return reserved.high = reserved.now, SUCCESS;
  if (pool == &the_pool && attribute == USED_HIGH && !number) return used.high = used.now, SUCCESS;
  return complain(INVALID_VALUE, "cuMemPoolSetAttribute: attribute %d to %llu", attribute, number);
}

API CUresult cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
  Locked lock;
  const unsigned long long values[] = {release_threshold, reserved.now, reserved.high, used.now, used.high};
  if (pool != &the_pool || attribute < RELEASE_THRESHOLD || attribute > USED_HIGH)
    return complain(INVALID_VALUE, "cuMemPoolGetAttribute: attribute %d", attribute);
  return *static_cast<unsigned long long*>(value) = values[attribute - RELEASE_THRESHOLD], SUCCESS;
}
