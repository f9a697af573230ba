#include "ffn/ffn_group.h"

#include <algorithm>

namespace flashllm {

void FfnGroup::begin(const FfnTokens& tokens, std::size_t width) {
  unite(tokens);
  for (std::size_t t = 0; t < tokens.count; ++t) {
    FfnMember& member = members_[t];
    member.x = tokens.x + t * width;
    member.active = &tokens.active[t];
    member.rows_read = 0;
  }
  count_ = tokens.count;
  rewind();
  share_out_values();
}

void FfnGroup::unite(const FfnTokens& tokens) {
  wanted_ = tokens.active;
  if (tokens.count == 1) return;
  wanted_by_.assign(static_cast<std::size_t>(units_.count()), kNobody);
  for (std::size_t t = tokens.count; t-- > 0;)
    for (const std::int32_t unit : tokens.active[t])
      wanted_by_[static_cast<std::size_t>(unit)] = static_cast<std::uint8_t>(t);
  union_.clear();
  for (std::int32_t unit = 0; unit < units_.count(); ++unit)
    if (wanted_by_[static_cast<std::size_t>(unit)] != kNobody) union_.push_back(unit);
  wanted_ = &union_;
}

// Room for the values of every member's units.
void FfnGroup::share_out_values() {
  std::size_t total = 0;
  for (std::size_t t = 0; t < count_; ++t) total += members_[t].active->size() * num_values_;
  values_.reset(new float[total]);
  float* values = values_.get();
  for (std::size_t t = 0; t < count_; ++t) {
    members_[t].all_values = values;
    values += members_[t].active->size() * num_values_;
  }
}

void FfnGroup::rewind() {
  for (std::size_t t = 0; t < count_; ++t) members_[t].end = members_[t].active->data();
}

void FfnGroup::next_part(std::size_t end) {
  const bool last = end == wanted_->size();
  for (std::size_t t = 0; t < count_; ++t) {
    FfnMember& member = members_[t];
    const std::int32_t *ids = member.active->data(), *all = ids + member.active->size();
    member.begin = member.end;
    member.end = last ? all : std::lower_bound(member.begin, all, (*wanted_)[end]);
    member.values = member.all_values + static_cast<std::size_t>(member.begin - ids) * num_values_;
  }
}

}  // namespace flashllm
