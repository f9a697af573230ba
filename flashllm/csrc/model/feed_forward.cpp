#include "model/feed_forward.h"

#include <algorithm>
#include <utility>

#include "io/error.h"

namespace flashllm {

FeedForward::FeedForward(const ModelSpec& spec, const std::vector<BlockWeights>& blocks, RowStream& stream,
                         FfnCounters& counters, Stopwatch& watch, Arithmetic& arithmetic)
    : spec_(spec),
      blocks_(blocks),
      stream_(stream),
      counters_(counters),
      watch_(watch),
      arithmetic_(arithmetic),
      few_(arithmetic.pool(), arithmetic.level()),
      alone_(new_stretch()) {
  require(blocks.size() == stream.num_layers(), "every block needs rows to stream");
}

void FeedForward::run(const FfnTurn& turn) {
  if (turn.part.is_prompt()) {
    take(alone_, turn);
    begin_rows(alone_, turn.layer, turn.part);
    while (next_rows(alone_, turn.layer, turn.part, [] {})) {
    }
    give(alone_, turn);
    return alone_.clear();
  }
  watch_.charge(counters_.compute_ns);
  const FfnLayer* ffn = blocks_[turn.layer].ffn;
  const bool routed = is_routed(turn.layer);
  const Pass pass = turn.part.pass;
  if (ffn == nullptr || (pass == Pass::dense && !routed))
    run_every(turn);
  else if (pass == Pass::oracle)
    run_firing(turn);
  else
    run_active(turn);
  watch_.charge(counters_.compute_ns);
}

// The layer is a mixture of experts: which rows it wants depends on its input.
bool FeedForward::is_routed(std::size_t layer) const {
  const FfnLayer* ffn = blocks_[layer].ffn;
  return ffn != nullptr && ffn->router() != nullptr;
}

void FeedForward::accept(std::size_t count) {
  for (const BlockWeights& each : blocks_)
    if (each.ffn != nullptr) each.ffn->accept(count);
}

void FeedForward::interrupt() noexcept {
  stream_.interrupt();
  for (const BlockWeights& each : blocks_)
    if (each.ffn != nullptr) each.ffn->interrupt();
}

void FeedForward::give_up() noexcept {
  stream_.drain();
  alone_.clear();
  for (const BlockWeights& each : blocks_) {
    if (each.ffn == nullptr) continue;
    each.ffn->abandon();
    each.ffn->abandon_fill();
  }
}

// Active neurons

// Those that the layer names. For tokens that go through it in one group the next layer's are prefetched.
void FeedForward::run_active(const FfnTurn& turn) {
  const std::size_t width = spec_.block.d_model, count = turn.part.count;
  FfnLayer& ffn = *blocks_[turn.layer].ffn;
  FfnLayer* next = turn.layer + 1 < blocks_.size() ? blocks_[turn.layer + 1].ffn : nullptr;
  const bool prefetches =
      spec_.prefetch && count <= FfnTokens::kMost && next != nullptr && next->can_prefetch();
  active_.resize(std::max(active_.size(), count));
  for (std::size_t t = 0; t < count; ++t) active_[t] = ffn.predict(seen(turn) + t * width, t);
  if (loading_ != nullptr) ffn.forget_busy();
  run_sets(turn, true, prefetches ? next : nullptr);
  if (spec_.loads) load_behind(turn);
}

// Where every unit of the model has room: layer by layer, each once its tokens have left it, which is when
// the next ones are farthest. The first tokens of a sequence read what they want alone.
void FeedForward::load_behind(const FfnTurn& turn) {
  FfnLayer* ffn = blocks_[turn.layer].ffn;
  if (loading_ != nullptr && loading_->is_loading()) return;
  loading_ = nullptr;
  if (ffn->is_whole()) return;
  const Token* tokens = turn.part.tokens;
  const bool begins =
      std::any_of(tokens, tokens + turn.part.count, [](const Token& each) { return each.position == 0; });
  const bool has_room = std::all_of(blocks_.begin(), blocks_.end(), [](const BlockWeights& each) {
    return each.ffn == nullptr || each.ffn->has_room();
  });
  if (!begins && has_room && ffn->load()) loading_ = ffn;
  watch_.restart();
}

// The neurons that really fire, computed as the sparse pass does. A resident gate names them; without one
// every row is read to find them.
void FeedForward::run_firing(const FfnTurn& turn) {
  if (blocks_[turn.layer].gate != nullptr) return run_active(turn);
  find_firing(turn);
  require(blocks_[turn.layer].ffn->units().size == 1,
          "the router says which experts are active, not what fires");
  run_sets(turn, false, nullptr);
}

// Of every token: active_.
void FeedForward::find_firing(const FfnTurn& turn) {
  const BlockWeights& weights = blocks_[turn.layer];
  const std::size_t width = spec_.block.d_model, tokens = turn.part.count;
  const RowFormat& format = weights.format;
  const float* driver_bias = format.gated() ? weights.gate_bias : weights.up_bias;
  active_.resize(std::max(active_.size(), tokens));
  for (std::size_t t = 0; t < tokens; ++t) active_[t].clear();
  std::vector<const void*> rows;
  std::vector<std::int32_t> ids;
  std::vector<float> values;
  each_block(turn.layer, layer_after(turn.layer, turn.part), [&](const RowRun& block, std::size_t count) {
    rows.clear();
    ids.clear();
    values.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back(block.rows + i * format.stride + format.driver());
      ids.push_back(static_cast<std::int32_t>(block.first_row + i));
    }
    const ScatteredRows scattered{rows.data(), count, width, format.codec, format.inputs};
    for (std::size_t t = 0; t < tokens; ++t) {
      dot_scattered(scattered, turn.x + t * width, ids.data(), driver_bias, weights.spec.activation,
                    values.data(), arithmetic_.pool(), arithmetic_.level());
      for (std::size_t i = 0; i < count; ++i)
        if (values[i] != 0.0F) active_[t].push_back(ids[i]);
    }
  });
}

