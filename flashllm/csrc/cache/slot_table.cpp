#include "cache/slot_table.h"

#include <algorithm>
#include <string>

#include "io/error.h"

namespace flashllm {

SlotTable::SlotTable(std::int32_t num_neurons, std::int32_t capacity, std::int32_t bypass_capacity)
    : bypass_capacity_(bypass_capacity) {
  if (num_neurons < 1 || capacity < 1 || bypass_capacity < 0)
    throw CoreError(ErrorKind::usage, "a neuron cache needs at least one neuron and one row, got " +
                                          std::to_string(num_neurons) + " and " + std::to_string(capacity));
  slot_of_.assign(static_cast<std::size_t>(num_neurons), kAbsent);
  pointers_.assign(static_cast<std::size_t>(std::min(capacity, num_neurons)), kAbsent);
  holes_.reserve(pointers_.size());
  bypassing_.reserve(static_cast<std::size_t>(bypass_capacity));
}

void SlotTable::place(std::int32_t neuron, std::int32_t slot) {
  slot_of_[static_cast<std::size_t>(neuron)] = slot;
  pointers_[static_cast<std::size_t>(slot)] = neuron;
}

void SlotTable::exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming,
                         std::vector<Move>& moves) {
  moves.clear();
  const auto used_after =
      num_used_ - static_cast<std::int32_t>(leaving.size()) + static_cast<std::int32_t>(coming.size());
  if (used_after > capacity())
    throw CoreError(ErrorKind::usage, "a neuron cache of " + std::to_string(capacity()) +
                                          " rows cannot hold " + std::to_string(used_after));

  // 1. The freed rows, lowest first.
  holes_.clear();
  for (const std::int32_t neuron : leaving) {
    std::int32_t& slot = slot_of_[static_cast<std::size_t>(neuron)];
    if (slot == kAbsent)
      throw CoreError(ErrorKind::usage, "neuron " + std::to_string(neuron) + " is not cached");
    holes_.push_back(slot);
    pointers_[static_cast<std::size_t>(slot)] = kAbsent;
    slot = kAbsent;
  }
  std::sort(holes_.begin(), holes_.end());

  // 2. Incoming neurons fill the lowest holes, then the end.
  std::size_t filled = 0;
  for (const std::int32_t neuron : coming)
    place(neuron, filled < holes_.size() ? holes_[filled++] : num_used_++);

  // 3. Holes left over are all higher than the filled ones: the last rows move into those below the new end.
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
  if (capacity < std::max(1, num_used_) || static_cast<std::size_t>(capacity) > pointers_.capacity() ||
      !bypassing_.empty())
    throw CoreError(ErrorKind::usage,
                    "a slot table cannot be resized to " + std::to_string(capacity) + " rows");
  pointers_.resize(static_cast<std::size_t>(capacity), kAbsent);
}

void SlotTable::bypass(const std::vector<std::int32_t>& neurons) {
  if (bypassing_.size() + neurons.size() > static_cast<std::size_t>(bypass_capacity_))
    throw CoreError(ErrorKind::usage, "there are " + std::to_string(bypass_capacity_) + " bypass rows, not " +
                                          std::to_string(bypassing_.size() + neurons.size()));
  for (const std::int32_t neuron : neurons) {
    slot_of_[static_cast<std::size_t>(neuron)] = capacity() + static_cast<std::int32_t>(bypassing_.size());
    bypassing_.push_back(neuron);
  }
}

void SlotTable::end_bypass() {
  for (const std::int32_t neuron : bypassing_) slot_of_[static_cast<std::size_t>(neuron)] = kAbsent;
  bypassing_.clear();
}

}  // namespace flashllm
