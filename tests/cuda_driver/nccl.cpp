// NCCL between processes of one machine, over shared memory: as much of it as src/dist/nccl.rs uses, and the sum of all ranks,
// which adds in another order every time. A message's length travels with it, so that a receive of another length shows.
// What an all-gather receives is NaN from its turn in the stream until all of it is there.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "driver.h"

using namespace cuda_driver;

namespace {

enum ncclResult : int {
  OK = 0,
  SYSTEM_ERROR = 2,
  INVALID_ARGUMENT = 4,
  INVALID_USAGE = 5,
  IN_PROGRESS = 7,
};
enum { FLOAT32 = 7, TYPES = 10, SUM = 0 };
constexpr size_t TYPE_BYTES[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
constexpr unsigned CONFIG_MAGIC = 0xcafebeef;
constexpr size_t ID_BYTES = 128;
// Of one direction between two ranks. Small, so that long messages take many turns.
constexpr size_t RING_BYTES = 64 << 10;

struct Id {
  char name[ID_BYTES];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Ring {
  std::atomic<uint64_t> written, read;
  char bytes[RING_BYTES];

  size_t put(const char* from, size_t count) {
    const uint64_t at = written.load();
    count = std::min<size_t>(count, RING_BYTES - (at - read.load()));
    for (size_t i = 0; i < count; i++) bytes[(at + i) % RING_BYTES] = from[i];
    written.store(at + count);
    return count;
  }
  size_t get(char* to, size_t count) {
    const uint64_t at = read.load();
    count = std::min<size_t>(count, written.load() - at);
    for (size_t i = 0; i < count; i++) to[i] = bytes[(at + i) % RING_BYTES];
    read.store(at + count);
    return count;
  }
};

// What all ranks map. Fresh pages are zero.
struct Shared {
  std::atomic<uint64_t> joined;  // a bit a rank
  Ring rings[1];                 // ranks x ranks, by sender, then receiver

  static size_t bytes(int ranks) { return sizeof(Shared) + sizeof(Ring) * size_t(ranks) * ranks; }
};

struct Transfer {
  bool is_send;
  int peer;
  CUdeviceptr address;
  size_t bytes;
  std::shared_ptr<std::vector<char>> own;  // memory of the stand-in's, in place of an address
  size_t done = 0;                         // the 8 bytes of the length among them
  bool is_done() const { return done == 8 + bytes; }
  char* data() const { return own ? own->data() : reinterpret_cast<char*>(address); }
};

struct Comm {
  int rank, ranks;
  Shared* shared;
  std::string name;
  std::thread::id thread;
  bool is_blocking, is_initialised = false, is_finalised = false;
  std::shared_ptr<bool> is_aborted = std::make_shared<bool>(false);
  // Started, and not yet given to the stream: the second look at the communicator's state does.
  std::vector<std::function<void()>> launches;
  int looks_until_launched = 0;
  size_t sums = 0;

  uint64_t everyone() const { return ranks == 64 ? ~uint64_t(0) : (uint64_t(1) << ranks) - 1; }
  bool is_whole() const { return shared->joined.load() == everyone(); }
  Ring& ring(int from, int to) { return shared->rings[from * ranks + to]; }
};

auto& comms = lasting<std::map<Comm*, std::unique_ptr<Comm>>>();

// Runs on the device, in the turn of its group.
typedef std::function<void()> Action;

struct Started {
  Comm* comm;
  void* stream;
  std::vector<Transfer> transfers;
  Action before, after;  // of the transfers; may be empty
};
thread_local int group_depth;
thread_local std::vector<Started> group;

template <class... Arguments>
ncclResult wrong(ncclResult code, const char* format, Arguments... arguments) {
  complain(INVALID_VALUE, format, arguments...);
  return code;
}

// The communicator of a handle in whose state `call` may be made.
Comm* ready(Comm* handle, const char* call, bool from_any_thread = false) {
  auto found = comms.find(handle);
  if (found == comms.end()) return wrong(INVALID_ARGUMENT, "%s: no such communicator, or it was destroyed", call), nullptr;
  Comm* comm = found->second.get();
  if (!from_any_thread && comm->thread != std::this_thread::get_id())
    return wrong(INVALID_USAGE, "%s: not on the OS thread that opened the communicator", call), nullptr;
  return comm;
}

// Moves what can be moved now. Between two ranks messages keep their order. Whether the whole transfer is done.
bool advance(Comm& comm, Transfer& transfer) {
  Ring& ring = transfer.is_send ? comm.ring(comm.rank, transfer.peer) : comm.ring(transfer.peer, comm.rank);
  for (size_t moved = 1; moved && !transfer.is_done();) {
    uint64_t length = transfer.bytes;
    const bool is_length = transfer.done < 8;
    char* at = is_length ? reinterpret_cast<char*>(&length) + transfer.done : transfer.data() + transfer.done - 8;
    const size_t left = is_length ? 8 - transfer.done : 8 + transfer.bytes - transfer.done;
    if (is_length && !transfer.is_send && ring.written.load() - ring.read.load() < 8) return false;
    moved = transfer.is_send ? ring.put(at, left) : ring.get(at, left);
    if (is_length && !transfer.is_send && length != transfer.bytes) {
      complain(INVALID_VALUE, "%s: rank %d receives %zu bytes where rank %d sends %zu", running.c_str(), comm.rank,
               transfer.bytes, transfer.peer, size_t(length));
      stick(LAUNCH_FAILED);
      return true;
    }
    transfer.done += moved;
  }
  return transfer.is_done();
}

bool advance_all(Comm& comm, std::vector<Transfer>& transfers) {
  // The first that is not done of each direction of each peer.
  std::vector<char> is_held(2 * comm.ranks);
  bool all = true;
  for (Transfer& transfer : transfers) {
    char& held = is_held[2 * transfer.peer + transfer.is_send];
    if (!held && !transfer.is_done()) held = !advance(comm, transfer);
    all &= transfer.is_done();
  }
  return all || stuck();
}

// Groups whose turn has come in this process.
size_t groups_begun = 0;

// CUDA_EMULATOR_SIGNAL=RANK:GROUP:SIGNAL: that rank gets the signal when its group of that number, from 1, has sent what the
// peer takes at once. This thread gets it: where another one does, this one may go on to later groups.
void signal_in_group(const Comm& comm) {
  static const char* const text = getenv("CUDA_EMULATOR_SIGNAL");
  int rank, number;
  size_t at;
  if (text && sscanf(text, "%d:%zu:%d", &rank, &at, &number) == 3 && rank == comm.rank && at == groups_begun) raise(number);
}

// Gives the transfers of one stream to it, as one piece of work.
void give(Comm& comm, void* stream_handle, const std::vector<Started>& group) {
  auto pieces = std::make_shared<std::vector<Transfer>>();
  std::vector<Action> before, after;
  for (const Started& one : group) {
    pieces->insert(pieces->end(), one.transfers.begin(), one.transfers.end());
    if (one.before) before.push_back(one.before);
    if (one.after) after.push_back(one.after);
  }
  char what[64];
  snprintf(what, sizeof what, "NCCL, rank %d, %zu transfers", comm.rank, pieces->size());
  auto is_begun = std::make_shared<bool>(false);
  auto work = [&comm, is_aborted = comm.is_aborted, pieces, is_begun, before, after, what = std::string(what)] {
    if (*is_aborted) return true;
    if (!*is_begun) {
      for (const Transfer& piece : *pieces)
        if (!piece.own && piece.bytes && !check_range(what, piece.address, piece.bytes)) return true;
      for (const Action& action : before) action();
    }
    const bool begins = !*is_begun;
    *is_begun = true;
    groups_begun += begins;
    const bool is_done = advance_all(comm, *pieces);
    if (begins) signal_in_group(comm);
    if (!is_done) return false;
    for (const Action& action : after)
      if (!stuck()) action();
    return true;
  };
  auto launch = [stream_handle, work, what = std::string(what)] {
    if (auto stream = stream_of(stream_handle, "NCCL")) enqueue_waiting(stream, what, work);
  };
  comm.launches.push_back(launch);
  if (!comm.is_blocking) {
    comm.looks_until_launched = 2;
    return;
  }
  launch();
  comm.launches.clear();
}

ncclResult end_group() {
  std::vector<Started> started;
  started.swap(group);
  std::map<std::pair<Comm*, void*>, std::vector<Started>> by_stream;
  for (Started& one : started) by_stream[{one.comm, one.stream}].push_back(one);
  bool is_blocking = true;
  for (auto& [key, group] : by_stream) {
    give(*key.first, key.second, group);
    is_blocking &= key.first->is_blocking;
  }
  return is_blocking ? OK : IN_PROGRESS;
}

ncclResult start(const char* call, Started one) {
  Comm* comm = ready(one.comm, call);
  if (!comm) return INVALID_ARGUMENT;
  if (!comm->is_initialised || !comm->launches.empty() || comm->is_finalised)
    return wrong(INVALID_USAGE, "%s: the communicator is not ready: its state was not asked for until it was", call);
  for (const Transfer& transfer : one.transfers)
    if (transfer.peer < 0 || transfer.peer >= comm->ranks)
      return wrong(INVALID_ARGUMENT, "%s: rank %d of %d", call, transfer.peer, comm->ranks);
  if (!stream_of(one.stream, call)) return INVALID_ARGUMENT;
  group.push_back(std::move(one));
  return group_depth ? OK : end_group();
}

// What every rank has, to every other; `parts` are what comes, by rank, in memory of the stand-in's.
std::vector<Transfer> to_everybody(const Comm& comm, const void* from, size_t bytes, std::vector<std::shared_ptr<std::vector<char>>>& parts) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm.ranks; peer++) {
    parts.push_back(std::make_shared<std::vector<char>>(bytes));
    transfers.push_back({true, peer, reinterpret_cast<CUdeviceptr>(from), bytes, nullptr});
    transfers.push_back({false, peer, 0, bytes, parts.back()});
  }
  return transfers;
}

size_t type_bytes(int type) { return type >= 0 && type < TYPES ? TYPE_BYTES[type] : 0; }

ncclResult release(Comm* comm) {
  *comm->is_aborted = true;
  if (!comm->is_whole()) shm_unlink(comm->name.c_str());
  munmap(comm->shared, Shared::bytes(comm->ranks));
  comms.erase(comm);
  return OK;
}

}  // namespace

