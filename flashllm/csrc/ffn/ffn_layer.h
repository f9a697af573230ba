// One FFN layer whose neurons lie on flash: the order of a token's way through it, and its arithmetic. What
// is read and kept as one is a unit (io/row_source.h), a neuron or an expert; active ones are told by units.
//
//   predict: active ids -> begin: cache admits them, reads of the misses fly -> (the caller asks the next
//   layer to prefetch, and computes what wants no rows) -> finish: products of the hits, wait, products of
//   the misses, sum over the active units in the order of their ids
//
// Products make a neuron's value; an expert's sums too, of chunks of its neurons. A neuron's column is summed
// last.
//
// A norm over all neurons (neuron_norm.h) needs each token's values before the first down column: where a
// token's neurons exceed the rows there are, the parts pass twice, for the values and for the sum.
//
// A few tokens may go through together: the rows that any of them wants are read once, and each is computed
// as it would be alone. What is computed depends on x and the weights alone; the cache decides only what is
// read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/neuron_cache.h"
#include "ffn/counters.h"
#include "ffn/expert_products.h"
#include "ffn/experts.h"
#include "ffn/ffn_group.h"
#include "ffn/ffn_options.h"
#include "ffn/neuron_products.h"
#include "ffn/predictor.h"
#include "ffn/prefetch.h"
#include "io/error.h"
#include "io/reader.h"
#include "io/row_source.h"
#include "kernels/rows.h"

namespace flashllm {

class FfnLayer {
 public:
  // Keeps references to all of them; `memory` has room for as many units as the capacity says,
  // `bypass_memory` in the same way. Throws CoreError for units that cannot be.
  FfnLayer(const FfnLayerOptions& options, Reader& reader, const DirectFile& file, ThreadPool& pool,
           std::byte* memory, std::byte* bypass_memory, FfnCounters& counters);
  ~FfnLayer();
  FfnLayer(const FfnLayer&) = delete;
  FfnLayer& operator=(const FfnLayer&) = delete;

  // Of a mixture of experts: what names neurons within them.
  void set_predictor(std::unique_ptr<Predictor> predictor);
  // The predictor wants what the FFN's norm is applied to, in the place of the FFN's input.
  void predict_by_stream() { by_stream_ = true; }
  bool predicts_by_stream() const { return by_stream_; }
  // The resident gate, of a layer that has one, names the active neurons.
  void predict_by_gate();
  // The neurons are those of experts: the router names them; the predictor there is, neurons within them,
  // where units are neurons. Throws CoreError where it does not fit the layer.
  void set_router(std::unique_ptr<Router> router);
  Router* router() const { return router_.get(); }  // nullptr: there are no experts
  // `predictor` tells this layer's active units from the input of the layer before, experts the likeliest
  // first; `buffer`, which layers may share where two that follow each other do not, holds what is read on
  // its word.
  void set_prefetch(std::unique_ptr<Predictor> predictor, Prefetch& buffer);
  bool can_prefetch() const { return prefetch_ != nullptr; }
  // What names the active neurons, and those to prefetch, for measurements to put something before them.
  std::unique_ptr<Predictor>& predictor() { return predictor_; }
  std::unique_ptr<Predictor>& prefetch_predictor() { return prefetch_predictor_; }

  // The units predicted active for x [d_model], what the predictor wants of the pass's token number
  // `token`; ascending, valid until the next call. Throws CoreError where there is no predictor.
  const std::vector<std::int32_t>& predict(const float* x, std::size_t token);

  // Begins to read the units that are probably active, those not cached, the likeliest first. x [tokens,
  // d_model], the pass's first, is the input of the layer before, which has begun. Wants can_prefetch(). Rows
  // of tokens that never come are forgotten.
  void prefetch(const float* x, std::size_t tokens);

  // The reads of the first part are under way when `begin` returns. y [count, d_model], with the down bias.
  // Both throw CoreError, after which no read is under way and the cache is consistent.
  void begin(const FfnTokens& tokens);
  void finish(float* y);
  // Of the drafted tokens of the last `begin`, the first `count` were right: the cache's policy hears of
  // these, so that its window ends with the last accepted token (paper A, section 5.2: at the alpha(lambda +
  // 1)-th). The next `begin` accepts none.
  void accept(std::size_t count);
  // Gives up what `begin` began; nothing after `finish`, or where nothing began. The next `begin` does it
  // too.
  void abandon() noexcept;
  // A pass was interrupted: reads that never end do not hold up what gives it up (reader.h).
  void interrupt() noexcept { reader_.interrupt(); }

  // Behind the tokens: where the cache has room for every unit, begins to read those that it lacks, in file
  // order, into their slots, while nothing else is read; false where it begins nothing. `end_load`, or the
  // layer's next token, caches what has landed and drops the rest; it waits for what is under way alone, a
  // few requests (ReaderOptions::idle_nbytes). A read that fails ends the layer's loading and no token: who
  // wants the unit reads it, and meets the error.
  bool load();
  bool has_room() const { return cache_.capacity() == cache_.num_units(); }
  bool is_whole() const { return cache_.slots().num_used() == cache_.num_units(); }  // or is being loaded
  bool is_loading();
  void end_load();  // throws what the reader's `look` throws
  // Drops the time of reads that went on between passes: no token's statistics have it.
  void forget_busy() { reader_.take_busy_ns(); }

