// One lock for all atomics of emulated kernels.
#include <mutex>

#include "include/device_language.h"

namespace {
std::mutex mutex;
}
device_language::AtomicLock::AtomicLock() { mutex.lock(); }
device_language::AtomicLock::~AtomicLock() { mutex.unlock(); }
