// Decides which units leave a layer's cache, and which of those read for a token stay in it. A unit is what
// the cache admits and evicts: a neuron, or an expert. Sees ids and the slot table, never weights.
//
// For each token the layer calls `observe` once with the whole active set, then `choose` for each part of it
// (one part, unless the set exceeds the slots there are).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/slot_table.h"

namespace flashllm {

// Units wanted at once: ascending ids, at most as many as the cache has slots of both kinds.
struct CacheRequest {
  const std::int32_t* begin;
  const std::int32_t* end;
  const std::vector<std::int32_t>& misses;  // those of them that are not cached
};

// Changes to the cache. Each miss is in exactly one of `coming` and `bypassing`, and the slots suffice.
struct CacheChoice {
  std::vector<std::int32_t> leaving;    // cached, none of the request's
  std::vector<std::int32_t> coming;     // read into slots of the cache
  std::vector<std::int32_t> bypassing;  // read into bypass slots, forgotten after the token
};

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // `active`: the token's active units, ascending.
  virtual void observe(const std::vector<std::int32_t>& active) = 0;

  virtual void choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) = 0;

  // Sorts the units most likely to be active first; a policy that does not know leaves the order.
  virtual void sort_by_likelihood(std::vector<std::int32_t>& /*units*/) {}

  // `count` of the cached units, the first that the policy would evict: they leave when the cache shrinks.
  virtual void choose_evicted(const SlotTable& slots, std::int32_t count,
                              std::vector<std::int32_t>& evicted) = 0;

  // Tokens in the window now, for a policy that has one; otherwise 0.
  virtual std::int32_t current_window() const { return 0; }

  // Of `candidates`, ascending, the units worth holding after the tokens observed so far, at most `capacity`
  // (used while a prompt is computed).
  virtual void choose_kept(const std::vector<std::int32_t>& candidates, std::int32_t capacity,
                           std::vector<std::int32_t>& kept) const = 0;
};

// "window": paper A's, of `window` tokens. "frequency": by estimated frequency; `popularity` [num_units] is
// the share of tokens each unit was active in before, or nullptr. Throws CoreError for another name.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_units,
                                               std::int32_t window, const float* popularity);

}  // namespace flashllm
