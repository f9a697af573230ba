#include "model/ffn_layer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "io/error.h"
#include "io/stopwatch.h"

namespace flashllm {

namespace {

constexpr float kSilentValue = 1e-3F;  // of a neuron that fires by the trace and not by its dummy weights
constexpr std::size_t kCopyGrain = 4;  // rows a thread copies at a time

}  // namespace

FfnLayer::FfnLayer(const FfnLayerOptions& options, Reader& reader, const DirectFile& file, ThreadPool& pool,
                   std::byte* rows, std::byte* bypass_rows, FfnCounters& counters)
    : options_(options),
      source_({options.file_offset, options.layout.stride, options.checksums, options.row_of}),
      reader_(reader),
      file_(file),
      pool_(pool),
      rows_(rows),
      bypass_rows_(bypass_rows),
      counters_(counters),
      slots_(options.num_neurons, options.capacity, options.bypass_capacity),
      policy_(
          make_cache_policy(options.cache_policy, options.num_neurons, options.window, options.popularity)) {
  const auto neurons = static_cast<std::size_t>(options.num_neurons);
  const auto capacity = static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  active_.reserve(neurons);
  guessed_.reserve(neurons);
  values_.resize(capacity);
  gathered_.resize(capacity);
  scales_.reserve(capacity);
  pointers_.reserve(capacity);
  moves_.reserve(capacity);
  batch_.jobs.reserve(options.bundled ? capacity : capacity * (options.layout.gate >= 0 ? 3 : 2));
  // Nothing is allocated between taking rows and filling them, so nothing can fail there but a read.
  for (auto* ids : {&leaving_, &misses_, &hit_positions_, &miss_positions_, &ids_, &pending_fill_,
                    &early_positions_, &choice_.leaving, &choice_.coming, &choice_.bypassing})
    ids->reserve(capacity);
}

FfnLayer::~FfnLayer() {
  if (was_read_ahead()) early_->abandon();
  reader_.settle(batch_);
}

const std::vector<std::int32_t>& FfnLayer::predict(const float* x, std::size_t token) {
  if (!has_predictor())
    throw CoreError(ErrorKind::usage, "layer " + std::to_string(options_.layer) + " has no predictor");
  if (trace_.traced() && token >= trace_.tokens)
    throw CoreError(ErrorKind::usage, "the pass has more tokens than the trace at hand");
  Stopwatch watch;
  run(*predictor_, x, trace_.active, token, active_);
  watch.charge(counters_.compute_ns);
  return active_;
}

// What the predictor says, or, where there is a trace, what `traced` of it says.
void FfnLayer::run(Predictor& predictor, const float* x, const std::uint64_t* traced, std::size_t token,
                   std::vector<std::int32_t>& active) {
  predictor.predict(x, pool_, options_.simd, active);
  if (!trace_.traced()) return;
  traced += token * trace_.token_words;
  active.clear();
  for (std::int32_t neuron = 0; neuron < options_.num_neurons; ++neuron)
    if (TracedActivity::has(traced, neuron)) active.push_back(neuron);
}

void FfnLayer::read_ahead(const float* x, std::size_t token) {
  Stopwatch watch;
  run(*early_predictor_, x, trace_.early, token, guessed_);
  watch.charge(counters_.compute_ns);
  guessed_.erase(std::remove_if(guessed_.begin(), guessed_.end(),
                                [this](std::int32_t neuron) { return slots_.contains(neuron); }),
                 guessed_.end());
  policy_->sort_by_likelihood(guessed_);
  early_->start(options_.layer, guessed_, source_, *guess_limit_);
  watch.charge(counters_.memory_ns);
  reader_.start();
  watch.charge(counters_.io_ns);
}

void FfnLayer::forward(const float* x, std::size_t token, const std::vector<std::int32_t>& active, float* y,
                       bool ahead) {
  Stopwatch watch;
  if (ahead && control_ != nullptr && options_.layer == 0) control_->begin_token();
  abandon_fill();
  if (!options_.cached) forget_all();
  std::fill(y, y + options_.layout.d_model, 0.0F);
  policy_->observe(active);
  counters_.active += active.size();
  if (was_read_ahead()) early_->keep(active);
  watch.charge(counters_.memory_ns);

  // A token whose active set exceeds the rows is computed in parts; the sum runs on in the order of ids.
  const auto capacity = static_cast<std::size_t>(slots_.capacity() + slots_.bypass_capacity());
  for (std::size_t begin = 0; begin < active.size(); begin += capacity) {
    const std::size_t end = std::min(begin + capacity, active.size());
    forward_part(x, token, active.data() + begin, active.data() + end, y, ahead && begin == 0);
  }

  Stopwatch end_watch;
  if (options_.down_bias != nullptr)
    for (std::uint32_t j = 0; j < options_.layout.d_model; ++j) y[j] += options_.down_bias[j];
  end_watch.charge(counters_.compute_ns);
  if (was_read_ahead()) end_early();
  if (ahead && control_ != nullptr && next_ == nullptr) control_->end_token();
  counters_.io_busy_ns += reader_.take_busy_ns();
  end_watch.charge(counters_.memory_ns);
}

void FfnLayer::forward_part(const float* x, std::size_t token, const std::int32_t* begin,
                            const std::int32_t* end, float* y, bool ahead) {
  Stopwatch watch;
  const auto count = static_cast<std::size_t>(end - begin);
  ++counters_.parts;

  // 1. Cache: hits, misses, rows freed; the misses become read jobs into their rows.
  admit(begin, end);
  try {
    // 2. The reads fly ...
    reader_.submit(batch_, file_);
    watch.charge(counters_.memory_ns);
    reader_.start();
    watch.charge(counters_.io_ns);
    // ... behind them those that the next layer will probably want ...
    if (ahead && next_ != nullptr && next_->early_ != nullptr && control_->reads_ahead()) {
      next_->read_ahead(x, token);
      watch.restart();  // it has counted its own time
    }
    // 3. ... while the hits are multiplied (never summed: the sum has one order).
    if (options_.overlap) up_products(x, hit_positions_, begin);
    watch.charge(counters_.compute_ns);
    // 4. What was read ahead has landed, and then the misses.
    if (!early_positions_.empty()) {
      early_->finish();
      watch.charge(counters_.io_ns);
      up_products(x, early_positions_, begin);
      watch.charge(counters_.compute_ns);
    }
    reader_.wait(batch_);
  } catch (...) {
    // No read may still fly into a row, and no row may count that did not land.
    reader_.settle(batch_);
    if (was_read_ahead()) end_early();
    slots_.end_bypass();
    discard(choice_.coming);
    try {
      throw;
    } catch (const CoreError& error) {
      rethrow_with_place(error);
    }
  }
  watch.charge(counters_.io_ns);
  tally(batch_.stats());
  watch.charge(counters_.memory_ns);
  // 5. Their up products, then the down sum over every neuron that really fired, in the order of ids.
  if (!options_.overlap) up_products(x, hit_positions_, begin);
  up_products(x, miss_positions_, begin);
  if (trace_.traced()) silence(token, begin, count);
  pointers_.clear();
  scales_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    if (values_[i] == 0.0F) continue;  // predicted, did not fire: its down column adds nothing
    pointers_.push_back(part_of_row(begin[i], options_.layout.down));
    scales_.push_back(values_[i]);
  }
  scaled_row_sum(pointers_.data(), scales_.data(), scales_.size(), options_.layout.dtype,
                 options_.layout.d_model, y, pool_, options_.simd);
  watch.charge(counters_.compute_ns);
  if (!early_positions_.empty()) adopt_early_rows();
  slots_.end_bypass();
  watch.charge(counters_.memory_ns);
}

