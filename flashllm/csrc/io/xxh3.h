// XXH3-64 with seed 0 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for rows only: lengths above
// 240 bytes. Shorter inputs have other rules in the specification, and no row is that short.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashllm {

constexpr std::size_t kMinHashed = 512;
constexpr std::size_t kHashedMultiple = 64;  // of rows that are stored in stripes of their own
static_assert(kMinHashed > 240, "XXH3 hashes up to 240 bytes in another way");

// `nbytes` must be at least kMinHashed.
std::uint64_t xxh3_64(const void* data, std::size_t nbytes);

}  // namespace flashllm