API ncclResult ncclGetVersion(int* version) {
  const char* other = getenv("CUDA_EMULATOR_NCCL");
  return *version = other ? atoi(other) : 22403, OK;
}

API const char* ncclGetErrorString(ncclResult code) {
  switch (code) {
    case OK: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}
API const char* ncclGetLastError(Comm*) { return "the stand-in has said it on stderr"; }

API ncclResult ncclGetUniqueId(Id* id) {
  std::random_device random;
  memset(id, 0, sizeof *id);
  snprintf(id->name, sizeof id->name, "/rloss-nccl-%d-%08x%08x", getpid(), random(), random());
  return OK;
}

API ncclResult ncclCommInitRankConfig(Comm** made, int ranks, Id id, int rank, const Config* config) {
  Locked lock;
  if (need_context(__func__)) return INVALID_USAGE;
  if (config->magic != CONFIG_MAGIC || config->size < sizeof(Config))
    return wrong(INVALID_ARGUMENT, "ncclCommInitRankConfig: not a configuration");
  if (ranks < 1 || ranks > 64 || rank < 0 || rank >= ranks)
    return wrong(INVALID_ARGUMENT, "ncclCommInitRankConfig: rank %d of %d", rank, ranks);
  const int file = shm_open(id.name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, off_t(Shared::bytes(ranks)))) return wrong(SYSTEM_ERROR, "%s: no shared memory", id.name);
  void* mapped = mmap(nullptr, Shared::bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return wrong(SYSTEM_ERROR, "%s: no shared memory", id.name);
  auto comm = std::make_unique<Comm>();
  comm->rank = rank;
  comm->ranks = ranks;
  comm->shared = static_cast<Shared*>(mapped);
  comm->name = id.name;
  comm->thread = std::this_thread::get_id();
  comm->is_blocking = config->blocking != 0;
  if (comm->shared->joined.fetch_or(uint64_t(1) << rank) >> rank & 1)
    return wrong(INVALID_USAGE, "ncclCommInitRankConfig: rank %d has joined already", rank);
  // The name is needed no longer; memory goes with its last user.
  if (comm->is_whole()) shm_unlink(id.name);
  Comm* given = *made = comm.get();
  comms[given] = std::move(comm);
  if (!given->is_blocking) return IN_PROGRESS;
  while (!given->is_whole()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  given->is_initialised = true;
  return OK;
}

API ncclResult ncclCommGetAsyncError(Comm* handle, ncclResult* state) {
  Locked lock;
  Comm* comm = ready(handle, __func__);
  if (!comm) return INVALID_ARGUMENT;
  *state = OK;
  if (!comm->is_initialised) {
    comm->is_initialised = comm->is_whole();
    if (!comm->is_initialised) *state = IN_PROGRESS;
  } else if (!comm->launches.empty() && --comm->looks_until_launched > 0) {
    *state = IN_PROGRESS;
  } else {
    std::vector<std::function<void()>> launches;
    launches.swap(comm->launches);
    for (auto& launch : launches) launch();
  }
  return OK;
}

API ncclResult ncclGroupStart() { return group_depth++, OK; }
API ncclResult ncclGroupEnd() {
  Locked lock;
  if (!group_depth) return wrong(INVALID_USAGE, "ncclGroupEnd: no group was started");
  return --group_depth ? OK : end_group();
}

API ncclResult ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
  Locked lock;
  if (!type_bytes(type)) return wrong(INVALID_ARGUMENT, "ncclSend: type %d", type);
  return start(__func__, {comm, stream, {{true, peer, reinterpret_cast<CUdeviceptr>(from), count * type_bytes(type), nullptr}}, {}, {}});
}
API ncclResult ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
  Locked lock;
  if (!type_bytes(type)) return wrong(INVALID_ARGUMENT, "ncclRecv: type %d", type);
  return start(__func__, {comm, stream, {{false, peer, reinterpret_cast<CUdeviceptr>(to), count * type_bytes(type), nullptr}}, {}, {}});
}

