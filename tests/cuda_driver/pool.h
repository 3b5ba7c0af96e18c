// The device's memory pool, as an account of where blocks would lie: addresses are `reserve`'s, never used twice.
//
// As documented of the real one: what is freed on a stream may be had at once by that stream, and by others when the
// free's turn has come; a wait of the host gives back what is free beyond the release threshold. A copy that waits does
// too: the real one may. Its policy is ours, not NVIDIA's: the smallest run of free bytes that suffices, cut to size; where
// there is none, a reservation rounded up to 2 MiB. Reservations never adjoin, and go back whole.
#pragma once

#include "driver.h"

namespace cuda_driver {

// The turn of a free: whether it has come.
using Turn = std::shared_ptr<bool>;

// Takes memory for `address`, of a device of `room` bytes: from the pool in the order of `stream`, beside it when that is
// null. False where there is no room.
bool pool_take(CUdeviceptr address, size_t bytes, const Stream* stream, size_t room);
// At the call that frees. The work that it leaves sets the turn.
Turn pool_free(CUdeviceptr address, const Stream* stream);
// The host has waited for a stream, an event or the context.
void pool_waited();
// Memory of recorded launches, which the pool is not asked for: as much as the greatest of them takes, for good.
bool pool_take_for_graphs(size_t bytes, size_t room);
size_t pool_graph_bytes();
// What neither others nor cuMemAlloc can have.
size_t pool_taken_bytes();
void pool_tell();

}  // namespace cuda_driver
