// The ops whose rows do not meet: errors against f64, row bits, bits whatever the schedule.
#pragma once

#include <string>

#include "engine.h"

namespace suite {

// What is wrong first, or nothing.
std::string wrong_row_op(const cuda_host::Options& options, bool small);

}  // namespace suite