// Each token with its own set, active_; `predicted`: by the layer itself. `next`: the layer of which units
// are prefetched meanwhile, or nullptr.
void FeedForward::run_sets(const FfnTurn& turn, bool predicted, FfnLayer* next) {
  const std::size_t width = spec_.block.d_model, count = turn.part.count;
  FfnLayer& ffn = *blocks_[turn.layer].ffn;
  for (std::size_t t = 0; t < count; t += FfnTokens::kMost) {
    const std::size_t group = std::min(count - t, FfnTokens::kMost);
    ffn.begin({turn.x + t * width, active_.data() + t, group, t, turn.part.drafted, predicted});
    if (next != nullptr) next->prefetch(turn.x, count);
    if (t == 0 && turn.meanwhile != nullptr) {
      watch_.restart();  // the layers have counted their own time
      (*turn.meanwhile)();
      watch_.charge(counters_.compute_ns);
    }
    ffn.finish(turn.y + t * width);
  }
  watch_.restart();  // the layer has counted its own time
}

// Every neuron

// Every row of a layer, block by block. `then`: as RowStream::begin.
template <typename Body>
void FeedForward::each_block(std::size_t layer, int then, const Body& body) {
  stream_.begin(static_cast<int>(layer), then);
  watch_.charge(counters_.compute_ns);
  RowRun block;
  while (stream_.next(block)) {
    charge_stream();
    body(block, std::min(block.count, blocks_[layer].spec.neurons - block.first_row));
    watch_.charge(counters_.compute_ns);
  }
}

// Block by block, token by token. Where a norm lies before the down columns, these wait for all values, and
// the rows pass a second time.
void FeedForward::run_every(const FfnTurn& turn) {
  const BlockWeights& weights = blocks_[turn.layer];
  const std::size_t width = spec_.block.d_model, tokens = turn.part.count;
  const bool waits = static_cast<bool>(weights.neuron_norm);
  few_.begin(weights.format, turn.x, tokens, weights.spec.activation, turn.y, plane(weights));
  if (waits) few_.keep_values(weights.neuron_norm);
  each_block(turn.layer, waits ? static_cast<int>(turn.layer) : layer_after(turn.layer, turn.part),
             [&](const RowRun& block, std::size_t count) {
               few_.multiply(block.rows, count, part_of(weights.up_bias, block.first_row),
                             part_of(weights.gate_bias, block.first_row),
                             gate_rows(weights, block.first_row));
               if (!waits) few_.add(block.rows, count);
             });
  if (waits) {
    few_.apply();
    each_block(turn.layer, layer_after(turn.layer, turn.part),
               [&](const RowRun& block, std::size_t count) { few_.add(block.rows, count); });
  }
  if (weights.down_bias == nullptr) return;
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t j = 0; j < width; ++j) turn.y[t * width + j] += weights.down_bias[j];
}

// A prompt's stretch

FfnStretch FeedForward::new_stretch() const {
  const SimdLevel level = arithmetic_.level();
  return {DenseFfn(spec_.block.dtype, arithmetic_.pool(), level),
          ExpertFfn(spec_.block.dtype, spec_.part_tokens, arithmetic_.pool(), level)};
}

