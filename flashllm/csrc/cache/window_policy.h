// The paper's sliding window (paper A, sections 3.1 and 3.3): a unit stays while it was active in the last
// k tokens.
//
// When the units of k tokens do not fit, the oldest tokens are forgotten until they do: the window shrinks,
// the limit does not move (contract 3). It grows again by itself as tokens come.
#pragma once

#include <deque>

#include "cache/cache_policy.h"

namespace flashllm {

class WindowPolicy final : public CachePolicy {
 public:
  WindowPolicy(std::int32_t num_units, std::int32_t window);

  void observe(const std::vector<std::int32_t>& active) override;
  // Every miss comes into the cache.
  void choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) override;
  // Shrinks the window first, as `choose` does.
  void choose_evicted(const SlotTable& slots, std::int32_t count,
                      std::vector<std::int32_t>& evicted) override;
  void choose_kept(const std::vector<std::int32_t>& candidates, std::int32_t capacity,
                   std::vector<std::int32_t>& kept) const override;

  std::int32_t current_window() const override { return static_cast<std::int32_t>(last_k_active_.size()); }

 private:
  void forget_oldest();
  void take_unused(const SlotTable& slots, const std::int32_t* except_begin, const std::int32_t* except_end,
                   std::vector<std::int32_t>& leaving) const;
  void make_room(const SlotTable& slots, const CacheRequest& request, std::vector<std::int32_t>& leaving);
  void take_lowest_used(const SlotTable& slots, const std::int32_t* except_begin,
                        const std::int32_t* except_end, std::size_t count,
                        std::vector<std::int32_t>& leaving) const;

  std::int32_t window_;
  std::deque<std::vector<std::int32_t>> last_k_active_;  // the newest token last
  std::vector<std::int32_t> uses_;                       // [num_units]: in how many of those sets
  std::vector<std::int32_t> spare_;                      // a set's memory, used again
};

}  // namespace flashllm