  // A token: x and y [d_model]; `active`: ascending units.
  void forward(const float* x, std::size_t token, const std::vector<std::int32_t>& active, float* y) {
    begin({x, &active, 1, token, 0});
    finish(y);
  }

  // A prompt, whose last tokens are x [tokens, d_model], what the predictor wants: which rows the policy
  // wants for what it has observed, these tokens last, then the rows themselves as they stream by, blocks of
  // `count` from `first_neuron` on. `passing`: as NeuronCache::begin_fill. `abandon_fill` forgets those that
  // never came; so does the next `begin`.
  void begin_fill(const float* x, std::size_t tokens, const std::vector<std::int32_t>* passing = nullptr);
  void fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count);
  void abandon_fill() {
    drop_load();
    cache_.abandon_fill();
  }
  // The policy hears which units a prompt's tokens went to.
  void observe(const std::vector<std::vector<std::int32_t>>& active);
  RowFormat format_of(std::int32_t unit) const { return options_.format_of(unit); }
  // The rows of a unit that is cached, or nullptr; until a row that comes after them is filled in.
  const std::byte* cached_rows(std::int32_t unit) const {
    return cache_.contains(unit) && !cache_.awaits(unit) ? cache_.rows(unit) : nullptr;
  }

  // As NeuronCache::set_capacity, in rows: as many units as fit.
  void set_capacity(std::int32_t rows);
  std::int32_t capacity() const { return cache_.capacity() * options_.unit_rows; }  // rows
  std::vector<std::int32_t> cached() const;  // neurons, in the order of their rows in memory
  const NeuronCache& cache() const { return cache_; }
  // For measurements: what is cached, where units are read from, and whether products wait for the reads.
  NeuronCache& cache() { return cache_; }
  RowSource& source() { return source_; }
  bool& waits_first() { return waits_first_; }

  std::uint32_t width() const { return options_.format.d_model; }
  std::int32_t num_neurons() const { return options_.num_neurons; }
  RowUnits units() const { return options_.units(); }
  const RowFormat& layout() const { return options_.format; }
  std::size_t unit_nbytes() const { return layout().stride * static_cast<std::size_t>(options_.unit_rows); }
  Activation activation() const { return options_.activation; }
  const float* gate_bias() const { return options_.gate_bias; }

 private:
  // A part: its reads start; its values are there; its columns are summed; its rows are let go of. `again`:
  // its values are known.
  void begin_part(std::size_t first, bool again = false);
  void multiply_part();
  void sum_part(float* y);
  void end_part();
  void await_missed();
  void apply_norm();
  void sum_all_parts(float* y);
  template <typename Step>
  void guarded(const Step& step);

  void drop_load() noexcept;
  void keep_loaded() noexcept;
  void place_rows(bool again);
  using Place = std::vector<std::int32_t> FfnMember::Positions::*;
  bool of_experts() const { return options_.unit_rows > 1; }
  void up_products(Place place);
  void multiply_experts(Place place);
  void down_sum(const FfnMember& member, float* y);
  void copy_newcomers();

  bool holds_prefetch() const { return prefetch_ != nullptr && prefetch_->layer() == options_.layer; }
  bool prefetched(std::int32_t unit) const { return holds_prefetch() && prefetch_->has(unit); }
  void list_guesses(std::size_t tokens);
  void end_prefetch();
  const std::byte* rows(std::int32_t unit) const {
    return prefetched(unit) ? prefetch_->rows(unit) : cache_.rows(unit);
  }

  const FfnLayerOptions options_;
  RowSource source_;
  Reader& reader_;
  const DirectFile& file_;
  ThreadPool& pool_;
  FfnCounters& counters_;
  NeuronCache cache_;
  std::unique_ptr<Router> router_;
  std::unique_ptr<Predictor> predictor_, prefetch_predictor_;
  bool by_stream_ = false, waits_first_ = false;
  Prefetch* prefetch_ = nullptr;  // nullptr: nothing is prefetched for this layer
  std::optional<PrefetchDepth> depth_;

  std::size_t part_end_ = 0;         // of the group
  std::size_t part_prefetched_ = 0;  // neurons of the part that were prefetched
  bool admitted_ = false;            // the part has slots

  // Drafted tokens that are neither accepted nor rejected.
  std::array<std::vector<std::int32_t>, FfnTokens::kMost> drafted_active_;
  std::size_t drafted_ = 0;
  std::size_t drafted_from_ = 0;  // number of the first of them in the group

  NeuronProducts neurons_;
  ExpertProducts experts_;
  FfnGroup group_;              // the tokens between `begin` and `finish`
  std::optional<RowInputs> x_;  // the same tokens', of experts

  // Scratch, sized before slots are taken.
  std::vector<ExpertRun> runs_;
  ReadBatch batch_, behind_;
  bool load_failed_ = false;
  std::vector<std::int32_t> active_, listed_;
  std::vector<std::uint8_t> is_listed_;  // [units]
  std::array<std::vector<std::int32_t>, FfnTokens::kMost> guesses_;
};

}  // namespace flashllm
