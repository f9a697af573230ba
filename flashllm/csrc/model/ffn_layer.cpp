#include "model/ffn_layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/stopwatch.h"

namespace flashllm {

namespace {

constexpr float kTracedValue = 1e-3F;  // of a neuron that fires by the trace and not by its dummy weights
constexpr std::size_t kCopyGrain = 4;  // rows a thread copies at a time

RowSource source_of(const FfnLayerOptions& options) {
  RowSource source{options.file_offset, options.format.stride, options.checksums, options.row_of, 0};
  if (options.split_rows)
    source.piece_nbytes =
        static_cast<std::uint32_t>(vector_nbytes(options.format.codec, options.format.d_model));
  return source;
}

NeuronCacheOptions cache_options(const FfnLayerOptions& options) {
  return {options.num_neurons,  options.capacity, options.bypass_capacity, options.format.stride,
          options.cache_policy, options.window,   options.popularity};
}

}  // namespace

FfnLayer::FfnLayer(const FfnLayerOptions& options, Reader& reader, const DirectFile& file, ThreadPool& pool,
                   std::byte* rows, std::byte* bypass_rows, FfnCounters& counters)
    : options_(options),
      source_(source_of(options)),
      reader_(reader),
      file_(file),
      pool_(pool),
      counters_(counters),
      cache_(cache_options(options), rows, bypass_rows) {
  const auto neurons = static_cast<std::size_t>(options.num_neurons);
  const std::size_t part = cache_.part_size();
  active_.reserve(neurons);
  listed_.reserve(neurons);
  values_.resize(part);
  gathered_.resize(part);
  scales_.reserve(part);
  vectors_.reserve(part);
  batch_.jobs.reserve(part * source_.jobs_a_row());
  // Nothing is allocated between taking rows and filling them, so nothing can fail there but a read.
  for (auto* ids : {&ids_, &positions_.hits, &positions_.prefetched, &positions_.missed}) ids->reserve(part);
}

FfnLayer::~FfnLayer() {
  if (holds_prefetch()) prefetch_->abandon();
  reader_.settle(batch_);
}

void FfnLayer::set_prefetch(std::unique_ptr<Predictor> predictor, Prefetch& buffer) {
  prefetch_predictor_ = std::move(predictor);
  prefetch_ = &buffer;
  depth_.emplace(static_cast<std::size_t>(buffer.capacity()));
}

void FfnLayer::set_trace(const ActivityTrace& active, const ActivityTrace& prefetched) {
  predictor_ = std::make_unique<TracePredictor>(active, std::move(predictor_));
  if (can_prefetch())
    prefetch_predictor_ = std::make_unique<TracePredictor>(prefetched, std::move(prefetch_predictor_));
}

const std::vector<std::int32_t>& FfnLayer::predict(const float* x, std::size_t token) {
  if (!has_predictor())
    throw CoreError(ErrorKind::usage, "layer " + std::to_string(options_.layer) + " has no predictor");
  Stopwatch watch;
  predictor_->predict(x, token, pool_, options_.simd, active_);
  watch.charge(counters_.compute_ns);
  return active_;
}

void FfnLayer::prefetch(const float* x, std::size_t token) {
  Stopwatch watch;
  prefetch_predictor_->predict(x, token, pool_, options_.simd, listed_);
  watch.charge(counters_.compute_ns);
  listed_.erase(std::remove_if(listed_.begin(), listed_.end(),
                               [this](std::int32_t neuron) { return cache_.contains(neuron); }),
                listed_.end());
  cache_.policy().sort_by_likelihood(listed_);
  prefetch_->start(options_.layer, listed_, source_, *depth_);
  watch.charge(counters_.memory_ns);
  reader_.start();
  watch.charge(counters_.io_ns);
}

// A token

void FfnLayer::begin(const float* x, std::size_t token, const std::vector<std::int32_t>& active) {
  Stopwatch watch;
  abandon();
  cache_.begin_token(active);
  counters_.active += active.size();
  if (holds_prefetch()) prefetch_->keep(active);
  x_ = x;
  token_active_ = &active;
  firing_ = has_predictor() ? predictor_->firing(token) : nullptr;
  watch.charge(counters_.memory_ns);
  part_begin_ = part_end_ = active.data();
  if (!active.empty()) begin_part(0);
}

void FfnLayer::finish(float* y) {
  if (x_ == nullptr) throw CoreError(ErrorKind::usage, "an FFN layer finishes a token that did not begin");
  std::fill(y, y + options_.format.d_model, 0.0F);
  // A token whose active set exceeds the rows is computed in parts; the sum runs on in the order of ids.
  const std::vector<std::int32_t>& active = *token_active_;
  for (std::size_t done = 0; done < active.size();) {
    if (done != 0) begin_part(done);
    done = static_cast<std::size_t>(part_end_ - active.data());
    finish_part(y);
  }
  Stopwatch watch;
  if (options_.down_bias != nullptr)
    for (std::uint32_t j = 0; j < options_.format.d_model; ++j) y[j] += options_.down_bias[j];
  watch.charge(counters_.compute_ns);
  x_ = nullptr;
  if (holds_prefetch()) end_prefetch();
  counters_.moves += cache_.take_moves();
  counters_.io_busy_ns += reader_.take_busy_ns();
  watch.charge(counters_.memory_ns);
}

void FfnLayer::abandon() noexcept {
  if (x_ == nullptr) return;
  x_ = nullptr;
  reader_.settle(batch_);
  if (holds_prefetch()) end_prefetch();
  if (std::exchange(admitted_, false)) cache_.discard_part();
}

// No read may still fly into a row after a failure, and no row may count that did not land.
template <typename Step>
void FfnLayer::guarded(const Step& step) {
  try {
    step();
  } catch (const CoreError& error) {
    abandon();
    rethrow_with_place(error);
  } catch (...) {
    abandon();
    throw;
  }
}

// Hits, misses, rows freed; the misses become reads into their rows, and start.
void FfnLayer::begin_part(std::size_t first) {
  Stopwatch watch;
  const std::vector<std::int32_t>& active = *token_active_;
  ++counters_.parts;
  part_begin_ = active.data() + first;
  part_end_ = active.data() + std::min(first + cache_.part_size(), active.size());
  guarded([&] {
    sort_positions();
    cache_.admit(part_begin_, part_end_);
    admitted_ = true;
    batch_.jobs.clear();
    for (const std::int32_t neuron : cache_.misses())
      if (!prefetched(neuron)) source_.add_jobs(neuron, cache_.row(neuron), batch_.jobs);
    reader_.submit(batch_, file_);
    watch.charge(counters_.memory_ns);
    reader_.start();
    if (options_.wait_first) reader_.wait(batch_);
    watch.charge(counters_.io_ns);
  });
}

void FfnLayer::finish_part(float* y) {
  Stopwatch watch;
  // 1. While reads fly the hits are multiplied, never summed: the sum has one order.
  up_products(positions_.hits);
  watch.charge(counters_.compute_ns);
  // 2. What was prefetched has landed, and then the misses.
  guarded([&] {
    if (!positions_.prefetched.empty()) {
      prefetch_->finish();
      watch.charge(counters_.io_ns);
      counters_.prefetch_used += positions_.prefetched.size();
      up_products(positions_.prefetched);
      watch.charge(counters_.compute_ns);
    }
    if (batch_.in_flight()) reader_.wait(batch_);
  });
  watch.charge(counters_.io_ns);
  tally(batch_.stats());
  watch.charge(counters_.memory_ns);
  up_products(positions_.missed);
  // 3. The down sum over every neuron that really fired, in the order of ids.
  if (firing_ != nullptr) apply_trace();
  down_sum(y);
  watch.charge(counters_.compute_ns);
  if (!positions_.prefetched.empty()) copy_newcomers();
  cache_.end_part();
  admitted_ = false;
  watch.charge(counters_.memory_ns);
}

void FfnLayer::sort_positions() {
  positions_.hits.clear();
  positions_.prefetched.clear();
  positions_.missed.clear();
  for (const std::int32_t* id = part_begin_; id != part_end_; ++id) {
    auto& kind = cache_.contains(*id) ? positions_.hits
                 : prefetched(*id)    ? positions_.prefetched
                                      : positions_.missed;
    kind.push_back(static_cast<std::int32_t>(id - part_begin_));
  }
  counters_.hits += positions_.hits.size();
  counters_.misses += positions_.prefetched.size() + positions_.missed.size();
}

// values_[p] = activation(up . x + bias), or activation(gate . x) * (up . x), for the positions given.
void FfnLayer::up_products(const std::vector<std::int32_t>& positions) {
  const RowFormat& format = options_.format;
  ids_.clear();
  vectors_.clear();
  for (const std::int32_t p : positions) {
    ids_.push_back(part_begin_[p]);
    vectors_.push_back(row(part_begin_[p]) + format.driver());
  }
  const ScatteredRows rows{vectors_.data(), vectors_.size(), format.d_model, format.codec};
  const float* bias = format.gated() ? options_.gate_bias : options_.up_bias;
  dot_scattered(rows, x_, ids_.data(), bias, options_.activation, gathered_.data(), pool_, options_.simd);
  for (std::size_t i = 0; i < positions.size(); ++i)
    values_[static_cast<std::size_t>(positions[i])] = gathered_[i];
  if (!format.gated()) return;
  for (std::size_t i = 0; i < positions.size(); ++i) vectors_[i] = row(ids_[i]) + format.up;
  dot_scattered(rows, x_, ids_.data(), options_.up_bias, options_.activation.of_up(), gathered_.data(), pool_,
                options_.simd);
  for (std::size_t i = 0; i < positions.size(); ++i)
    values_[static_cast<std::size_t>(positions[i])] *= gathered_[i];
}

// Of dummy weights about half of the values fire; by the trace fewer do. The arithmetic left is what a
// trained model's would be.
void FfnLayer::apply_trace() {
  for (std::size_t i = 0; part_begin_ + i != part_end_; ++i) {
    if (!in_bit_set(firing_, part_begin_[i]))
      values_[i] = 0.0F;
    else if (values_[i] == 0.0F)
      values_[i] = kTracedValue;
  }
}

void FfnLayer::down_sum(float* y) {
  const RowFormat& format = options_.format;
  vectors_.clear();
  scales_.clear();
  for (std::size_t i = 0; part_begin_ + i != part_end_; ++i) {
    if (values_[i] == 0.0F) continue;  // predicted, did not fire: its down column adds nothing
    vectors_.push_back(row(part_begin_[i]) + format.down);
    scales_.push_back(values_[i]);
  }
  sum_scattered({vectors_.data(), vectors_.size(), format.d_model, format.codec}, scales_.data(), y, pool_,
                options_.simd);
}

// Of what was prefetched, the rows that the policy wants in the cache are copied there.
void FfnLayer::copy_newcomers() {
  const std::vector<std::int32_t>& newcomers = cache_.newcomers();
  pool_.parallel_for(newcomers.size(), kCopyGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (prefetch_->has(newcomers[i]))
        std::memcpy(cache_.row(newcomers[i]), prefetch_->row(newcomers[i]), options_.format.stride);
  });
}

