// Decides which neurons leave a layer's cache. Sees ids and the slot table, never weights.
//
// For each token the layer calls `observe` once with the whole active set, then for each part of it (one
// part, unless the set exceeds the capacity) `choose_leaving`, which must leave room for the part's misses.
#pragma once

#include <cstdint>
#include <vector>

#include "slot_table.h"

namespace flashllm {

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // `active`: the token's active neurons, ascending.
  virtual void observe(const std::vector<std::int32_t>& active) = 0;

  // Fills `leaving` with cached neurons outside [part_begin, part_end) (ascending ids, at most the capacity),
  // so that the `misses` among them fit.
  virtual void choose_leaving(const SlotTable& slots, const std::int32_t* part_begin,
                              const std::int32_t* part_end, std::int32_t misses,
                              std::vector<std::int32_t>& leaving) = 0;

  // The neurons worth holding after the tokens observed so far, ascending, at most `capacity` (used after a
  // prefill).
  virtual void choose_kept(std::int32_t capacity, std::vector<std::int32_t>& kept) const = 0;
};

}  // namespace flashllm
