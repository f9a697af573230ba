#include "cache/neuron_cache.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "cache/policies.h"
#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

namespace {

constexpr std::size_t kCopyGrain = 4;  // rows a thread copies at a time

}  // namespace

NeuronCache::NeuronCache(const NeuronCacheOptions& options, std::byte* rows, std::byte* bypass_rows)
    : stride_(options.stride),
      rows_(rows),
      bypass_rows_(bypass_rows),
      slots_(options.num_neurons, options.capacity, options.bypass_capacity),
      max_capacity_(slots_.capacity()),
      policy_(make_cache_policy(options.policy, options.num_neurons, options.window, options.popularity)) {
  for (auto* ids :
       {&misses_, &leaving_, &pending_fill_, &choice_.leaving, &choice_.coming, &choice_.bypassing})
    ids->reserve(part_size());
  moves_.reserve(part_size());
}

void NeuronCache::begin_token(const std::vector<std::int32_t>& active) {
  abandon_fill();
  observe(active);
}

void NeuronCache::admit(const std::int32_t* begin, const std::int32_t* end) {
  misses_.clear();
  std::copy_if(begin, end, std::back_inserter(misses_),
               [this](std::int32_t neuron) { return !slots_.contains(neuron); });
  policy_->choose(slots_, {begin, end, misses_}, choice_);
  exchange(choice_.leaving, choice_.coming);
  slots_.bypass(choice_.bypassing);
}

void NeuronCache::end_part() {
  slots_.end_bypass();
  if (!policy_->keeps_rows()) forget(choice_.coming);
}

void NeuronCache::discard_part() {
  slots_.end_bypass();
  forget(choice_.coming);
}

void NeuronCache::exchange(const std::vector<std::int32_t>& leaving,
                           const std::vector<std::int32_t>& coming) {
  slots_.exchange(leaving, coming, moves_);
  for (const SlotTable::Move& move : moves_) std::memcpy(row_at(move.to), row_at(move.from), stride_);
  moved_ += moves_.size();
}

void NeuronCache::begin_fill() {
  abandon_fill();
  std::vector<std::int32_t> kept;
  policy_->choose_kept(slots_.capacity(), kept);
  leaving_.clear();
  for (std::int32_t slot = 0; slot < slots_.num_used(); ++slot) {
    const std::int32_t neuron = slots_.pointers()[slot];
    if (!std::binary_search(kept.begin(), kept.end(), neuron)) leaving_.push_back(neuron);
  }
  for (const std::int32_t neuron : kept)
    if (!slots_.contains(neuron)) pending_fill_.push_back(neuron);
  exchange(leaving_, pending_fill_);
}

void NeuronCache::fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count,
                            ThreadPool& pool) {
  const auto begin = std::lower_bound(pending_fill_.begin(), pending_fill_.end(), first_neuron);
  const auto end = std::lower_bound(begin, pending_fill_.end(), first_neuron + count);
  pool.parallel_for(static_cast<std::size_t>(end - begin), kCopyGrain,
                    [&](std::size_t first, std::size_t last) {
                      for (std::size_t i = first; i < last; ++i) {
                        const std::int32_t neuron = begin[static_cast<std::ptrdiff_t>(i)];
                        const auto at = static_cast<std::size_t>(neuron - first_neuron);
                        std::memcpy(row(neuron), rows + at * stride_, stride_);
                      }
                    });
  pending_fill_.erase(begin, end);
}

void NeuronCache::abandon_fill() {
  if (pending_fill_.empty()) return;
  forget(pending_fill_);
  pending_fill_.clear();
}

void NeuronCache::set_capacity(std::int32_t capacity) {
  if (capacity < 1 || capacity > max_capacity_)
    throw CoreError(ErrorKind::usage, "a neuron cache of at most " + std::to_string(max_capacity_) +
                                          " rows cannot have " + std::to_string(capacity));
  abandon_fill();
  const std::int32_t before = slots_.capacity();
  if (slots_.num_used() > capacity) {
    policy_->choose_evicted(slots_, slots_.num_used() - capacity, leaving_);
    forget(leaving_);
  }
  slots_.set_capacity(capacity);
  const auto nbytes = [this](std::int32_t rows) { return static_cast<std::size_t>(rows) * stride_; };
  if (capacity < before)
    release_pages(rows_ + nbytes(capacity), nbytes(max_capacity_ - capacity));
  else if (capacity > before)
    reclaim_pages(rows_, nbytes(capacity));
}

std::uint64_t NeuronCache::take_moves() { return std::exchange(moved_, 0); }

}  // namespace flashllm