void FeedForward::take(FfnStretch& stretch, const FfnTurn& turn) {
  const BlockWeights& weights = blocks_[turn.layer];
  const std::size_t count = turn.part.count;
  Tap* tap = turn.part.tap;
  const bool is_first = turn.part.number == 0;
  if (is_routed(turn.layer)) {
    require(tap == nullptr, "what the experts of a mixture see and compute cannot be observed");
    if (is_first) {
      stretch.dense.clear();
      const FfnLayer& ffn = *weights.ffn;
      stretch.experts.begin(ffn.format_of(0), ffn.format_of(ffn.units().count() - 1), *ffn.router(),
                            weights.spec.activation, plane(weights));
    }
    stretch.experts.take(seen(turn), turn.x, count);
  } else {
    if (tap != nullptr) tap->input(turn.layer, turn.x, count);
    if (is_first) {
      stretch.experts.clear();
      stretch.dense.begin(weights.format, weights.spec.activation, weights.neuron_norm, plane(weights));
    }
    stretch.dense.take(arithmetic_.narrowed(turn.x, count * spec_.block.d_model), count);
  }
  if (turn.part.fills && weights.ffn != nullptr) {
    const std::size_t recent = std::min(count, spec_.fill_tokens);
    begin_fill(stretch, turn.layer, turn.part, seen(turn) + (count - recent) * spec_.block.d_model, recent);
  }
  watch_.charge(counters_.compute_ns);
}

// Of a mixture every expert that a token of the stretch goes to, once: from the cache, or read, and then the
// cache may take it.
void FeedForward::begin_rows(FfnStretch& stretch, std::size_t layer, const Part& last) {
  watch_.charge(counters_.compute_ns);
  stretch.blocks = 0;
  stretch.is_applied = false;
  if (is_routed(layer)) {
    if (spec_.fill_tokens != 0 && !last.fills) begin_fill(stretch, layer, last, nullptr, 0);
    stretch.experts.end();
  }
  stream_rows(stretch, layer, last);
}

// What others have forgotten of the fill, the rows that still come are wanted for again; and the experts that
// are in memory may be others.
void FeedForward::resume_rows(FfnStretch& stretch, std::size_t layer, const Part& last) {
  FfnLayer* ffn = blocks_[layer].ffn;
  if (ffn != nullptr && is_routed(layer) && spec_.fill_tokens != 0) {
    const std::int32_t size = ffn->units().size;
    std::vector<std::int32_t> passing = stretch.experts.experts().units(static_cast<std::size_t>(size));
    const auto next = static_cast<std::int32_t>(stretch.experts.next_row()) / size;
    passing.erase(passing.begin(), std::lower_bound(passing.begin(), passing.end(), next));
    ffn->begin_fill(nullptr, 0, &passing);
  } else if (ffn != nullptr && last.fills) {
    ffn->begin_fill(nullptr, 0);
  }
  watch_.restart();
  stream_rows(stretch, layer, last);
}

// The rows from the stretch's next block on.
void FeedForward::stream_rows(const FfnStretch& stretch, std::size_t layer, const Part& last) {
  if (loading_ != nullptr) std::exchange(loading_, nullptr)->end_load();  // the drive is the prompt's
  if (is_routed(layer)) {
    std::vector<RowRun> runs;
    for (const RowRun& run : stretch.experts.runs()) add_units(*blocks_[layer].ffn, run, runs);
    stream_.begin(static_cast<int>(layer), runs, stretch.blocks);
  } else {
    const bool again = blocks_[layer].neuron_norm && !stretch.is_applied;
    stream_.begin(static_cast<int>(layer), again ? static_cast<int>(layer) : layer_after(layer, last),
                  stretch.blocks);
  }
  watch_.charge(counters_.compute_ns);
}

// A block of rows for all parts; false after the last.
bool FeedForward::next_rows(FfnStretch& stretch, std::size_t layer, const Part& last,
                            const std::function<void()>& look) {
  const BlockWeights& weights = blocks_[layer];
  RowRun block;
  if (!stream_.next(block)) {
    if (!weights.neuron_norm || stretch.is_applied) return false;
    stretch.dense.apply();
    stretch.is_applied = true;
    stretch.blocks = 0;
    stream_rows(stretch, layer, last);
    return true;
  }
  charge_stream();
  ++stretch.blocks;
  if (is_routed(layer)) {
    if (spec_.fill_tokens != 0) fill_from(*weights.ffn, block, block.count);
    stretch.experts.add(block, weights.up_bias, weights.gate_bias);
    look();
  } else {
    add_neurons(stretch, layer, last, block, look);
  }
  watch_.charge(counters_.compute_ns);
  return true;
}

void FeedForward::give(FfnStretch& stretch, const FfnTurn& turn) {
  const BlockWeights& weights = blocks_[turn.layer];
  const std::size_t count = turn.part.count, n = count * spec_.block.d_model;
  if (is_routed(turn.layer)) {
    stretch.experts.give(turn.part.first, count, turn.y);
  } else {
    std::byte* narrow = arithmetic_.narrow_scratch(n);
    stretch.dense.finish(turn.part.number, weights.down_bias, narrow);
    arithmetic_.widen(narrow, n, turn.y);
  }
  watch_.charge(counters_.compute_ns);
}

