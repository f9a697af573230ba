#include "cache/slot_table.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace flashllm {

SlotTable::SlotTable(std::int32_t num_units, std::int32_t capacity, std::int32_t bypass_capacity)
    : bypass_capacity_(bypass_capacity) {
  require(num_units >= 1 && capacity >= 0 && bypass_capacity >= 0 && capacity + bypass_capacity >= 1,
          "a cache needs at least one unit and one slot, got " + std::to_string(num_units) + " and " +
              std::to_string(capacity));
  slot_of_.assign(static_cast<std::size_t>(num_units), kAbsent);
  pointers_.assign(static_cast<std::size_t>(std::min(capacity, num_units)), kAbsent);
  holes_.reserve(pointers_.size());
  bypassing_.reserve(static_cast<std::size_t>(bypass_capacity));
}

void SlotTable::place(std::int32_t unit, std::int32_t slot) {
  slot_of_[static_cast<std::size_t>(unit)] = slot;
  pointers_[static_cast<std::size_t>(slot)] = unit;
}

void SlotTable::exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming,
                         std::vector<Move>& moves) {
  moves.clear();
  const auto used_after =
      num_used_ - static_cast<std::int32_t>(leaving.size()) + static_cast<std::int32_t>(coming.size());
  if (used_after > capacity())
    throw CoreError(ErrorKind::usage, "a cache of " + std::to_string(capacity()) + " slots cannot hold " +
                                          std::to_string(used_after));

  // 1. The freed slots, lowest first.
  holes_.clear();
  for (const std::int32_t unit : leaving) {
    std::int32_t& slot = slot_of_[static_cast<std::size_t>(unit)];
    if (slot == kAbsent) throw CoreError(ErrorKind::usage, "unit " + std::to_string(unit) + " is not cached");
    holes_.push_back(slot);
    pointers_[static_cast<std::size_t>(slot)] = kAbsent;
    slot = kAbsent;
  }
  std::sort(holes_.begin(), holes_.end());

  // 2. Incoming units fill the lowest holes, then the end.
  std::size_t filled = 0;
  for (const std::int32_t unit : coming) place(unit, filled < holes_.size() ? holes_[filled++] : num_used_++);

  // 3. Holes left over are all higher than the filled ones: the last units move into those below the new end.
  num_used_ = used_after;
  std::int32_t last = used_after + static_cast<std::int32_t>(holes_.size() - filled) - 1;
  for (; filled < holes_.size() && holes_[filled] < used_after; ++filled) {
    while (pointers_[static_cast<std::size_t>(last)] == kAbsent) --last;
    moves.push_back({last, holes_[filled]});
    place(pointers_[static_cast<std::size_t>(last)], holes_[filled]);
    pointers_[static_cast<std::size_t>(last)] = kAbsent;
  }
}

void SlotTable::set_capacity(std::int32_t capacity) {
  require(capacity >= num_used_ && capacity + bypass_capacity_ >= 1 &&
              static_cast<std::size_t>(capacity) <= pointers_.capacity() && bypassing_.empty(),
          "a slot table cannot be resized to " + std::to_string(capacity) + " slots");
  pointers_.resize(static_cast<std::size_t>(capacity), kAbsent);
}

void SlotTable::bypass(const std::vector<std::int32_t>& units) {
  if (bypassing_.size() + units.size() > static_cast<std::size_t>(bypass_capacity_))
    throw CoreError(ErrorKind::usage, "there are " + std::to_string(bypass_capacity_) +
                                          " bypass slots, not " +
                                          std::to_string(bypassing_.size() + units.size()));
  for (const std::int32_t unit : units) {
    slot_of_[static_cast<std::size_t>(unit)] = capacity() + static_cast<std::int32_t>(bypassing_.size());
    bypassing_.push_back(unit);
  }
}

void SlotTable::end_bypass() {
  for (const std::int32_t unit : bypassing_) slot_of_[static_cast<std::size_t>(unit)] = kAbsent;
  bypassing_.clear();
}

}  // namespace flashllm
