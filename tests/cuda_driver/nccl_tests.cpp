// The NCCL stand-in's own tests: each rank is a process, in each of the driver's modes; and each check fires once.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "driver_test.h"

struct Id {
  char name[128];
};
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef, version = 22400;
  int blocking = 0;
};
extern "C" {
int ncclGetUniqueId(Id*);
int ncclCommInitRankConfig(void**, int, Id, int, const Config*);
int ncclCommGetAsyncError(void*, int*);
int ncclGroupStart();
int ncclGroupEnd();
int ncclSend(Device, size_t, int, int, void*, void*);
int ncclRecv(Device, size_t, int, int, void*, void*);
int ncclAllGather(Device, Device, size_t, int, void*, void*);
int ncclAllReduce(Device, Device, size_t, int, int, void*, void*);
int ncclCommFinalize(void*);
int ncclCommDestroy(void*);
int ncclCommAbort(void*);
}

namespace {

constexpr int BYTES = 1, FLOATS = 7, SUM = 0, IN_PROGRESS = 7, NOT_READY = 600;
std::atomic<int>* has_looked;  // shared by the ranks of a test

// A call of NCCL's, which may go on.
void begun(int result) {
  if (result != IN_PROGRESS) must(result);
}

// One rank, in its process.
class Rank {
  std::vector<Device> buffers;

 public:
  int rank, ranks;
  void *comm, *stream;

  Rank(int rank, int ranks, const Id& id) : rank(rank), ranks(ranks) {
    context();
    stream = ::stream();
    const Config config;
    begun(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
    settle();
  }
  void settle() {
    for (int state = IN_PROGRESS; state == IN_PROGRESS; std::this_thread::yield()) begun(ncclCommGetAsyncError(comm, &state));
  }
  // Freed by `close` or `abort`.
  Device memory(size_t bytes, int value) {
    Device made;
    must(cuMemAlloc_v2(&made, bytes));
    std::vector<unsigned char> filled(bytes, static_cast<unsigned char>(value));
    must(cuMemcpyHtoD_v2(made, filled.data(), bytes));
    return buffers.push_back(made), made;
  }
  std::vector<Device> memory_of_each(size_t bytes) {
    std::vector<Device> all;
    for (int peer = 0; peer < ranks; peer++) all.push_back(memory(bytes, 0));
    return all;
  }
  std::vector<unsigned char> read(Device from, size_t bytes) {
    std::vector<unsigned char> found(bytes);
    must(cuMemcpyDtoH_v2(found.data(), from, bytes));
    return found;
  }
  // To every other rank and from it, and no waiting.
  void exchange(Device send, size_t send_bytes, const std::vector<Device>& receive, size_t receive_bytes) {
    begun(ncclGroupStart());
    for (int peer = 0; peer < ranks; peer++) {
      begun(ncclRecv(receive[size_t(peer)], receive_bytes, BYTES, peer, comm, stream));
      begun(ncclSend(send, send_bytes, BYTES, peer, comm, stream));
    }
    begun(ncclGroupEnd());
    settle();
  }
  void free() {
    for (Device buffer : buffers) must(cuMemFree_v2(buffer));
    buffers.clear();
    must(cuStreamDestroy_v2(stream));
  }
  void close() {
    begun(ncclCommFinalize(comm));
    settle();
    begun(ncclCommDestroy(comm));
    free();
  }
  void abort() {
    begun(ncclCommAbort(comm));
    must(cuStreamSynchronize(stream));
    free();
  }
};

// As the driver's tests, in a process for each rank.
std::function<void(int)> in_ranks(int ranks, const std::function<void(Rank&)>& test) {
  Id id;
  begun(ncclGetUniqueId(&id));
  return [=](int rank) {
    alarm(60);
    Rank self(rank, ranks, id);
    test(self);
  };
}

void accepted(const char* name, int ranks, const std::function<void(Rank&)>& test) {
  for (const char* mode : MODES) passes(name, mode, ranks, in_ranks(ranks, test));
}

void refused(const char* name, const char* message, int ranks, const std::function<void(Rank&)>& test) {
  says(name, "late", message, ranks, in_ranks(ranks, test));
}

// What three ranks sum: 1 + 2^-24 + 2^-24 is 1 or the next number, by the order.
float reduced(Rank& self) {
  const float part = self.rank == 0 ? 1.0f : 0x1p-24f;
  Device from = self.memory(4, 0), to = self.memory(4, 0);
  must(cuMemcpyHtoD_v2(from, &part, 4));
  begun(ncclAllReduce(from, to, 1, FLOATS, SUM, self.comm, self.stream));
  self.settle();
  must(cuStreamSynchronize(self.stream));
  float sum;
  must(cuMemcpyDtoH_v2(&sum, to, 4));
  return sum;
}

// Gathers `bytes` a rank into place, in one group with a second gather from elsewhere.
struct Gathered {
  Device in_place, own, out;
  static constexpr size_t bytes = 100000;

