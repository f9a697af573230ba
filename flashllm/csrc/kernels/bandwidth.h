// How fast this machine reads memory: the roof of everything that reads each weight once.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/kernels.h"

namespace flashllm {

// Bytes per second of single passes over `nbytes` of memory, at least one and for about `seconds`. All
// threads of the pool sum their parts of one huge-page buffer, which must be well beyond the caches.
// Allocating and first touching it are not counted. Throws CoreError (usage), std::bad_alloc.
std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t nbytes, double seconds, SimdLevel level);

}  // namespace flashllm
