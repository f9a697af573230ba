#include "cache/frequency_policy.h"

#include <algorithm>
#include <cmath>

namespace flashllm {

namespace {

constexpr float kMaxIncrement = 1e20F;
constexpr float kMaxTokens = 1 << 23;  // from 2^24 on, adding one to a float changes nothing

}  // namespace

FrequencyPolicy::FrequencyPolicy(std::int32_t num_units, const float* popularity) {
  const auto units = static_cast<std::size_t>(num_units);
  counts_.assign(units, {0.0F, 0.0F});
  requested_by_.assign(units, 0);
  candidates_.reserve(units);
  bypassing_.reserve(units);
  if (popularity == nullptr) return;
  // As if it had been so always: recent counts tend to share * (1 + 1/2^(1/H) + 1/4^(1/H) + ...).
  const auto recent_tokens = static_cast<float>(1.0 / (1.0 - std::exp2(-1.0 / kHalfLife)));
  for (std::size_t unit = 0; unit < units; ++unit)
    counts_[unit] = {popularity[unit] * recent_tokens, popularity[unit] * kKnownTokens};
  tokens_ = kKnownTokens;
  weigh();
}

void FrequencyPolicy::observe(const std::vector<std::int32_t>& active) {
  static const auto growth = static_cast<float>(std::exp2(1.0 / kHalfLife));
  increment_ *= growth;
  tokens_ += 1.0F;
  for (const std::int32_t unit : active) {
    Counts& counts = counts_[static_cast<std::size_t>(unit)];
    counts.recent += increment_;
    counts.total += 1.0F;
  }
  if (increment_ > kMaxIncrement) {
    for (Counts& counts : counts_) counts.recent /= increment_;
    increment_ = 1.0F;
  }
  if (tokens_ >= kMaxTokens) {
    for (Counts& counts : counts_) counts.total *= 0.5F;
    tokens_ *= 0.5F;
  }
  weigh();
}

void FrequencyPolicy::choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) {
  choice.leaving.clear();
  choice.coming.clear();
  choice.bypassing.clear();
  if (request.misses.empty()) return;

  // 1. Candidates for a slot: the cached units that are not wanted now, and the misses.
  ++request_;
  for (const std::int32_t* unit = request.begin; unit != request.end; ++unit)
    requested_by_[static_cast<std::size_t>(*unit)] = request_;
  candidates_.clear();
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot) {
    const std::int32_t unit = slots.pointers()[slot];
    if (requested_by_[static_cast<std::size_t>(unit)] != request_) candidates_.push_back(candidate(unit));
  }
  const std::int32_t hits = slots.num_used() - static_cast<std::int32_t>(candidates_.size());
  for (const std::int32_t unit : request.misses) candidates_.push_back(candidate(unit, kNewcomer));

  // 2. The most frequent of them get one; misses among the others are bypassed.
  const auto room =
      candidates_.begin() +
      std::min<std::ptrdiff_t>(slots.capacity() - hits, static_cast<std::ptrdiff_t>(candidates_.size()));
  std::nth_element(candidates_.begin(), room, candidates_.end());
  bypassing_.clear();
  for (auto one = candidates_.begin(); one != candidates_.end(); ++one) {
    const std::int32_t unit = unit_of(*one);
    const bool cached = slots.contains(unit);
    if (one < room) {
      if (!cached) choice.coming.push_back(unit);
    } else if (cached) {
      choice.leaving.push_back(unit);
    } else {
      bypassing_.push_back(*one);
    }
  }

  // 3. Too few bypass slots: a unit wanted now takes the slot of a cached one after all.
  const auto room_aside = static_cast<std::size_t>(slots.bypass_capacity());
  if (bypassing_.size() > room_aside) {
    const auto excess = static_cast<std::ptrdiff_t>(bypassing_.size() - room_aside);
    const auto kept = std::remove_if(candidates_.begin(), room,
                                     [&](Candidate one) { return !slots.contains(unit_of(one)); });
    std::nth_element(candidates_.begin(), kept - excess, kept);
    for (auto one = kept - excess; one != kept; ++one) choice.leaving.push_back(unit_of(*one));
    std::nth_element(bypassing_.begin(), bypassing_.begin() + excess, bypassing_.end());
    for (std::ptrdiff_t i = 0; i < excess; ++i)
      choice.coming.push_back(unit_of(bypassing_[static_cast<std::size_t>(i)]));
    bypassing_.erase(bypassing_.begin(), bypassing_.begin() + excess);
  }
  for (const Candidate one : bypassing_) choice.bypassing.push_back(unit_of(one));
}

void FrequencyPolicy::choose_evicted(const SlotTable& slots, std::int32_t count,
                                     std::vector<std::int32_t>& evicted) {
  candidates_.clear();
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot)
    candidates_.push_back(candidate(slots.pointers()[slot]));
  std::nth_element(candidates_.begin(), candidates_.end() - count, candidates_.end());
  evicted.clear();
  for (auto one = candidates_.end() - count; one != candidates_.end(); ++one)
    evicted.push_back(unit_of(*one));
}

void FrequencyPolicy::sort_by_likelihood(std::vector<std::int32_t>& units) {
  candidates_.clear();
  for (const std::int32_t unit : units) candidates_.push_back(candidate(unit));
  std::sort(candidates_.begin(), candidates_.end());
  for (std::size_t i = 0; i < units.size(); ++i) units[i] = unit_of(candidates_[i]);
}

// Those that were never active come last: while there is room, nothing better is known.
void FrequencyPolicy::choose_kept(const std::vector<std::int32_t>& candidates, std::int32_t capacity,
                                  std::vector<std::int32_t>& kept) const {
  std::vector<Candidate> sorted;
  for (const std::int32_t unit : candidates) sorted.push_back(candidate(unit));
  if (sorted.size() > static_cast<std::size_t>(capacity)) {
    std::nth_element(sorted.begin(), sorted.begin() + capacity, sorted.end());
    sorted.resize(static_cast<std::size_t>(capacity));
  }
  kept.clear();
  for (const Candidate one : sorted) kept.push_back(unit_of(one));
  std::sort(kept.begin(), kept.end());
}

}  // namespace flashllm
