// Decides which neurons leave a layer's cache, and which of those read for a token stay in it. Sees ids and
// the slot table, never weights.
//
// For each token the layer calls `observe` once with the whole active set, then `choose` for each part of it
// (one part, unless the set exceeds the rows there are).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/slot_table.h"

namespace flashllm {

// Neurons wanted at once: ascending ids, at most as many as the cache has rows of both kinds.
struct CacheRequest {
  const std::int32_t* begin;
  const std::int32_t* end;
  const std::vector<std::int32_t>& misses;  // those of them that are not cached
};

// What happens to the cache: afterwards each miss is in exactly one of `coming` and `bypassing`, and the rows
// suffice.
struct CacheChoice {
  std::vector<std::int32_t> leaving;    // cached, none of the request's
  std::vector<std::int32_t> coming;     // read into rows of the cache
  std::vector<std::int32_t> bypassing;  // read into bypass rows, forgotten after the token
};

class CachePolicy {
 public:
  virtual ~CachePolicy() = default;

  // `active`: the token's active neurons, ascending.
  virtual void observe(const std::vector<std::int32_t>& active) = 0;

  virtual void choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) = 0;

  // Puts the likeliest to be active first, as far as the policy knows; otherwise leaves the order.
  virtual void sort_by_likelihood(std::vector<std::int32_t>& /*neurons*/) {}

  // Tokens whose neurons are held now, where the policy goes by tokens; otherwise 0.
  virtual std::int32_t current_window() const { return 0; }

  // The neurons worth holding after the tokens observed so far, ascending, at most `capacity` (used after a
  // prefill).
  virtual void choose_kept(std::int32_t capacity, std::vector<std::int32_t>& kept) const = 0;
};

// "window": paper A's, of `window` tokens. "frequency": by estimated frequency; `popularity` [num_neurons] is
// the share of tokens each neuron was active in before, or nullptr.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_neurons,
                                               std::int32_t window, const float* popularity);

}  // namespace flashllm
