// One FFN layer whose neurons lie on flash: a token's way through it, from its input to its output.
//
//   x -> predictor: active ids -> cache: hits, misses, rows freed -> reader: the misses, and behind them the
//   next layer's by an early guess, while the hits' up products are computed -> up products of the misses ->
//   down sum over the active neurons in the order of their ids -> y
//
// What is computed depends on x and the weights alone; the cache decides only what is read.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/cache_policy.h"
#include "cache/slot_table.h"
#include "io/error.h"
#include "io/memory.h"
#include "io/reader.h"
#include "kernels/kernels.h"
#include "model/early_reads.h"
#include "model/early_switch.h"
#include "model/predictor.h"

namespace flashllm {

// Where the parts of a neuron lie in its row, in elements (paper A, section 3.2: bundling).
struct RowLayout {
  Dtype dtype = Dtype::f32;
  std::uint32_t stride = 0;  // bytes
  std::uint32_t d_model = 0;
  std::uint32_t up = 0, down = 0;
  std::int32_t gate = -1;  // -1: no gate
};

// Activity that takes the place of the predictors' answers where the weights are dummies: bit sets over the
// neurons, for each token of a pass. The predictors still run; only what they say is replaced.
struct TracedActivity {
  const std::uint64_t* active = nullptr;  // nullptr: there is no trace
  const std::uint64_t* firing = nullptr;  // the neurons of `active` whose value counts
  const std::uint64_t* early = nullptr;   // the early predictor's answer
  std::size_t token_words = 0;            // from a token's set to the next one's
  std::size_t tokens = 0;                 // at hand

  bool traced() const { return active != nullptr; }
  static bool has(const std::uint64_t* set, std::int32_t neuron) {
    return (set[neuron / 64] >> (neuron % 64) & 1) != 0;
  }
};

// Times are exposed wall time: each instant of a call is in exactly one of them.
struct FfnCounters {
  std::uint64_t io_ns = 0;       // waiting for the reader
  std::uint64_t memory_ns = 0;   // cache bookkeeping, row moves, planning and handing over requests
  std::uint64_t compute_ns = 0;  // predictor and products
  std::uint64_t io_busy_ns = 0;  // reads under way, behind compute or not; those that overlap count once
  std::uint64_t bytes_read = 0, requests = 0, retries = 0;
  std::uint64_t active = 0, hits = 0, misses = 0, moves = 0, parts = 0;
  std::uint64_t early_read = 0, early_used = 0;  // rows read ahead, and those of them that were misses
};

struct FfnLayerOptions {
  RowLayout layout;
  std::int32_t layer = 0;
  std::int32_t num_neurons = 0;
  std::int32_t capacity = 0;         // rows of the cache
  std::int32_t bypass_capacity = 0;  // bypass rows, which layers may share
  std::string cache_policy = "window";
  std::int32_t window = 1;
  const float* popularity = nullptr;  // [num_neurons] or nullptr: for the policy
  Activation activation = Activation::relu;
  const float* up_bias = nullptr;    // [num_neurons] or nullptr
  const float* down_bias = nullptr;  // [d_model] or nullptr
  std::uint64_t file_offset = 0;     // of row 0
  const std::uint64_t* checksums = nullptr;
  const std::int32_t* row_of = nullptr;  // [num_neurons] or nullptr, as in RowSource
  SimdLevel simd = SimdLevel::scalar;
  // Switched off only to see what they are worth (paper A, table 2).
  bool cached = true;   // keep rows from token to token
  bool overlap = true;  // multiply the hits while the misses fly
  bool bundled = true;  // read a neuron's matrices as one row, not one by one
};

class FfnLayer {
 public:
  // Keeps references to all of them; `rows` holds capacity * stride bytes, `bypass_rows` in the same way.
  FfnLayer(const FfnLayerOptions& options, Reader& reader, const DirectFile& file, ThreadPool& pool,
           std::byte* rows, std::byte* bypass_rows, FfnCounters& counters);
  ~FfnLayer();
  FfnLayer(const FfnLayer&) = delete;
  FfnLayer& operator=(const FfnLayer&) = delete;

  void set_predictor(const Predictor& predictor) { predictor_ = predictor; }
  bool has_predictor() const { return predictor_.has_value(); }

  void set_trace(const TracedActivity& trace) { trace_ = trace; }