void FfnLayer::end_prefetch() {
  prefetch_->abandon();
  const ReadStats stats = prefetch_->take_stats();
  tally(stats);
  counters_.prefetched += stats.jobs;
}

void FfnLayer::tally(const ReadStats& stats) {
  counters_.bytes_read += stats.bytes;
  counters_.requests += stats.requests;
  counters_.retries += stats.retries;
}

void FfnLayer::rethrow_with_place(const CoreError& error) const {
  std::string message = "layer " + std::to_string(options_.layer);
  if (error.offset() != CoreError::kNoOffset && error.offset() >= options_.file_offset)
    message += ", neuron " + std::to_string(source_.neuron_at(error.offset(), options_.num_neurons));
  message += std::string(": ") + error.what();
  if (error.kind() == ErrorKind::checksum || error.kind() == ErrorKind::format)
    message +=
        "; the model directory is damaged: check it with `flashllm verify`, then convert the model again";
  if (error.kind() == ErrorKind::io)
    message += "; check the drive (the system's log says more), then try again";
  throw CoreError(error.kind(), message, error.offset());
}

// The cache between tokens

void FfnLayer::begin_fill(const float* x, std::size_t tokens) {
  Stopwatch watch;
  abandon();
  if (holds_prefetch()) end_prefetch();  // for a token that never came here
  abandon_fill();
  watch.charge(counters_.memory_ns);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::vector<std::int32_t>& active = predict(x + t * options_.format.d_model, t);
    watch.restart();  // it has counted its own time
    cache_.observe(active);
    watch.charge(counters_.memory_ns);
  }
  cache_.begin_fill();
  watch.charge(counters_.memory_ns);
}

void FfnLayer::fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count) {
  Stopwatch watch;
  cache_.fill_from(rows, first_neuron, count, pool_);
  watch.charge(counters_.memory_ns);
}

void FfnLayer::set_capacity(std::int32_t rows) {
  Stopwatch watch;
  abandon();
  cache_.set_capacity(rows);
  watch.charge(counters_.memory_ns);
}

std::vector<std::int32_t> FfnLayer::cached() const {
  const SlotTable& slots = cache_.slots();
  return {slots.pointers(), slots.pointers() + slots.num_used()};
}

}  // namespace flashllm
