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

NeuronCache::NeuronCache(const NeuronCacheOptions& options, std::byte* memory, std::byte* bypass_memory)
    : units_(options.units),
      stride_(options.stride),
      unit_nbytes_(static_cast<std::size_t>(options.units.size) * options.stride),
      memory_(memory),
      bypass_memory_(bypass_memory),
      slots_(options.units.count(), options.capacity, options.bypass_capacity),
      max_capacity_(slots_.capacity()),
      policy_(make_cache_policy(options.policy, options.units.count(), options.window, options.popularity)) {
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
               [this](std::int32_t unit) { return !slots_.contains(unit); });
  policy_->choose(slots_, {begin, end, misses_}, choice_);
  exchange(choice_.leaving, choice_.coming);
  slots_.bypass(choice_.bypassing);
}

void NeuronCache::end_part() {
  slots_.end_bypass();
  if (!policy_->keeps_units()) forget(choice_.coming);
}

void NeuronCache::discard_part() {
  slots_.end_bypass();
  forget(choice_.coming);
}

void NeuronCache::exchange(const std::vector<std::int32_t>& leaving,
                           const std::vector<std::int32_t>& coming) {
  slots_.exchange(leaving, coming, moves_);
  for (const SlotTable::Move& move : moves_) std::memcpy(at(move.to), at(move.from), unit_nbytes_);
  moved_ += moves_.size();
}

void NeuronCache::begin_fill() {
  abandon_fill();
  std::vector<std::int32_t> kept;
  policy_->choose_kept(slots_.capacity(), kept);
  leaving_.clear();
  for (std::int32_t slot = 0; slot < slots_.num_used(); ++slot) {
    const std::int32_t unit = slots_.pointers()[slot];
    if (!std::binary_search(kept.begin(), kept.end(), unit)) leaving_.push_back(unit);
  }
  for (const std::int32_t unit : kept)
    if (!slots_.contains(unit)) pending_fill_.push_back(unit);
  exchange(leaving_, pending_fill_);
  filled_from_ = filled_to_ = 0;
}

// A unit is there once its last row has come, all others before it without a gap.
void NeuronCache::fill_from(const std::byte* rows, std::int32_t first_row, std::int32_t count,
                            ThreadPool& pool) {
  const std::int32_t end_row = first_row + count;
  const auto begin = std::lower_bound(pending_fill_.begin(), pending_fill_.end(), first_row / units_.size);
  auto end = std::lower_bound(begin, pending_fill_.end(), units_.from(end_row));
  const auto size = static_cast<std::size_t>(units_.size);
  pool.parallel_for(static_cast<std::size_t>(end - begin) * size, kCopyGrain,
                    [&](std::size_t from, std::size_t to) {
                      for (std::size_t i = from; i < to; ++i) {
                        const std::int32_t unit = begin[static_cast<std::ptrdiff_t>(i / size)];
                        const std::int32_t row = units_.first(unit) + static_cast<std::int32_t>(i % size);
                        if (row < first_row || row >= end_row) continue;
                        std::memcpy(this->rows(unit) + i % size * stride_,
                                    rows + static_cast<std::size_t>(row - first_row) * stride_, stride_);
                      }
                    });
  if (first_row != filled_to_) filled_from_ = first_row;
  filled_to_ = end_row;
  auto whole = begin;
  if (whole != end && units_.first(*whole) < filled_from_) ++whole;                   // rows of it never came
  if (whole != end && units_.first(end[-1]) + units_.rows(end[-1]) > end_row) --end;  // the rest is to come
  if (whole < end) pending_fill_.erase(whole, end);
}

void NeuronCache::abandon_fill() {
  if (pending_fill_.empty()) return;
  forget(pending_fill_);
  pending_fill_.clear();
}

void NeuronCache::set_capacity(std::int32_t capacity) {
  if (capacity < 0 || capacity + slots_.bypass_capacity() < 1 || capacity > max_capacity_)
    throw CoreError(ErrorKind::usage, "a cache of at most " + std::to_string(max_capacity_) +
                                          " slots cannot have " + std::to_string(capacity));
  abandon_fill();
  const std::int32_t before = slots_.capacity();
  if (slots_.num_used() > capacity) {
    policy_->choose_evicted(slots_, slots_.num_used() - capacity, leaving_);
    forget(leaving_);
  }
  slots_.set_capacity(capacity);
  const auto nbytes = [this](std::int32_t slots) { return static_cast<std::size_t>(slots) * unit_nbytes_; };
  if (capacity < before)
    release_pages(memory_ + nbytes(capacity), nbytes(max_capacity_ - capacity));
  else if (capacity > before)
    reclaim_pages(memory_, nbytes(capacity));
}

std::uint64_t NeuronCache::take_moves() { return std::exchange(moved_, 0); }

}  // namespace flashllm
