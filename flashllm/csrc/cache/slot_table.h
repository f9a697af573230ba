// Which neuron lies in which row of a layer's preallocated matrix (paper A, section 3.3 and figure 6).
//
// Plain bookkeeping: no bytes, no reads. Rows [0, num_used) are occupied; rows from `capacity` on are bypass
// rows, for neurons that are read for one token and not kept. Unlike the paper, which deletes
// first and appends after, incoming neurons take the freed rows first; rows move only when more leave than
// come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace flashllm {

class SlotTable {
 public:
  static constexpr std::int32_t kAbsent = -1;

  SlotTable(std::int32_t num_neurons, std::int32_t capacity, std::int32_t bypass_capacity = 0);

  std::int32_t num_neurons() const { return static_cast<std::int32_t>(slot_of_.size()); }
  std::int32_t capacity() const { return static_cast<std::int32_t>(pointers_.size()); }
  std::int32_t bypass_capacity() const { return bypass_capacity_; }
  std::int32_t num_used() const { return num_used_; }  // bypass rows not counted
  std::int32_t slot_of(std::int32_t neuron) const { return slot_of_[static_cast<std::size_t>(neuron)]; }
  bool contains(std::int32_t neuron) const { return slot_of(neuron) != kAbsent; }
  // The neuron in each occupied row below `capacity`.
  const std::int32_t* pointers() const { return pointers_.data(); }

  struct Move {
    std::int32_t from, to;
  };

  // Frees the rows of `leaving` (all cached) and gives rows to `coming` (none cached). Afterwards
  // num_used == before - leaving + coming, which must not exceed capacity. `moves` are copies to make before
  // anything is read into the new rows; no row of `coming` is among them.
  void exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming,
                std::vector<Move>& moves);

  // Changes the number of rows: at least num_used(), at most what the table was made with, and never while
  // there are neurons in bypass rows, whose slots follow the capacity.
  void set_capacity(std::int32_t capacity);

  // Gives bypass rows to `neurons` (none cached), and takes all of them back.
  void bypass(const std::vector<std::int32_t>& neurons);
  void end_bypass();

 private:
  void place(std::int32_t neuron, std::int32_t slot);

  std::vector<std::int32_t> slot_of_;   // [num_neurons], kAbsent where not cached
  std::vector<std::int32_t> pointers_;  // [capacity]
  std::int32_t bypass_capacity_;
  std::int32_t num_used_ = 0;
  std::vector<std::int32_t> bypassing_;  // the neuron in each bypass row
  std::vector<std::int32_t> holes_;      // scratch of exchange
};

}  // namespace flashllm