  explicit Gathered(Rank& self) {
    in_place = self.memory(bytes * size_t(self.ranks), 0);
    own = self.memory(bytes, 50 + self.rank);
    out = self.memory(bytes * size_t(self.ranks), 0);
    must(cuMemsetD8Async(in_place + bytes * size_t(self.rank), static_cast<unsigned char>(10 + self.rank), bytes, self.stream));
    begun(ncclGroupStart());
    begun(ncclAllGather(in_place + bytes * size_t(self.rank), in_place, bytes, BYTES, self.comm, self.stream));
    begun(ncclAllGather(own, out, bytes / 4, FLOATS, self.comm, self.stream));
    begun(ncclGroupEnd());
    self.settle();
  }
  void check(Rank& self) {
    const auto expected = [&](int first) {
      std::vector<unsigned char> all;
      for (int rank = 0; rank < self.ranks; rank++) all.insert(all.end(), bytes, static_cast<unsigned char>(first + rank));
      return all;
    };
    expect(self.read(in_place, bytes * size_t(self.ranks)) == expected(10), "what was gathered in place");
    expect(self.read(out, bytes * size_t(self.ranks)) == expected(50), "what was gathered from elsewhere");
  }
};

// A kernel's first launch while the other rank keeps this one waiting; `loaded`: the kernel was loaded before.
void launch_while_waiting(Rank& self, bool loaded) {
  Device memory = self.memory(64, 1);
  if (self.rank == 0) {
    void *module = load(), *add_one = kernel("add_one", module), *own = stream();
    if (loaded) must(cuFuncLoad(add_one));
    begun(ncclRecv(memory, 64, BYTES, 1, self.comm, self.stream));
    self.settle();
    must(launch(add_one, 1, 1, own, 0, memory, 1));
    begun(ncclCommAbort(self.comm));
    must(cuStreamDestroy_v2(own));
    must(cuModuleUnload(module));
    must(cuStreamSynchronize(self.stream));
    self.free();
  } else {
    self.abort();
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return fprintf(stderr, "usage: nccl_tests MODULE\n"), 2;
  suite = "nccl";
  module_image = contents(arguments[1]);
  void* shared = mmap(nullptr, sizeof *has_looked, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  has_looked = new (shared) std::atomic<int>(0);
  for (int ranks : {1, 2, 4}) {
    accepted("everybody to everybody, longer than what is on its way at once", ranks, [](Rank& self) {
      const size_t bytes = 300000;
      Device send = self.memory(bytes, 10 + self.rank);
      const std::vector<Device> receive = self.memory_of_each(bytes);
      // Two exchanges on their way; the second overwrites the first.
      self.exchange(send, bytes, receive, bytes);
      self.exchange(send, bytes, receive, bytes);
      void* end;
      must(cuEventCreate(&end, 2));
      must(cuEventRecord(end, self.stream));
      must(cuEventSynchronize(end));
      must(cuEventDestroy_v2(end));
      for (int peer = 0; peer < self.ranks; peer++) {
        const auto found = self.read(receive[size_t(peer)], bytes);
        expect(found == std::vector<unsigned char>(bytes, static_cast<unsigned char>(10 + peer)), "what came");
      }
      self.close();
    });
  }
  for (int ranks : {1, 2, 4})
    accepted("an all-gather has every rank's values in rank order", ranks, [](Rank& self) {
      Gathered gathered(self);
      must(cuStreamSynchronize(self.stream));
      gathered.check(self);
      self.close();
    });
  accepted("an all-gather is NaN until all of it is there, but for a rank's own values in place", 2, [](Rank& self) {
    constexpr size_t bytes = 8;
    Device out = self.memory(2 * bytes, 7);
    if (self.rank == 0) {
      begun(ncclAllGather(out, out, bytes, BYTES, self.comm, self.stream));
      self.settle();
      expect(cuStreamQuery(self.stream) == NOT_READY, "the other rank has not come");
      const auto found = self.read(out, 2 * bytes);
      expect(found[0] == 7 && found[bytes - 1] == 7, "its own values");
      expect(found[bytes] == 0xff && found[2 * bytes - 1] == 0xff, "values that are not there yet");
    }
    if (self.rank == 0) {
      *has_looked = 1;
    } else {
      while (!has_looked->exchange(0)) std::this_thread::yield();
      begun(ncclAllGather(out + bytes, out, bytes, BYTES, self.comm, self.stream));
      self.settle();
    }
    must(cuStreamSynchronize(self.stream));
    expect(self.read(out, 2 * bytes) == std::vector<unsigned char>(2 * bytes, 7), "all of it");
    self.close();
  });
  accepted("a rank that does not come is waited for without end, and an abort ends it", 2, [](Rank& self) {
    Device memory = self.memory(64, 1);
    if (self.rank == 0) {
      begun(ncclRecv(memory, 64, BYTES, 1, self.comm, self.stream));
      self.settle();
      for (int i = 0; i < 100; i++) {
        expect(cuStreamQuery(self.stream) == NOT_READY, "nothing came");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    self.abort();
  });
  accepted("sums come in one order on all ranks", 3, [](Rank& self) {
    for (int i = 0; i < 10; i++) {
      const float sum = reduced(self);
      Device own = self.memory(4, 0);
      must(cuMemcpyHtoD_v2(own, &sum, 4));
      const std::vector<Device> all = self.memory_of_each(4);
      self.exchange(own, 4, all, 4);
      must(cuStreamSynchronize(self.stream));
      for (Device other : all) expect(self.read(other, 4) == self.read(own, 4), "the sum of another rank");
    }
    self.close();
  });
  accepted("and in another one every time", 3, [](Rank& self) {
    bool orders[2] = {};
    for (int i = 0; i < 64; i++) orders[reduced(self) == 1.0f] = true;
    expect(orders[0] && orders[1], "64 sums of one order");
    self.close();
  });
  refused("lengths that differ", "receives 8 bytes where rank 0 sends 16", 2, [](Rank& self) {
    Device memory = self.memory(16, 1);
    if (self.rank == 0) ncclSend(memory, 16, BYTES, 1, self.comm, self.stream);
    else ncclRecv(memory, 8, BYTES, 0, self.comm, self.stream);
    self.settle();
    cuStreamSynchronize(self.stream);
  });
  refused("an all-gather past the end of its result", "ncclAllGather to", 2, [](Rank& self) {
    Device out = self.memory(16, 1), own = self.memory(16, 1);
    begun(ncclAllGather(own, out, 16, BYTES, self.comm, self.stream));
    self.settle();
    cuStreamSynchronize(self.stream);
  });
  refused("an all-gather from another rank's place", "sends from its result, but not from its place there", 2, [](Rank& self) {
    Device out = self.memory(16, 1);
    ncclAllGather(out + 8 * size_t(1 - self.rank), out, 8, BYTES, self.comm, self.stream);
  });
  refused("an all-gather of lengths that differ", "bytes where rank", 2, [](Rank& self) {
    Device out = self.memory(32, 1);
    const size_t bytes = self.rank ? 8 : 16;
    begun(ncclAllGather(out + bytes * size_t(self.rank), out, bytes, BYTES, self.comm, self.stream));
    self.settle();
    cuStreamSynchronize(self.stream);
  });
  refused("a freed buffer", "NCCL, rank 0, 1 transfers", 2, [](Rank& self) {
    Device memory = self.memory(16, 1);
    if (self.rank == 1) return;
    begun(ncclSend(memory, 16, BYTES, 1, self.comm, self.stream));
    cuMemFree_v2(memory);
    self.settle();
    cuStreamSynchronize(self.stream);
  });
  refused("a call before the last one is through", "its state was not asked for", 2, [](Rank& self) {
    Device memory = self.memory(16, 1);
    if (self.rank == 1) return;
    begun(ncclSend(memory, 16, BYTES, 1, self.comm, self.stream));
    ncclSend(memory, 16, BYTES, 1, self.comm, self.stream);
  });
  refused("another OS thread", "not on the OS thread that opened the communicator", 1,
          [](Rank& self) { std::thread([&] { ncclCommFinalize(self.comm); }).join(); });
  refused("a rank that is not there", "rank 2 of 2", 2,
          [](Rank& self) { ncclSend(self.memory(16, 1), 16, BYTES, 2, self.comm, self.stream); });
  refused("a communicator that is gone", "no such communicator", 1, [](Rank& self) {
    ncclCommAbort(self.comm);
    ncclCommFinalize(self.comm);
  });
  accepted("a loaded kernel is launched while a rank is waited for", 2, [](Rank& self) { launch_while_waiting(self, true); });
  refused("a kernel is loaded while a rank is waited for", "add_one is loaded while NCCL, rank 0", 2,
          [](Rank& self) { launch_while_waiting(self, false); });
  printf("nccl: %d tests, %d failed\n", tests, failures);
  return failures != 0;
}
