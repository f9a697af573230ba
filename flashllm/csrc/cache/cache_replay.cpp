#include "cache/cache_replay.h"

#include <algorithm>
#include <iterator>

#include "cache/policies.h"
#include "io/error.h"

namespace flashllm {

CacheReplay::CacheReplay(const std::string& policy, std::int32_t num_neurons, std::int32_t capacity,
                         std::int32_t bypass_capacity, std::int32_t window, const float* popularity)
    : slots_(num_neurons, capacity, bypass_capacity),
      policy_(make_cache_policy(policy, num_neurons, window, popularity)) {
  if (capacity < 1) throw CoreError(ErrorKind::usage, "a cache needs at least one row");
}

const std::vector<std::int32_t>& CacheReplay::token(const std::vector<std::int32_t>& active) {
  policy_->observe(active);
  misses_.clear();
  const auto rows = static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  for (std::size_t begin = 0; begin < active.size(); begin += rows) {
    const std::int32_t* const first = active.data() + begin;
    const std::int32_t* const last = active.data() + std::min(begin + rows, active.size());
    part_misses_.clear();
    std::copy_if(first, last, std::back_inserter(part_misses_),
                 [this](std::int32_t neuron) { return !slots_.contains(neuron); });
    policy_->choose(slots_, {first, last, part_misses_}, choice_);
    slots_.exchange(choice_.leaving, choice_.coming, moves_);
    if (!policy_->keeps_rows()) slots_.exchange(choice_.coming, {}, moves_);
    misses_.insert(misses_.end(), part_misses_.begin(), part_misses_.end());
  }
  return misses_;
}

std::vector<std::int32_t> CacheReplay::missing(std::vector<std::int32_t> neurons) const {
  neurons.erase(std::remove_if(neurons.begin(), neurons.end(),
                               [this](std::int32_t neuron) { return slots_.contains(neuron); }),
                neurons.end());
  policy_->sort_by_likelihood(neurons);
  return neurons;
}

}  // namespace flashllm