// Rank r's values come at place r of `to`. A rank's own may lie there already, and nowhere else in `to`.
API ncclResult ncclAllGather(const void* from, void* to, size_t count, int type, Comm* handle, void* stream) {
  Locked lock;
  if (!type_bytes(type)) return wrong(INVALID_ARGUMENT, "ncclAllGather: type %d", type);
  Comm* comm = ready(handle, __func__);
  if (!comm) return INVALID_ARGUMENT;
  const size_t bytes = count * type_bytes(type), own = bytes * size_t(comm->rank), all = bytes * size_t(comm->ranks);
  char* const out = static_cast<char*>(to);
  const char* const in = static_cast<const char*>(from);
  if (in != out + own && in < out + all && out < in + bytes)
    return wrong(INVALID_ARGUMENT, "ncclAllGather: rank %d sends from its result, but not from its place there", comm->rank);
  std::vector<std::shared_ptr<std::vector<char>>> parts;
  std::vector<Transfer> transfers = to_everybody(*comm, from, bytes, parts);
  const auto before = [=] {
    if (!check_range("ncclAllGather to", reinterpret_cast<CUdeviceptr>(to), all)) return;
    for (size_t at = 0; at < all; at++)
      if (in != out + own || at < own || at >= own + bytes) out[at] = char(0xff);
  };
  const auto after = [=] {
    if (!check_range("ncclAllGather to", reinterpret_cast<CUdeviceptr>(to), all)) return;
    for (size_t rank = 0; rank < parts.size(); rank++) memcpy(out + rank * bytes, parts[rank]->data(), bytes);
  };
  return start(__func__, {comm, stream, std::move(transfers), before, after});
}

