// Tokens that go through an FFN layer together: which units any of them wants (neurons, or experts), which of
// each token's a part has, and where their rows are. Plain bookkeeping: no arithmetic, no reads.
//
// What the tokens want together exceeds the room there is at times; then it is taken in parts, runs of the
// wanted units in the order of their ids.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffn/predictor.h"
#include "io/row_source.h"

namespace flashllm {

// Tokens that go through a layer together. What it refers to stays as it is until `finish`.
struct FfnTokens {
  static constexpr std::size_t kMost = 8;

  const float* x = nullptr;                           // [count, d_model]
  const std::vector<std::int32_t>* active = nullptr;  // [count]: each token's units, ascending
  std::size_t count = 1;                              // at most kMost
  std::size_t first = 0;                              // number in its pass of the first token
  std::size_t drafted =
      0;                   // of the last tokens, fewer than all: guesses, which `accept` tells right or wrong
  bool predicted = false;  // `active` is what `predict` said of these tokens, by their numbers in the pass
};

// A token between `begin` and the end, and those of its units that belong to the part at hand.
struct FfnMember {
  // Units of the part by where their rows are or will be: positions in the part.
  struct Positions {
    std::vector<std::int32_t> hits, prefetched, missed;
  };

  const float* x = nullptr;
  const std::vector<std::int32_t>* active = nullptr;
  const Predictor* named_by = nullptr;  // what named its units, under `number`; nullptr: the caller
  std::size_t number = 0;
  const std::int32_t *begin = nullptr, *end = nullptr;
  float *all_values = nullptr, *values = nullptr;  // of its units, and of its part's, one after the other
  Positions positions;
  std::size_t rows_read = 0;  // that no token before it wanted

  std::ptrdiff_t part_size() const { return end - begin; }
};

// A unit of the part for one of the members that want it.
struct FfnShare {
  std::int32_t unit;
  std::size_t member;
  float* values;  // of the unit
};

enum class RowPlace { cached, prefetched, missing };

class FfnGroup {
 public:
  // Neurons of a part's units, each for the first token that wants it. Those that a token before wanted are
  // found.
  struct Counts {
    std::size_t found = 0, missed = 0;
    std::size_t prefetched = 0;  // of the missed
  };

  // `values`: of a unit and a token, a neuron's value or an expert's sums.
  FfnGroup(RowUnits units, std::size_t values) : units_(units), num_values_(values) {}

  // x of `width` values a token. What the predictor knows of each is for the caller to set.
  void begin(const FfnTokens& tokens, std::size_t width);
  // Gives the values' memory back, so that one layer has some at a time.
  void clear() noexcept {
    count_ = 0;
    values_.reset();
  }
  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }
  FfnMember& operator[](std::size_t t) { return members_[t]; }
  const FfnMember& operator[](std::size_t t) const { return members_[t]; }
  template <typename Body>
  void each(const Body& body) const {
    for (std::size_t t = 0; t < count_; ++t) body(members_[t]);
  }
  // Each unit of the part at `place`, ascending, with the members that want it: body(shares, their number).
  // The shares stay until the next call.
  template <typename Body>
  void each_unit(std::vector<std::int32_t> FfnMember::Positions::* place, const Body& body);
  // Those of the unit at position p of the part.
  float* values(const FfnMember& member, std::ptrdiff_t p) const {
    return member.values + p * static_cast<std::ptrdiff_t>(num_values_);
  }
  // What any of them wants, ascending.
  const std::vector<std::int32_t>& wanted() const { return *wanted_; }

  // The part behind the last one, of the wanted units up to number `end`.
  void next_part(std::size_t end);
  // The next part is the first again.
  void rewind();
  // The positions of each member's units; `place_of(unit)` is a RowPlace.
  template <typename PlaceOf>
  Counts sort(const PlaceOf& place_of);

 private:
  static constexpr std::uint8_t kNobody = 0xff;
  static_assert(FfnTokens::kMost < kNobody);

  void unite(const FfnTokens& tokens);
  void share_out_values();

  const RowUnits units_;
  const std::size_t num_values_;
  std::array<FfnMember, FfnTokens::kMost> members_;
  std::size_t count_ = 0;
  const std::vector<std::int32_t>* wanted_ = nullptr;
  std::vector<std::int32_t> union_;
  std::vector<std::uint8_t> wanted_by_;  // of each unit: the first member that wants it, or kNobody
  std::unique_ptr<float[]> values_;
  std::vector<FfnShare> shares_;
};

template <typename Body>
void FfnGroup::each_unit(std::vector<std::int32_t> FfnMember::Positions::* place, const Body& body) {
  shares_.clear();
  for (std::size_t t = 0; t < count_; ++t) {
    const FfnMember& member = members_[t];
    for (const std::int32_t p : member.positions.*place)
      shares_.push_back({member.begin[p], t, values(member, p)});
  }
  std::sort(shares_.begin(), shares_.end(), [](const FfnShare& a, const FfnShare& b) {
    return a.unit != b.unit ? a.unit < b.unit : a.member < b.member;
  });
  for (std::size_t begin = 0, end = 0; begin < shares_.size(); begin = end) {
    while (end < shares_.size() && shares_[end].unit == shares_[begin].unit) ++end;
    body(shares_.data() + begin, end - begin);
  }
}

template <typename PlaceOf>
FfnGroup::Counts FfnGroup::sort(const PlaceOf& place_of) {
  Counts counts;
  for (std::size_t t = 0; t < count_; ++t) {
    FfnMember& member = members_[t];
    auto& [hits, prefetched, missed] = member.positions;
    hits.clear();
    prefetched.clear();
    missed.clear();
    std::size_t found = 0, rest = 0;  // in the cache, or wanted by a token before; others
    for (const std::int32_t* id = member.begin; id != member.end; ++id) {
      const RowPlace place = place_of(*id);
      const auto neurons = static_cast<std::size_t>(units_.rows(*id));
      const bool first = count_ == 1 || wanted_by_[static_cast<std::size_t>(*id)] == t;
      auto& kind = place == RowPlace::cached ? hits : place == RowPlace::prefetched ? prefetched : missed;
      kind.push_back(static_cast<std::int32_t>(id - member.begin));
      (place == RowPlace::cached || !first ? found : rest) += neurons;
      counts.prefetched += place == RowPlace::prefetched && first ? neurons : 0;
    }
    member.rows_read += rest;
    counts.found += found;
    counts.missed += rest;
  }
  return counts;
}

}  // namespace flashllm
