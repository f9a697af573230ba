#include "cache/window_policy.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace flashllm {

WindowPolicy::WindowPolicy(std::int32_t num_neurons, std::int32_t window) : window_(window) {
  if (window < 1)
    throw CoreError(ErrorKind::usage, "the window must be at least 1 token, got " + std::to_string(window));
  uses_.assign(static_cast<std::size_t>(num_neurons), 0);
}

void WindowPolicy::forget_oldest() {
  for (const std::int32_t neuron : last_k_active_.front()) --uses_[static_cast<std::size_t>(neuron)];
  spare_ = std::move(last_k_active_.front());
  last_k_active_.pop_front();
}

void WindowPolicy::observe(const std::vector<std::int32_t>& active) {
  spare_.assign(active.begin(), active.end());
  last_k_active_.push_back(std::move(spare_));
  spare_ = {};
  for (const std::int32_t neuron : active) ++uses_[static_cast<std::size_t>(neuron)];
  if (current_window() > window_) forget_oldest();
}

void WindowPolicy::choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) {
  choice.leaving.clear();
  choice.bypassing.clear();
  choice.coming.assign(request.misses.begin(), request.misses.end());
  make_room(slots, request, choice.leaving);
}

void WindowPolicy::make_room(const SlotTable& slots, const CacheRequest& request,
                             std::vector<std::int32_t>& leaving) {
  const auto misses = static_cast<std::int32_t>(request.misses.size());
  const auto room = [&] {
    return slots.capacity() - slots.num_used() + static_cast<std::int32_t>(leaving.size());
  };
  // A walk over the cached rows, a few microseconds: nothing to keep in step with reads that failed, rows
  // that came in a prefill, or neurons that left and returned.
  const auto take_unused = [&] {
    leaving.clear();
    for (std::int32_t slot = 0; slot < slots.num_used(); ++slot) {
      const std::int32_t neuron = slots.pointers()[slot];
      if (uses_[static_cast<std::size_t>(neuron)] == 0) leaving.push_back(neuron);
    }
  };

  // 1. What fell out of the window goes.
  take_unused();
  // 2. Too little room: the window shrinks, down to the token at hand.
  while (room() < misses && current_window() > 1) {
    forget_oldest();
    take_unused();
  }
  if (room() >= misses) return;
  // 3. The token alone exceeds the capacity: what belongs to its other parts goes, as little as needed.
  std::vector<std::int32_t> others;
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot) {
    const std::int32_t neuron = slots.pointers()[slot];
    if (uses_[static_cast<std::size_t>(neuron)] != 0 &&
        !std::binary_search(request.begin, request.end, neuron))
      others.push_back(neuron);
  }
  std::sort(others.begin(), others.end());  // the choice depends on ids, not on where rows happen to lie
  others.resize(std::min(others.size(), static_cast<std::size_t>(misses - room())));
  leaving.insert(leaving.end(), others.begin(), others.end());
}

void WindowPolicy::choose_kept(std::int32_t capacity, std::vector<std::int32_t>& kept) const {
  kept.clear();
  std::vector<std::int32_t> wider;
  for (auto set = last_k_active_.rbegin(); set != last_k_active_.rend(); ++set) {
    wider.clear();
    std::set_union(kept.begin(), kept.end(), set->begin(), set->end(), std::back_inserter(wider));
    if (wider.size() > static_cast<std::size_t>(capacity)) {
      if (kept.empty()) kept.assign(set->begin(), set->begin() + capacity);
      return;
    }
    kept.swap(wider);
  }
}

}  // namespace flashllm