// A sum of f32 whose order nobody can count on: a use of it where bits matter shows.
API ncclResult ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Comm* handle, void* stream) {
  Locked lock;
  if (type != FLOAT32 || operation != SUM) return wrong(INVALID_ARGUMENT, "ncclAllReduce: sums of f32 alone are emulated");
  Comm* comm = ready(handle, __func__);
  if (!comm) return INVALID_ARGUMENT;
  const size_t bytes = count * sizeof(float);
  std::vector<std::shared_ptr<std::vector<char>>> parts;
  std::vector<Transfer> transfers = to_everybody(*comm, from, bytes, parts);
  const auto after = [=] {
    if (!check_range("ncclAllReduce to", reinterpret_cast<CUdeviceptr>(to), bytes)) return;
    // One order for all ranks, and another one for each sum and each run.
    std::vector<size_t> order(parts.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    std::mt19937 random(unsigned(std::hash<std::string>()(comm->name) + comm->sums++));
    std::shuffle(order.begin(), order.end(), random);
    float* sums = static_cast<float*>(to);
    memset(sums, 0, bytes);
    for (size_t part : order)
      for (size_t i = 0; i < count; i++) {
        float value;
        memcpy(&value, parts[part]->data() + i * sizeof value, sizeof value);
        sums[i] += value;
      }
  };
  return start(__func__, {comm, stream, std::move(transfers), {}, after});
}

API ncclResult ncclCommFinalize(Comm* handle) {
  Locked lock;
  Comm* comm = ready(handle, __func__);
  if (!comm) return INVALID_ARGUMENT;
  comm->is_finalised = true;
  if (getenv("CUDA_EMULATOR_GROUPS")) fprintf(stderr, "nccl: %zu groups\n", groups_begun);
  return comm->is_blocking ? OK : IN_PROGRESS;
}
API ncclResult ncclCommDestroy(Comm* handle) {
  Locked lock;
  Comm* comm = ready(handle, __func__);
  if (!comm) return INVALID_ARGUMENT;
  if (!comm->is_finalised) return wrong(INVALID_USAGE, "ncclCommDestroy: not finalised before");
  return release(comm);
}
API ncclResult ncclCommAbort(Comm* handle) {
  Locked lock;
  Comm* comm = ready(handle, __func__, true);
  return comm ? release(comm) : INVALID_ARGUMENT;
}
