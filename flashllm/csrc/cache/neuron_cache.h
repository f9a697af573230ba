// The units of one layer that are in memory (neurons, or experts: runs of rows): slots, the policy that
// decides which units hold one, and the units' bytes. Knows no arithmetic and reads nothing: it says where a
// unit goes; the caller reads it there.
//
// For each token `begin_token` with the whole active set, then for each part of it `admit`, the reads,
// `end_part`; where a read failed `discard_part` instead, after which no unit counts that did not land.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_policy.h"
#include "cache/slot_table.h"
#include "io/row_source.h"
#include "kernels/thread_pool.h"

namespace flashllm {

struct NeuronCacheOptions {
  RowUnits units;
  std::int32_t capacity = 0;         // slots
  std::int32_t bypass_capacity = 0;  // bypass slots, which caches may share
  std::uint32_t stride = 0;          // bytes of a row
  std::string policy = "window";     // as make_cache_policy
  std::int32_t window = 1;
  const float* popularity = nullptr;  // [num_units] or nullptr, read by the constructor alone
};

class NeuronCache {
 public:
  // `memory` has room for as many units as there are slots, `bypass_memory` in the same way; both outlive the
  // cache.
  NeuronCache(const NeuronCacheOptions& options, std::byte* memory, std::byte* bypass_memory);

  std::int32_t num_units() const { return slots_.num_units(); }
  std::int32_t capacity() const { return slots_.capacity(); }
  // The most units of a token that have room at once.
  std::size_t part_size() const {
    return static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  }
  bool contains(std::int32_t unit) const { return slots_.contains(unit); }
  // The rows of a unit that is cached or was admitted.
  std::byte* rows(std::int32_t unit) const { return at(slots_.slot_of(unit)); }
  const SlotTable& slots() const { return slots_; }
  CachePolicy& policy() { return *policy_; }
  const CachePolicy& policy() const { return *policy_; }

  // `active`: the token's active units, ascending.
  void begin_token(const std::vector<std::int32_t>& active);

  // A part of them, [begin, end), at most `part_size` long: afterwards each has a slot, and `misses` are to
  // be read into theirs.
  void admit(const std::int32_t* begin, const std::int32_t* end);
  const std::vector<std::int32_t>& misses() const { return misses_; }            // ids
  const std::vector<std::int32_t>& newcomers() const { return choice_.coming; }  // misses that are kept
  void end_part() { slots_.end_bypass(); }
  void discard_part();
  void forget(const std::vector<std::int32_t>& units) { exchange(units, {}); }  // cached ones
  // Free slots for `units`, none of them cached, which the caller reads into theirs, or forgets.
  void take(const std::vector<std::int32_t>& units) { exchange({}, units); }
  // The unit that has this row of the cache's memory.
  std::int32_t unit_at(const std::byte* row) const {
    return slots_.pointers()[static_cast<std::size_t>(row - memory_) / unit_nbytes_];
  }

  // A prompt's rows stream by, ascending: `observe` its tokens, `begin_fill`, then `fill_from` with the
  // `count` rows from `first_row` on takes those of units that the policy wants. `passing`: the units that
  // come, ascending, or nullptr where all do; one of them that is cached stays until its own rows would have
  // come, so that it can be used in their place. `abandon_fill` forgets the units that never came whole, and
  // so does the next token.
  void observe(const std::vector<std::int32_t>& active) { policy_->observe(active); }
  void begin_fill(const std::vector<std::int32_t>* passing = nullptr);
  void fill_from(const std::byte* rows, std::int32_t first_row, std::int32_t count, ThreadPool& pool);
  bool awaits(std::int32_t unit) const;  // it is to be filled in, and was not there whole yet
  void abandon_fill();

  // Changes how many slots there are, up to as many as at first (paper A, appendix C.3: a window that changes
  // at a fixed limit). Shrinking evicts what the policy would evict first and gives the pages of the slots
  // behind back to the system. Throws CoreError for a number that cannot be; never between `admit` and
  // `end_part`.
  void set_capacity(std::int32_t capacity);

 private:
  std::byte* at(std::int32_t slot) const {
    const std::int32_t bypass = slot - slots_.capacity();
    return bypass < 0 ? memory_ + static_cast<std::size_t>(slot) * unit_nbytes_
                      : bypass_memory_ + static_cast<std::size_t>(bypass) * unit_nbytes_;
  }
  void exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming);

  const RowUnits units_;
  const std::size_t stride_, unit_nbytes_;  // bytes of a row, and of a slot
  std::byte* memory_;
  std::byte* bypass_memory_;
  SlotTable slots_;
  const std::int32_t max_capacity_;
  std::unique_ptr<CachePolicy> policy_;
  struct Awaited {
    std::int32_t unit;
    std::int32_t leaving;  // the unit whose slot it gets when it comes; SlotTable::kAbsent: it has one
  };
  std::vector<Awaited> awaited_;                  // ascending
  std::int32_t filled_from_ = 0, filled_to_ = 0;  // rows that came without a gap

  // Scratch, sized once: nothing is allocated between taking slots and filling them, so nothing can fail
  // there but a read.
  CacheChoice choice_;
  std::vector<std::int32_t> misses_, leaving_;
  std::vector<SlotTable::Move> moves_;
};

}  // namespace flashllm
