// The neurons of one layer that are in memory: slots, the policy that decides which neurons hold one, and the
// rows' bytes. Knows no arithmetic and reads nothing: it says where a row goes; the caller reads it there.
//
// For each token `begin_token` with the whole active set, then for each part of it `admit`, the reads,
// `end_part`; where a read failed `discard_part` instead, after which no row counts that did not land.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_policy.h"
#include "cache/slot_table.h"
#include "kernels/thread_pool.h"

namespace flashllm {

struct NeuronCacheOptions {
  std::int32_t num_neurons = 0;
  std::int32_t capacity = 0;         // rows
  std::int32_t bypass_capacity = 0;  // bypass rows, which caches may share
  std::uint32_t stride = 0;          // bytes of a row
  std::string policy = "window";     // as make_cache_policy
  std::int32_t window = 1;
  const float* popularity = nullptr;  // [num_neurons] or nullptr, read by the constructor alone
};

class NeuronCache {
 public:
  // `rows` holds capacity * stride bytes, `bypass_rows` in the same way; both outlive the cache.
  NeuronCache(const NeuronCacheOptions& options, std::byte* rows, std::byte* bypass_rows);

  std::int32_t num_neurons() const { return slots_.num_neurons(); }
  std::int32_t capacity() const { return slots_.capacity(); }
  std::int32_t max_capacity() const { return max_capacity_; }
  // The most neurons of a token that have room at once.
  std::size_t part_size() const {
    return static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  }
  bool contains(std::int32_t neuron) const { return slots_.contains(neuron); }
  // A neuron that is cached or was admitted.
  std::byte* row(std::int32_t neuron) const { return row_at(slots_.slot_of(neuron)); }
  const SlotTable& slots() const { return slots_; }
  CachePolicy& policy() { return *policy_; }
  const CachePolicy& policy() const { return *policy_; }

  // `active`: the token's active neurons, ascending.
  void begin_token(const std::vector<std::int32_t>& active);

  // A part of them, [begin, end), at most `part_size` long: afterwards each has a row, and `misses` are to be
  // read into theirs.
  void admit(const std::int32_t* begin, const std::int32_t* end);
  const std::vector<std::int32_t>& misses() const { return misses_; }            // ids
  const std::vector<std::int32_t>& newcomers() const { return choice_.coming; }  // misses that are kept
  void end_part();
  void discard_part();

  // A dense pass streams every row by: `observe` each of its tokens, `begin_fill`, then `fill_from` with the
  // rows of `count` neurons from `first_neuron` on takes those the policy wants. `abandon_fill` forgets those
  // that never came, and so does the next token.
  void observe(const std::vector<std::int32_t>& active) { policy_->observe(active); }
  void begin_fill();
  void fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count, ThreadPool& pool);
  void abandon_fill();

  // Changes how many rows there are, up to `max_capacity` (paper A, appendix C.3: a window that changes at a
  // fixed limit). Shrinking evicts what the policy would evict first and gives the pages of the rows behind
  // back to the system. Throws CoreError for a number that cannot be; never between `admit` and `end_part`.
  void set_capacity(std::int32_t capacity);

  std::uint64_t take_moves();  // rows copied from slot to slot since the last call

 private:
  std::byte* row_at(std::int32_t slot) const {
    const std::int32_t bypass = slot - slots_.capacity();
    return bypass < 0 ? rows_ + static_cast<std::size_t>(slot) * stride_
                      : bypass_rows_ + static_cast<std::size_t>(bypass) * stride_;
  }
  void exchange(const std::vector<std::int32_t>& leaving, const std::vector<std::int32_t>& coming);
  void forget(const std::vector<std::int32_t>& neurons) { exchange(neurons, {}); }

  const std::size_t stride_;
  std::byte* rows_;
  std::byte* bypass_rows_;
  SlotTable slots_;
  const std::int32_t max_capacity_;
  std::unique_ptr<CachePolicy> policy_;
  std::uint64_t moved_ = 0;
  std::vector<std::int32_t> pending_fill_;  // ascending

  // Scratch, sized once: nothing is allocated between taking rows and filling them, so nothing can fail there
  // but a read.
  CacheChoice choice_;
  std::vector<std::int32_t> misses_, leaving_;
  std::vector<SlotTable::Move> moves_;
};

}  // namespace flashllm
