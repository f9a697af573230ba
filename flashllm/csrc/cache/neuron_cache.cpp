#include "cache/neuron_cache.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "cache/frequency_policy.h"
#include "cache/window_policy.h"
#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

namespace {

constexpr std::size_t kCopyGrain = 4;  // rows a thread copies at a time

}  // namespace

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_units,
                                               std::int32_t window, const float* popularity) {
  if (name == "window") return std::make_unique<WindowPolicy>(num_units, window);
  if (name == "frequency") return std::make_unique<FrequencyPolicy>(num_units, popularity);
  throw CoreError(ErrorKind::usage, "the cache policy must be window or frequency, got " + name);
}

NeuronCache::NeuronCache(const NeuronCacheOptions& options, std::byte* memory, std::byte* bypass_memory)
    : units_(options.units),
      stride_(options.stride),
      unit_nbytes_(static_cast<std::size_t>(options.units.size) * options.stride),
      memory_(memory),
      bypass_memory_(bypass_memory),
      slots_(options.units.count(), options.capacity, options.bypass_capacity),
      max_capacity_(slots_.capacity()),
      policy_(make_cache_policy(options.policy, options.units.count(), options.window, options.popularity)) {
  for (auto* ids : {&misses_, &leaving_, &choice_.leaving, &choice_.coming, &choice_.bypassing})
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

void NeuronCache::discard_part() {
  slots_.end_bypass();
  forget(choice_.coming);
}

void NeuronCache::exchange(const std::vector<std::int32_t>& leaving,
                           const std::vector<std::int32_t>& coming) {
  slots_.exchange(leaving, coming, moves_);
  for (const SlotTable::Move& move : moves_) std::memcpy(at(move.to), at(move.from), unit_nbytes_);
}

void NeuronCache::begin_fill(const std::vector<std::int32_t>* passing) {
  abandon_fill();
  // 1. What is cached, or comes by, may be kept.
  std::vector<std::int32_t> candidates, kept, used, coming;
  for (std::int32_t unit = 0; unit < num_units(); ++unit) {
    const bool comes = passing == nullptr || std::binary_search(passing->begin(), passing->end(), unit);
    if (comes || slots_.contains(unit)) candidates.push_back(unit);
  }
  policy_->choose_kept(candidates, slots_.capacity(), kept);
  // 2. What is not leaves now, or once it was used.
  leaving_.clear();
  for (const std::int32_t unit : candidates) {
    const bool is_kept = std::binary_search(kept.begin(), kept.end(), unit);
    if (slots_.contains(unit) == is_kept) continue;
    if (is_kept)
      awaited_.push_back({unit, SlotTable::kAbsent});
    else if (passing != nullptr && std::binary_search(passing->begin(), passing->end(), unit))
      used.push_back(unit);
    else
      leaving_.push_back(unit);
  }
  // 3. The first to come get the slots that are free, others those of units that were used before.
  std::size_t free = static_cast<std::size_t>(slots_.capacity() - slots_.num_used()) + leaving_.size();
  auto next_used = used.begin();
  auto fits = awaited_.begin();
  for (const Awaited& each : awaited_) {
    if (free != 0) {
      --free;
      coming.push_back(each.unit);
      *fits++ = each;
    } else if (next_used != used.end() && *next_used < each.unit) {
      *fits++ = {each.unit, *next_used++};
    }
  }
  awaited_.erase(fits, awaited_.end());
  exchange(leaving_, coming);
  filled_from_ = filled_to_ = 0;
}

// A unit is there once its last row has come, all others before it without a gap.
void NeuronCache::fill_from(const std::byte* rows, std::int32_t first_row, std::int32_t count,
                            ThreadPool& pool) {
  const std::int32_t end_row = first_row + count;
  const auto from = [this](std::int32_t unit) {
    return std::lower_bound(awaited_.begin(), awaited_.end(), unit,
                            [](const Awaited& each, std::int32_t id) { return each.unit < id; });
  };
  const auto begin = from(first_row / units_.size);
  auto end = from(units_.from(end_row));
  for (auto each = begin; each != end; ++each) {
    if (each->leaving == SlotTable::kAbsent) continue;
    exchange({each->leaving}, {each->unit});
    each->leaving = SlotTable::kAbsent;
  }
  const auto size = static_cast<std::size_t>(units_.size);
  pool.parallel_for(static_cast<std::size_t>(end - begin) * size, kCopyGrain,
                    [&](std::size_t at, std::size_t to) {
                      for (std::size_t i = at; i < to; ++i) {
                        const std::int32_t unit = begin[static_cast<std::ptrdiff_t>(i / size)].unit;
                        const std::int32_t row = units_.first(unit) + static_cast<std::int32_t>(i % size);
                        if (row < first_row || row >= end_row) continue;
                        std::memcpy(this->rows(unit) + i % size * stride_,
                                    rows + static_cast<std::size_t>(row - first_row) * stride_, stride_);
                      }
                    });
  if (first_row != filled_to_) filled_from_ = first_row;
  filled_to_ = end_row;
  auto whole = begin;
  if (whole != end && units_.first(whole->unit) < filled_from_) ++whole;  // rows of it never came
  if (whole != end && units_.first(end[-1].unit) + units_.rows(end[-1].unit) > end_row)
    --end;  // the rest comes
  if (whole < end) awaited_.erase(whole, end);
}

bool NeuronCache::awaits(std::int32_t unit) const {
  return std::any_of(awaited_.begin(), awaited_.end(),
                     [&](const Awaited& each) { return each.unit == unit; });
}

void NeuronCache::abandon_fill() {
  std::vector<std::int32_t> absent;
  for (const Awaited& each : awaited_)
    if (each.leaving == SlotTable::kAbsent) absent.push_back(each.unit);
  awaited_.clear();
  if (!absent.empty()) forget(absent);
}

void NeuronCache::set_capacity(std::int32_t capacity) {
  require(capacity >= 0 && capacity + slots_.bypass_capacity() >= 1 && capacity <= max_capacity_,
          "a cache of at most " + std::to_string(max_capacity_) + " slots cannot have " +
              std::to_string(capacity));
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

}  // namespace flashllm