// A block of neurons for all parts; the neuron cache takes what it wants of it.
void FeedForward::add_neurons(FfnStretch& stretch, std::size_t layer, const Part& last, const RowRun& block,
                              const std::function<void()>& look) {
  const BlockWeights& weights = blocks_[layer];
  const std::size_t count = std::min(block.count, weights.spec.neurons - block.first_row);
  const bool waits = static_cast<bool>(weights.neuron_norm);
  if (last.fills && weights.ffn != nullptr && !stretch.is_applied) fill_from(*weights.ffn, block, count);
  for (std::size_t part = 0; part < stretch.dense.parts(); ++part) {
    float* h = stretch.is_applied ? stretch.dense.values(part) : nullptr;
    if (!stretch.is_applied) {
      h = stretch.dense.activations(part, block.rows, count, part_of(weights.up_bias, block.first_row),
                                    part_of(weights.gate_bias, block.first_row),
                                    gate_rows(weights, block.first_row));
    }
    if (last.tap != nullptr && stretch.is_applied == weights.neuron_norm.cuts_gates)
      last.tap->activations(layer, block.first_row, count, h, stretch.dense.padded(part));
    if (!waits || stretch.is_applied) stretch.dense.add(part, block.rows, count);
    look();
  }
}

// A run in the cache's units, with the rows of those that it has. Pairs of rows stay together, so that sums
// are those of whole runs.
void FeedForward::add_units(const FfnLayer& ffn, const RowRun& run, std::vector<RowRun>& runs) {
  const auto size = static_cast<std::size_t>(ffn.units().size);
  if (size == 1 || (size < run.count && size % 2 != 0)) return runs.push_back(run);
  for (std::size_t row = 0; row < run.count; row += size) {
    const std::size_t first = run.first_row + row;
    runs.push_back(
        {first, std::min(size, run.count - row), ffn.cached_rows(static_cast<std::int32_t>(first / size))});
  }
}

// The neuron cache learns which rows it wants for the pass's last tokens, x, `recent` of them, or which units
// of a mixture for all of a stretch's; the layer counts its own time.
void FeedForward::begin_fill(const FfnStretch& stretch, std::size_t layer, const Part& last, const float* x,
                             std::size_t recent) {
  watch_.charge(counters_.compute_ns);
  FfnLayer& ffn = *blocks_[layer].ffn;
  if (is_routed(layer)) {
    const ExpertTokens& experts = stretch.experts.experts();
    const auto size = static_cast<std::size_t>(ffn.units().size);
    if (size != 1) ffn.observe(experts.units_of_tokens(size, 0, last.first + last.count - recent));
    const std::vector<std::int32_t> passing = experts.units(size);
    ffn.begin_fill(x, recent, &passing);
  } else {
    ffn.begin_fill(x, recent);
  }
  watch_.restart();
}

void FeedForward::fill_from(FfnLayer& ffn, const RowRun& block, std::size_t count) {
  ffn.fill_from(block.rows, static_cast<std::int32_t>(block.first_row), static_cast<std::int32_t>(count));
  watch_.restart();
}

void FeedForward::charge_stream() {
  const StreamTimes times = stream_.take();
  counters_.io_ns += times.wait_ns;
  counters_.io_busy_ns += times.busy_ns;
  counters_.add(times);
  watch_.restart();
}

// What the layer's predictor is given.
const float* FeedForward::seen(const FfnTurn& turn) const {
  return blocks_[turn.layer].ffn->predicts_by_stream() ? turn.states : turn.x;
}

const std::byte* FeedForward::gate_rows(const BlockWeights& weights, std::size_t first) const {
  if (weights.gate == nullptr) return nullptr;
  return weights.gate + first * vector_nbytes(weights.format.codec, spec_.block.d_model);
}

const ScalePlane* FeedForward::plane(const BlockWeights& weights) const {
  return has_plane(weights.format.down_codec) ? &weights.plane : nullptr;
}

// The rows that a dense pass wants after this layer's; none where the next pass is not known.
int FeedForward::layer_after(std::size_t layer, const Part& part) const {
  if (part.is_one_block) return RowStream::kNoLayer;
  const bool ends = layer + 1 == blocks_.size();
  if (ends && part.is_last) return RowStream::kNoLayer;
  const std::size_t next = ends ? 0 : layer + 1;
  return is_routed(next) || blocks_[next].spec.neurons == 0 ? RowStream::kNoLayer : static_cast<int>(next);
}

}  // namespace flashllm