void FfnLayer::tally(const ReadStats& stats) {
  counters_.bytes_read += stats.bytes;
  counters_.requests += stats.requests;
  counters_.retries += stats.retries;
}

// Of what was read ahead, the rows that the policy wants in the cache are copied there.
void FfnLayer::adopt_early_rows() {
  const std::vector<std::int32_t>& coming = choice_.coming;
  pool_.parallel_for(coming.size(), kCopyGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (early_->asked_for(coming[i]))
        std::memcpy(row(slots_.slot_of(coming[i])), early_->row(coming[i]), options_.layout.stride);
  });
}

void FfnLayer::end_early() {
  early_->abandon();
  const ReadStats stats = early_->take_stats();
  tally(stats);
  counters_.early_read += stats.jobs;
}

void FfnLayer::admit(const std::int32_t* begin, const std::int32_t* end) {
  hit_positions_.clear();
  miss_positions_.clear();
  early_positions_.clear();
  misses_.clear();
  for (const std::int32_t* id = begin; id != end; ++id) {
    const auto position = static_cast<std::int32_t>(id - begin);
    if (slots_.contains(*id)) {
      hit_positions_.push_back(position);
    } else {
      (in_early_rows(*id) ? early_positions_ : miss_positions_).push_back(position);
      misses_.push_back(*id);
    }
  }
  counters_.hits += hit_positions_.size();
  counters_.misses += misses_.size();
  counters_.early_used += early_positions_.size();
  policy_->choose(slots_, {begin, end, misses_}, choice_);
  slots_.exchange(choice_.leaving, choice_.coming, moves_);
  slots_.bypass(choice_.bypassing);
  apply_moves();
  batch_.jobs.clear();
  for (const std::int32_t neuron : misses_)
    if (!in_early_rows(neuron)) add_jobs(neuron);
}