  // Lets the layer before call `read_ahead`: `predictor` tells this layer's active neurons from that one's
  // input. `early`, which layers may share where two that follow each other do not, holds what is read.
  void set_early(const Predictor& predictor, EarlyReads& early) {
    early_predictor_ = predictor;
    early_ = &early;
    guess_limit_.emplace(static_cast<std::size_t>(early.capacity()));
  }
  // The layer after this one, whose rows this one has read ahead of it where `control` says so.
  void set_next(FfnLayer* next, EarlyControl* control) {
    next_ = next;
    control_ = control;
  }

  // Begins to read the rows that the early predictor names for x, the input of the layer before; those not
  // cached, the likeliest first.
  void read_ahead(const float* x, std::size_t token);

  // The neurons predicted active for x [d_model], the pass's token number `token`; ascending, valid until the
  // next call.
  const std::vector<std::int32_t>& predict(const float* x, std::size_t token);

  // y [d_model] = FFN(x) over `active` (ascending ids). Throws CoreError, after which the cache is still
  // consistent. `ahead`: the next layer comes next, with the same token, so its rows may be read ahead.
  void forward(const float* x, std::size_t token, const std::vector<std::int32_t>& active, float* y,
               bool ahead = false);

  // After a dense prefill: which rows the policy wants for the tokens just seen, then the rows themselves as
  // they stream by. `abandon_fill` forgets those that never came; so does the next `forward`.
  void begin_fill(const float* x, std::size_t tokens);
  void fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count);
  void abandon_fill();

  std::uint32_t width() const { return options_.layout.d_model; }
  const SlotTable& slots() const { return slots_; }
  const CachePolicy& policy() const { return *policy_; }

 private:
  void forward_part(const float* x, std::size_t token, const std::int32_t* begin, const std::int32_t* end,
                    float* y, bool ahead);
  void run(Predictor& predictor, const float* x, const std::uint64_t* traced, std::size_t token,
           std::vector<std::int32_t>& active);
  bool was_read_ahead() const { return early_ != nullptr && early_->layer() == options_.layer; }
  bool in_early_rows(std::int32_t neuron) const { return was_read_ahead() && early_->asked_for(neuron); }
  void adopt_early_rows();
  void end_early();
  void tally(const ReadStats& stats);
  void add_jobs(std::int32_t neuron);
  void admit(const std::int32_t* begin, const std::int32_t* end);
  [[noreturn]] void rethrow_with_place(const CoreError& error) const;
  void discard(const std::vector<std::int32_t>& neurons);
  void forget_all();
  void apply_moves();
  void silence(std::size_t token, const std::int32_t* ids, std::size_t count);
  void up_products(const float* x, const std::vector<std::int32_t>& positions, const std::int32_t* ids);
  std::byte* row(std::int32_t slot) const {
    const std::int32_t bypass = slot - slots_.capacity();
    return bypass < 0 ? rows_ + static_cast<std::size_t>(slot) * options_.layout.stride
                      : bypass_rows_ + static_cast<std::size_t>(bypass) * options_.layout.stride;
  }
  const std::byte* part_of_row(std::int32_t neuron, std::uint32_t element) const;

  const FfnLayerOptions options_;
  const RowSource source_;
  Reader& reader_;
  const DirectFile& file_;
  ThreadPool& pool_;
  std::byte* rows_;
  std::byte* bypass_rows_;
  FfnCounters& counters_;
  std::optional<Predictor> predictor_, early_predictor_;
  TracedActivity trace_;
  EarlyReads* early_ = nullptr;            // nullptr: nothing is read ahead for this layer
  std::optional<GuessLimit> guess_limit_;  // where there is `early_`
  FfnLayer* next_ = nullptr;
  EarlyControl* control_ = nullptr;
  SlotTable slots_;
  std::unique_ptr<CachePolicy> policy_;

  // Scratch, sized once.
  ReadBatch batch_;
  CacheChoice choice_;
  std::vector<float> values_, gathered_, scales_;
  std::vector<std::int32_t> active_, leaving_, misses_, hit_positions_, miss_positions_, ids_, pending_fill_,
      early_positions_, guessed_;
  std::vector<const void*> pointers_;
  std::vector<SlotTable::Move> moves_;
};

}  // namespace flashllm
