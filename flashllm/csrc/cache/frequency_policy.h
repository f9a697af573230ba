// Keeps the units that are active most often: lately, by counts that halve every few tokens, and in the
// long run, which steadies the estimate (and decides alone where tokens are independent of each other).
//
// A token's misses need not enter the cache: one that is rarer than everything cached is read into a bypass
// slot and forgotten. That decides where many units are active at once: slots that every token fills anew
// hold nothing for the next one.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cache/cache_policy.h"

namespace flashllm {

class FrequencyPolicy final : public CachePolicy {
 public:
  // Chosen by replay of recorded and made-up traces (bench/log).
  static constexpr double kHalfLife = 16.0;       // tokens, of the recent counts
  static constexpr float kLongRunTokens = 12.0F;  // that the long-run share counts like
  static constexpr float kKnownTokens = 256.0F;   // that `popularity` counts like, when new ones adjust it
  // A miss counts for so much of its frequency against what is cached: little is gained by exchanging equals,
  // and what was prefetched is copied to enter.
  static constexpr float kNewcomer = 0.8F;

  // `popularity` [num_units]: the share of tokens each unit was active in before; nullptr: unknown.
  FrequencyPolicy(std::int32_t num_units, const float* popularity);

  void observe(const std::vector<std::int32_t>& active) override;
  void choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) override;
  void choose_evicted(const SlotTable& slots, std::int32_t count,
                      std::vector<std::int32_t>& evicted) override;
  void sort_by_likelihood(std::vector<std::int32_t>& units) override;
  void choose_kept(const std::vector<std::int32_t>& candidates, std::int32_t capacity,
                   std::vector<std::int32_t>& kept) const override;

 private:
  // A unit with its estimate in one number: ascending is the most frequent first, ids break ties, so that
  // the choice depends on what was seen and nothing else.
  using Candidate = std::uint64_t;
  Candidate candidate(std::int32_t unit, float weight = 1.0F) const {
    const Counts& counts = counts_[static_cast<std::size_t>(unit)];
    // Never negative, so its bits are ordered as it is.
    const float estimate = weight * (counts.recent + long_run_weight_ * counts.total);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &estimate, sizeof bits);
    return static_cast<std::uint64_t>(~bits) << 32U | static_cast<std::uint32_t>(unit);
  }
  static std::int32_t unit_of(Candidate one) { return static_cast<std::int32_t>(one & 0xffffffffU); }
  void weigh() { long_run_weight_ = tokens_ == 0.0F ? 0.0F : increment_ * kLongRunTokens / tokens_; }

  // Recent counts are in units of `increment_`, which grows from token to token instead of all counts
  // shrinking.
  struct Counts {  // used together: one cache line, where each unit's is another
    float recent, total;
  };
  std::vector<Counts> counts_;  // [num_units]
  float increment_ = 1.0F, tokens_ = 0.0F, long_run_weight_ = 0.0F;

  std::vector<std::int32_t> requested_by_;  // [num_units]: the last request with the unit
  std::int32_t request_ = 0;
  std::vector<Candidate> candidates_, bypassing_;  // scratch
};

}  // namespace flashllm