void FfnLayer::add_jobs(std::int32_t neuron) {
  ReadJob job = source_.job(neuron, row(slots_.slot_of(neuron)));
  if (options_.bundled) {
    batch_.jobs.push_back(job);
    return;
  }
  job.checksums = nullptr;  // they are of whole rows
  job.row_nbytes = 0;
  job.nbytes = options_.layout.d_model * dtype_nbytes(options_.layout.dtype);
  for (std::uint64_t at = 0; at + job.nbytes <= options_.layout.stride; at += job.nbytes) {
    batch_.jobs.push_back(job);
    job.offset += job.nbytes;
    job.destination += job.nbytes;
  }
}

void FfnLayer::rethrow_with_place(const CoreError& error) const {
  std::string message = "layer " + std::to_string(options_.layer);
  if (error.offset() != CoreError::kNoOffset && error.offset() >= options_.file_offset) {
    auto neuron = static_cast<std::int32_t>((error.offset() - options_.file_offset) / options_.layout.stride);
    if (options_.row_of != nullptr)
      neuron = static_cast<std::int32_t>(
          std::find(options_.row_of, options_.row_of + options_.num_neurons, neuron) - options_.row_of);
    message += ", neuron " + std::to_string(neuron);
  }
  message += std::string(": ") + error.what();
  if (error.kind() == ErrorKind::checksum || error.kind() == ErrorKind::format)
    message +=
        "; the model directory is damaged: check it with `flashllm verify`, then convert the model again";
  if (error.kind() == ErrorKind::io)
    message += "; check the drive (the system's log says more), then try again";
  throw CoreError(error.kind(), message, error.offset());
}

void FfnLayer::apply_moves() {
  for (const SlotTable::Move& move : moves_)
    std::memcpy(row(move.to), row(move.from), options_.layout.stride);
  counters_.moves += moves_.size();
}

void FfnLayer::discard(const std::vector<std::int32_t>& neurons) {
  slots_.exchange(neurons, {}, moves_);
  apply_moves();
}

void FfnLayer::forget_all() {
  leaving_.assign(slots_.pointers(), slots_.pointers() + slots_.num_used());
  discard(leaving_);
}

const std::byte* FfnLayer::part_of_row(std::int32_t neuron, std::uint32_t element) const {
  const std::byte* start = in_early_rows(neuron) ? early_->row(neuron) : row(slots_.slot_of(neuron));
  return start + element * dtype_nbytes(options_.layout.dtype);
}

