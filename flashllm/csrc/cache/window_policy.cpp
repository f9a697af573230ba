#include "cache/window_policy.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace flashllm {

WindowPolicy::WindowPolicy(std::int32_t num_units, std::int32_t window) : window_(window) {
  require(window >= 1, "the window must be at least 1 token, got " + std::to_string(window));
  uses_.assign(static_cast<std::size_t>(num_units), 0);
}

void WindowPolicy::forget_oldest() {
  for (const std::int32_t unit : last_k_active_.front()) --uses_[static_cast<std::size_t>(unit)];
  spare_ = std::move(last_k_active_.front());
  last_k_active_.pop_front();
}

void WindowPolicy::observe(const std::vector<std::int32_t>& active) {
  spare_.assign(active.begin(), active.end());
  last_k_active_.push_back(std::move(spare_));
  spare_ = {};
  for (const std::int32_t unit : active) ++uses_[static_cast<std::size_t>(unit)];
  if (current_window() > window_) forget_oldest();
}

void WindowPolicy::choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) {
  choice.leaving.clear();
  choice.bypassing.clear();
  choice.coming.assign(request.misses.begin(), request.misses.end());
  make_room(slots, request, choice.leaving);
}

// Cached units of no token in the window, and not in [except_begin, except_end), which ascends: tokens that
// were drafted want units that the policy has not heard of. A walk over the cached slots takes a few
// microseconds, and needs no state of its own that failed reads, fills after a prompt or returning units
// could put out of step.
void WindowPolicy::take_unused(const SlotTable& slots, const std::int32_t* except_begin,
                               const std::int32_t* except_end, std::vector<std::int32_t>& leaving) const {
  leaving.clear();
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot) {
    const std::int32_t unit = slots.pointers()[slot];
    if (uses_[static_cast<std::size_t>(unit)] == 0 && !std::binary_search(except_begin, except_end, unit))
      leaving.push_back(unit);
  }
}

// Adds `count` of the cached units in the window, but none of [except_begin, except_end), which ascends.
// The choice depends on ids, not on where slots happen to lie.
void WindowPolicy::take_lowest_used(const SlotTable& slots, const std::int32_t* except_begin,
                                    const std::int32_t* except_end, std::size_t count,
                                    std::vector<std::int32_t>& leaving) const {
  std::vector<std::int32_t> others;
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot) {
    const std::int32_t unit = slots.pointers()[slot];
    if (uses_[static_cast<std::size_t>(unit)] != 0 && !std::binary_search(except_begin, except_end, unit))
      others.push_back(unit);
  }
  std::sort(others.begin(), others.end());
  others.resize(std::min(others.size(), count));
  leaving.insert(leaving.end(), others.begin(), others.end());
}

void WindowPolicy::make_room(const SlotTable& slots, const CacheRequest& request,
                             std::vector<std::int32_t>& leaving) {
  const auto misses = static_cast<std::int32_t>(request.misses.size());
  const auto room = [&] {
    return slots.capacity() - slots.num_used() + static_cast<std::int32_t>(leaving.size());
  };
  // 1. What fell out of the window goes.
  take_unused(slots, request.begin, request.end, leaving);
  // 2. Too little room: the window shrinks, down to the token at hand.
  while (room() < misses && current_window() > 1) {
    forget_oldest();
    take_unused(slots, request.begin, request.end, leaving);
  }
  if (room() >= misses) return;
  // 3. The token alone exceeds the capacity: what belongs to its other parts goes, as little as needed.
  take_lowest_used(slots, request.begin, request.end, static_cast<std::size_t>(misses - room()), leaving);
}

void WindowPolicy::choose_evicted(const SlotTable& slots, std::int32_t count,
                                  std::vector<std::int32_t>& evicted) {
  const auto wanted = static_cast<std::size_t>(count);
  take_unused(slots, nullptr, nullptr, evicted);
  while (evicted.size() < wanted && current_window() > 1) {
    forget_oldest();
    take_unused(slots, nullptr, nullptr, evicted);
  }
  if (evicted.size() < wanted) take_lowest_used(slots, nullptr, nullptr, wanted - evicted.size(), evicted);
  evicted.resize(wanted);
}

void WindowPolicy::choose_kept(const std::vector<std::int32_t>& candidates, std::int32_t capacity,
                               std::vector<std::int32_t>& kept) const {
  kept.clear();
  std::vector<std::int32_t> active, wider;
  for (auto set = last_k_active_.rbegin(); set != last_k_active_.rend(); ++set) {
    active.clear();
    wider.clear();
    std::set_intersection(set->begin(), set->end(), candidates.begin(), candidates.end(),
                          std::back_inserter(active));
    std::set_union(kept.begin(), kept.end(), active.begin(), active.end(), std::back_inserter(wider));
    if (wider.size() > static_cast<std::size_t>(capacity)) {
      if (kept.empty()) kept.assign(active.begin(), active.begin() + capacity);
      return;
    }
    kept.swap(wider);
  }
}

}  // namespace flashllm
