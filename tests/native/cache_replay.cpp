#include "cache_replay.h"

#include <algorithm>
#include <iterator>

#include "cache/cache_policy.h"
#include "io/error.h"

namespace flashllm {

CacheReplay::CacheReplay(const std::string& policy, std::int32_t num_units, std::int32_t capacity,
                         std::int32_t bypass_capacity, std::int32_t window, const float* popularity)
    : slots_(num_units, capacity, bypass_capacity),
      policy_(make_cache_policy(policy, num_units, window, popularity)) {}

const std::vector<std::int32_t>& CacheReplay::token(const std::vector<std::int32_t>& active) {
  policy_->observe(active);
  misses_.clear();
  const auto room = static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  for (std::size_t begin = 0; begin < active.size(); begin += room) {
    const std::int32_t* const first = active.data() + begin;
    const std::int32_t* const last = active.data() + std::min(begin + room, active.size());
    part_misses_.clear();
    std::copy_if(first, last, std::back_inserter(part_misses_),
                 [this](std::int32_t unit) { return !slots_.contains(unit); });
    policy_->choose(slots_, {first, last, part_misses_}, choice_);
    slots_.exchange(choice_.leaving, choice_.coming, moves_);
    misses_.insert(misses_.end(), part_misses_.begin(), part_misses_.end());
  }
  return misses_;
}

std::vector<std::int32_t> CacheReplay::missing(std::vector<std::int32_t> units) const {
  units.erase(
      std::remove_if(units.begin(), units.end(), [this](std::int32_t unit) { return slots_.contains(unit); }),
      units.end());
  policy_->sort_by_likelihood(units);
  return units;
}

}  // namespace flashllm