// Of dummy weights about half of the values fire; by the trace fewer do. The arithmetic left is what a
// trained model's would be.
void FfnLayer::silence(std::size_t token, const std::int32_t* ids, std::size_t count) {
  const std::uint64_t* firing = trace_.firing + token * trace_.token_words;
  for (std::size_t i = 0; i < count; ++i) {
    if (!TracedActivity::has(firing, ids[i]))
      values_[i] = 0.0F;
    else if (values_[i] == 0.0F)
      values_[i] = kSilentValue;
  }
}

// values_[p] = activation(up . x + bias), or activation(gate . x) * (up . x), for the positions given.
void FfnLayer::up_products(const float* x, const std::vector<std::int32_t>& positions,
                           const std::int32_t* ids) {
  const RowLayout& layout = options_.layout;
  const bool gated = layout.gate >= 0;
  ids_.clear();
  pointers_.clear();
  for (const std::int32_t p : positions) {
    ids_.push_back(ids[p]);
    pointers_.push_back(part_of_row(ids[p], gated ? static_cast<std::uint32_t>(layout.gate) : layout.up));
  }
  gathered_dots(pointers_.data(), ids_.data(), ids_.size(), layout.dtype, x, layout.d_model,
                gated ? nullptr : options_.up_bias, options_.activation, gathered_.data(), pool_,
                options_.simd);
  for (std::size_t i = 0; i < positions.size(); ++i)
    values_[static_cast<std::size_t>(positions[i])] = gathered_[i];
  if (!gated) return;
  for (std::size_t i = 0; i < positions.size(); ++i) pointers_[i] = part_of_row(ids_[i], layout.up);
  gathered_dots(pointers_.data(), ids_.data(), ids_.size(), layout.dtype, x, layout.d_model, nullptr,
                Activation::identity, gathered_.data(), pool_, options_.simd);
  for (std::size_t i = 0; i < positions.size(); ++i)
    values_[static_cast<std::size_t>(positions[i])] *= gathered_[i];
}

void FfnLayer::begin_fill(const float* x, std::size_t tokens) {
  Stopwatch watch;
  if (was_read_ahead()) end_early();  // for a token that never came here
  abandon_fill();
  watch.charge(counters_.memory_ns);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::vector<std::int32_t>& active = predict(x + t * options_.layout.d_model, t);
    Stopwatch observing;
    policy_->observe(active);
    observing.charge(counters_.memory_ns);
  }
  Stopwatch choosing;
  std::vector<std::int32_t> kept;
  policy_->choose_kept(slots_.capacity(), kept);
  leaving_.clear();
  for (std::int32_t slot = 0; slot < slots_.num_used(); ++slot) {
    const std::int32_t neuron = slots_.pointers()[slot];
    if (!std::binary_search(kept.begin(), kept.end(), neuron)) leaving_.push_back(neuron);
  }
  for (const std::int32_t neuron : kept)
    if (!slots_.contains(neuron)) pending_fill_.push_back(neuron);
  slots_.exchange(leaving_, pending_fill_, moves_);
  apply_moves();
  choosing.charge(counters_.memory_ns);
}

void FfnLayer::fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count) {
  Stopwatch watch;
  const auto begin = std::lower_bound(pending_fill_.begin(), pending_fill_.end(), first_neuron);
  const auto end = std::lower_bound(begin, pending_fill_.end(), first_neuron + count);
  pool_.parallel_for(static_cast<std::size_t>(end - begin), kCopyGrain,
                     [&](std::size_t first, std::size_t last) {
                       for (std::size_t i = first; i < last; ++i) {
                         const std::int32_t neuron = begin[static_cast<std::ptrdiff_t>(i)];
                         const auto at = static_cast<std::size_t>(neuron - first_neuron);
                         std::memcpy(row(slots_.slot_of(neuron)), rows + at * options_.layout.stride,
                                     options_.layout.stride);
                       }
                     });
  pending_fill_.erase(begin, end);
  watch.charge(counters_.memory_ns);
}

void FfnLayer::abandon_fill() {
  if (pending_fill_.empty()) return;
  discard(pending_fill_);
  pending_fill_.clear();
}

}  // namespace flashllm
