// What a layer's cache would miss, token by token, without weights or reads: the policy and the slot table
// alone, driven as NeuronCache drives them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_policy.h"
#include "cache/slot_table.h"

namespace flashllm {

class CacheReplay {
 public:
  // Arguments as those of NeuronCache and `make_cache_policy`.
  CacheReplay(const std::string& policy, std::int32_t num_units, std::int32_t capacity,
              std::int32_t bypass_capacity, std::int32_t window, const float* popularity);

  std::int32_t num_units() const { return slots_.num_units(); }

  // The units of the next token (`active`: ascending) that have to be read; valid until the next call.
  const std::vector<std::int32_t>& token(const std::vector<std::int32_t>& active);
  // Those of `units` that are not cached, the likeliest to be active first.
  std::vector<std::int32_t> missing(std::vector<std::int32_t> units) const;

 private:
  SlotTable slots_;
  std::unique_ptr<CachePolicy> policy_;
  CacheChoice choice_;
  std::vector<std::int32_t> part_misses_, misses_;
  std::vector<SlotTable::Move> moves_;
};

}  // namespace flashllm
