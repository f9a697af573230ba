// Which unit lies in which slot of a layer's preallocated memory (paper A, section 3.3 and figure 6).
//
// Plain bookkeeping: no bytes, no reads. Slots [0, num_used) are occupied; slots from `capacity` on are
// bypass slots, for units that are read for one token and not kept. Unlike the paper, which deletes first and
// appends after, incoming units take the freed slots first; units move only when more leave than come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace flashllm {

class SlotTable {
 public:
  static constexpr std::int32_t kAbsent = -1;

  // Throws CoreError where there is no slot of either kind.
  SlotTable(std::int32_t num_units, std::int32_t capacity, std::int32_t bypass_capacity = 0);

  std::int32_t num_units() const { return static_cast<std::int32_t>(slot_of_.size()); }
  std::int32_t capacity() const { return static_cast<std::int32_t>(pointers_.size()); }
  std::int32_t bypass_capacity() const { return bypass_capacity_; }
  std::int32_t num_used() const { return num_used_; }  // bypass slots not counted
  std::int32_t slot_of(std::int32_t unit) const { return slot_of_[static_cast<std::size_t>(unit)]; }
  bool contains(std::int32_t unit) const { return slot_of(unit) != kAbsent; }
  // The unit in each occupied slot below `capacity`.
  const std::int32_t* pointers() const { return pointers_.data(); }

  struct Move {
    std::int32_t from, to;
  };

  // Frees the slots of `leaving` (all cached) and gives slots to `coming` (none cached). Afterwards
  // num_used == before - leaving + coming, which must not exceed capacity. `moves` are copies to make before
  // anything is read into the new slots; no slot of `coming` is among them.
  void exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming,
                std::vector<Move>& moves);

  // Changes the number of slots: at least num_used(), at most what the table was made with, and never while
  // there are units in bypass slots, whose slots follow the capacity.
  void set_capacity(std::int32_t capacity);

  // Gives bypass slots to `units` (none cached), and takes all of them back.
  void bypass(const std::vector<std::int32_t>& units);
  void end_bypass();

 private:
  void place(std::int32_t unit, std::int32_t slot);

  std::vector<std::int32_t> slot_of_;   // [num_units], kAbsent where not cached
  std::vector<std::int32_t> pointers_;  // [capacity]
  std::int32_t bypass_capacity_;
  std::int32_t num_used_ = 0;
  std::vector<std::int32_t> bypassing_;  // the unit in each bypass slot
  std::vector<std::int32_t> holes_;      // scratch of exchange
};

}  // namespace flashllm
