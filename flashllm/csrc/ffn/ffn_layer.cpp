#include "ffn/ffn_layer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/stopwatch.h"

namespace flashllm {

namespace {

constexpr std::size_t kCopyGrain = 4;  // units a thread copies at a time
constexpr std::size_t kLoaded = 512;   // units whose reads begin together behind tokens: experts of a layer

RowSource source_of(const FfnLayerOptions& options) {
  RowSource source = options.rows;
  source.stride = options.format.stride;
  const RowUnits units = source.units = options.units();
  const auto whole = [&](std::int32_t rows) {
    return rows >= 1 && (units.size == 1 ? rows == 1 : units.size % rows == 0);
  };
  require(units.size >= 1 && whole(source.checksum_rows) && units.num_rows % source.checksum_rows == 0,
          "a layer's units must have rows, and whole checksums");
  require(units.size == 1 || !options.neuron_norm, "a norm over neurons is not for experts");
  require(source.experts == nullptr || source.experts->size == units.size,
          "experts that lie in another file must be units");
  return source;
}

NeuronCacheOptions cache_options(const FfnLayerOptions& options) {
  return {options.units(),      options.capacity, options.bypass_capacity, options.format.stride,
          options.cache_policy, options.window,   options.popularity};
}

}  // namespace

FfnLayer::FfnLayer(const FfnLayerOptions& options, Reader& reader, const DirectFile& file, ThreadPool& pool,
                   std::byte* memory, std::byte* bypass_memory, FfnCounters& counters)
    : options_(options),
      source_(source_of(options)),
      reader_(reader),
      file_(file),
      pool_(pool),
      counters_(counters),
      cache_(cache_options(options), memory, bypass_memory),
      // Nothing is allocated between taking slots and filling them, so nothing can fail there but a read.
      neurons_(options_, pool, of_experts() ? 0 : cache_.part_size()),
      experts_(options_, pool),
      group_(options.units(), of_experts() ? experts_.num_sums() : 1) {
  const auto units = static_cast<std::size_t>(options.units().count());
  active_.reserve(units);
  listed_.reserve(units);
  is_listed_.resize(units);
  batch_.jobs.reserve(cache_.part_size() * source_.jobs_a_unit());
  if (of_experts()) runs_.reserve(cache_.part_size());
}

FfnLayer::~FfnLayer() {
  if (holds_prefetch()) prefetch_->abandon();
  drop_load();
  reader_.settle(batch_);
}

void FfnLayer::set_prefetch(std::unique_ptr<Predictor> predictor, Prefetch& buffer) {
  require(buffer.unit_nbytes() >= unit_nbytes(), "prefetched units have no room for the layer's");
  prefetch_predictor_ = std::move(predictor);
  prefetch_ = &buffer;
  depth_.emplace(static_cast<std::size_t>(buffer.capacity()),
                 options_.unit_rows == 1 ? PrefetchDepth::kPlaces : 1);
}

void FfnLayer::set_predictor(std::unique_ptr<Predictor> predictor) {
  predictor_ = std::move(predictor);
  if (router_ != nullptr)
    predictor_ = std::make_unique<RouterPredictor>(*router_, options_.units(), std::move(predictor_));
}

void FfnLayer::predict_by_gate() {
  require(options_.gate != nullptr, "the layer has no resident gate");
  RowMatrix gate = options_.format.apart(options_.gate, static_cast<std::size_t>(options_.num_neurons));
  gate.bias = options_.gate_bias;
  predictor_ = std::make_unique<GatePredictor>(gate, options_.activation);
}

void FfnLayer::set_router(std::unique_ptr<Router> router) {
  const ExpertsSpec& spec = router->spec();
  require(router->width() == options_.format.d_model &&
              spec.count * spec.size + spec.shared == static_cast<std::size_t>(options_.num_neurons),
          "the experts of a router are not the layer's");
  router_ = std::move(router);
  if (router_->reads_stream()) predict_by_stream();
  predictor_ = std::make_unique<RouterPredictor>(*router_, options_.units(), std::move(predictor_));
}

const std::vector<std::int32_t>& FfnLayer::predict(const float* x, std::size_t token) {
  if (predictor_ == nullptr)
    throw CoreError(ErrorKind::usage, "layer " + std::to_string(options_.layer) + " has no predictor");
  Stopwatch watch;
  predictor_->predict(x, token, pool_, options_.simd, active_);
  watch.charge(counters_.compute_ns);
  return active_;
}

void FfnLayer::prefetch(const float* x, std::size_t tokens) {
  Stopwatch watch;
  for (std::size_t t = 0; t < tokens; ++t)
    prefetch_predictor_->predict(x + t * options_.format.d_model, t, pool_, options_.simd, guesses_[t]);
  watch.charge(counters_.compute_ns);
  list_guesses(tokens);
  // A router tells the likeliest itself.
  if (options_.unit_rows == 1) cache_.policy().sort_by_likelihood(listed_);
  prefetch_->start(options_.layer, listed_, source_, *depth_);
  watch.charge(counters_.memory_ns);
}

// Those that are not cached: every token's likeliest, then every token's second.
void FfnLayer::list_guesses(std::size_t tokens) {
  listed_.clear();
  std::size_t most = 0;
  for (std::size_t t = 0; t < tokens; ++t) most = std::max(most, guesses_[t].size());
  for (std::size_t place = 0; place < most; ++place)
    for (std::size_t t = 0; t < tokens; ++t) {
      if (place >= guesses_[t].size()) continue;
      const std::int32_t unit = guesses_[t][place];
      std::uint8_t& is_listed = is_listed_[static_cast<std::size_t>(unit)];
      if (is_listed != 0 || cache_.contains(unit)) continue;
      is_listed = 1;
      listed_.push_back(unit);
    }
  for (const std::int32_t unit : listed_) is_listed_[static_cast<std::size_t>(unit)] = 0;
}

// Tokens

void FfnLayer::begin(const FfnTokens& tokens) {
  end_load();
  Stopwatch watch;
  abandon();
  accept(0);
  require(tokens.count <= FfnTokens::kMost && tokens.drafted < tokens.count,
          "too many or too few tokens for one pass through an FFN layer");
  // 1. The policy hears of the tokens that are certain.
  cache_.begin_token(tokens.active[0]);
  drafted_from_ = tokens.count - tokens.drafted;
  for (std::size_t t = 1; t < drafted_from_; ++t) cache_.observe(tokens.active[t]);
  for (std::size_t t = drafted_from_; t < tokens.count; ++t) {
    const std::vector<std::int32_t>& active = tokens.active[t];
    drafted_active_[t].assign(active.begin(), active.end());
  }
  drafted_ = tokens.drafted;
  // 2. What they want together.
  group_.begin(tokens, options_.format.d_model);
  counters_.united += options_.units().rows_of(group_.wanted());
  if (holds_prefetch()) prefetch_->keep(group_.wanted());
  for (std::size_t t = 0; t < tokens.count; ++t) {
    FfnMember& member = group_[t];
    member.named_by = tokens.predicted ? predictor_.get() : nullptr;
    member.number = tokens.first + t;
    counters_.active += options_.units().rows_of(*member.active);
  }
  watch.charge(counters_.memory_ns);
  part_end_ = 0;
  if (!group_.wanted().empty()) begin_part(0);
}

void FfnLayer::accept(std::size_t count) {
  require(count <= drafted_, "more tokens accepted than were drafted");
  for (std::size_t t = 0; t < count; ++t) cache_.observe(drafted_active_[drafted_from_ + t]);
  for (std::size_t t = count; t < drafted_; ++t)
    counters_.rejected_bytes += group_[drafted_from_ + t].rows_read * options_.format.stride;
  drafted_ = 0;
}

void FfnLayer::finish(float* y) {
  require(!group_.empty(), "an FFN layer finishes tokens that did not begin");
  const std::size_t tokens = group_.size(), wanted = group_.wanted().size();
  const std::uint32_t width = options_.format.d_model;
  std::fill(y, y + tokens * width, 0.0F);
  // What exceeds the rows is computed in parts; each token's sum runs on in the order of ids.
  const bool waits = options_.neuron_norm && part_end_ < wanted;  // the sum, for the values of all parts
  for (std::size_t done = 0; done < wanted; done = part_end_) {
    if (done != 0) begin_part(done);
    multiply_part();
    if (options_.neuron_norm && !waits) apply_norm();
    if (!waits) sum_part(y);
    end_part();
  }
  if (waits) {
    apply_norm();
    sum_all_parts(y);
  }
  Stopwatch watch;
  if (options_.down_bias != nullptr)
    for (std::size_t t = 0; t < tokens; ++t)
      for (std::uint32_t j = 0; j < width; ++j) y[t * width + j] += options_.down_bias[j];
  for (std::size_t t = 0; t < tokens; ++t)
    if (group_[t].named_by != nullptr) group_[t].named_by->add_biases(group_[t].number, y + t * width);
  watch.charge(counters_.compute_ns);
  group_.clear();
  x_.reset();
  if (holds_prefetch()) end_prefetch();
  counters_.io_busy_ns += reader_.take_busy_ns();
  watch.charge(counters_.memory_ns);
}

void FfnLayer::abandon() noexcept {
  if (group_.empty()) return;
  group_.clear();
  x_.reset();
  drafted_ = 0;
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
    source_.rethrow(error, options_.layer);
  } catch (...) {
    abandon();
    throw;
  }
}

// Hits, misses, slots freed; the misses become reads into their slots, and start.
void FfnLayer::begin_part(std::size_t first, bool again) {
  Stopwatch watch;
  ++counters_.parts;
  const std::vector<std::int32_t>& wanted = group_.wanted();
  part_end_ = std::min(first + cache_.part_size(), wanted.size());
  guarded([&] {
    group_.next_part(part_end_);
    place_rows(again);
    cache_.admit(wanted.data() + first, wanted.data() + part_end_);
    admitted_ = true;
    batch_.jobs.clear();
    for (const std::int32_t unit : cache_.misses())
      if (!prefetched(unit)) source_.add_jobs(unit, cache_.rows(unit), batch_.jobs);
    reader_.submit(batch_, file_);
    watch.charge(counters_.memory_ns);
    reader_.start();
    if (waits_first_) reader_.wait(batch_);
    watch.charge(counters_.io_ns);
  });
}

// Where the part's rows are before it has any. A row that is missing counts as missed once, for the first
// token that wants it; a neuron counts once, though its part comes again.
void FfnLayer::place_rows(bool again) {
  const FfnGroup::Counts counts = group_.sort([this](std::int32_t unit) {
    if (cache_.contains(unit)) return RowPlace::cached;
    return prefetched(unit) ? RowPlace::prefetched : RowPlace::missing;
  });
  part_prefetched_ = counts.prefetched;
  if (again) return;
  counters_.hits += counts.found;
  counters_.misses += counts.missed;
}

void FfnLayer::multiply_part() {
  Stopwatch watch;
  const RowFormat& format = options_.format;
  if (of_experts() && !x_)
    x_.emplace(group_[0].x, group_.size(), format.d_model, format.inputs, options_.simd);
  // 1. While reads fly the hits are multiplied, never summed: the sum has one order.
  up_products(&FfnMember::Positions::hits);
  watch.charge(counters_.compute_ns);
  // 2. What was prefetched has landed, and then the misses.
  if (part_prefetched_ != 0) {
    guarded([&] { prefetch_->finish(); });
    watch.charge(counters_.io_ns);
    counters_.prefetch_used += part_prefetched_;
    up_products(&FfnMember::Positions::prefetched);
    watch.charge(counters_.compute_ns);
  }
  await_missed();
  watch.restart();
  up_products(&FfnMember::Positions::missed);
  if (!of_experts())
    group_.each([&](const FfnMember& member) {
      if (member.named_by != nullptr)
        member.named_by->weigh(member.number, member.begin, member.end, member.values);
    });
  watch.charge(counters_.compute_ns);
}

void FfnLayer::await_missed() {
  Stopwatch watch;
  guarded([&] {
    if (batch_.in_flight()) reader_.wait(batch_);
  });
  watch.charge(counters_.io_ns);
  counters_.add(batch_.stats());
  watch.charge(counters_.memory_ns);
}

// The sum over every expert, or every neuron that really fired, in the order of ids.
void FfnLayer::sum_part(float* y) {
  Stopwatch watch;
  for (std::size_t t = 0; t < group_.size(); ++t, y += options_.format.d_model)
    of_experts() ? experts_.add(group_[t], y) : down_sum(group_[t], y);
  watch.charge(counters_.compute_ns);
}

void FfnLayer::end_part() {
  Stopwatch watch;
  if (part_prefetched_ != 0) copy_newcomers();
  cache_.end_part();
  admitted_ = false;
  watch.charge(counters_.memory_ns);
}

void FfnLayer::apply_norm() {
  Stopwatch watch;
  group_.each([&](const FfnMember& member) {
    apply(options_.neuron_norm, member.active->data(), member.active->size(), member.all_values);
  });
  watch.charge(counters_.compute_ns);
}

// The sum alone, over values that are known: the rows that had to leave are read once more.
void FfnLayer::sum_all_parts(float* y) {
  group_.rewind();
  for (std::size_t done = 0; done < group_.wanted().size(); done = part_end_) {
    begin_part(done, true);
    await_missed();
    sum_part(y);
    end_part();
  }
}

void FfnLayer::up_products(Place place) {
  if (of_experts()) return multiply_experts(place);
  group_.each([&](const FfnMember& member) {
    const std::vector<std::int32_t>& positions = member.positions.*place;
    if (positions.empty()) return;
    neurons_.clear();
    for (const std::int32_t p : positions)
      neurons_.gather(member.begin[p], rows(member.begin[p]), group_.values(member, p));
    neurons_.up(member.x, member.named_by ? member.named_by->gate_values(member.number) : nullptr);
  });
}

// Each is read from memory once, for all tokens that want it.
void FfnLayer::multiply_experts(Place place) {
  runs_.clear();
  group_.each_unit(place, [&](const FfnShare* shares, std::size_t count) {
    runs_.push_back({rows(shares[0].unit), shares, count});
  });
  experts_.multiply(runs_, group_, *x_);
}

void FfnLayer::down_sum(const FfnMember& member, float* y) {
  neurons_.clear();
  for (std::ptrdiff_t p = 0; p < member.part_size(); ++p) {
    // A neuron that was predicted and did not fire: its row is not looked for.
    if (member.values[p] == 0.0F) continue;
    neurons_.gather(member.begin[p], rows(member.begin[p]), group_.values(member, p));
  }
  neurons_.down(y);
}

// Of what was prefetched, the rows that the policy wants in the cache are copied there.
void FfnLayer::copy_newcomers() {
  const std::vector<std::int32_t>& newcomers = cache_.newcomers();
  pool_.parallel_for(newcomers.size(), kCopyGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (prefetch_->has(newcomers[i]))
        std::memcpy(cache_.rows(newcomers[i]), prefetch_->rows(newcomers[i]), unit_nbytes());
  });
}

void FfnLayer::end_prefetch() {
  prefetch_->abandon();
  const ReadStats stats = prefetch_->take_stats();
  counters_.add(stats);
  counters_.prefetched += stats.jobs * static_cast<std::size_t>(options_.unit_rows) / source_.jobs_a_unit();
}

// The cache between tokens

bool FfnLayer::load() {
  end_load();
  if (load_failed_ || !has_room() || is_whole()) return false;
  Stopwatch watch;
  listed_.clear();
  for (std::int32_t unit = 0; unit < cache_.num_units() && listed_.size() < kLoaded; ++unit)
    if (!cache_.contains(unit)) listed_.push_back(unit);
  cache_.take(listed_);
  try {
    behind_.jobs.clear();
    for (const std::int32_t unit : listed_) source_.add_jobs(unit, cache_.rows(unit), behind_.jobs);
    reader_.submit(behind_, file_, ReadPriority::idle);
  } catch (const std::exception&) {  // a lost reader, or no memory
    cache_.forget(listed_);
    load_failed_ = true;
    return false;
  }
  reader_.start();
  watch.charge(counters_.memory_ns);
  return true;
}

bool FfnLayer::is_loading() { return behind_.in_flight() && !reader_.is_lost() && !reader_.poll(behind_); }

void FfnLayer::end_load() {
  if (!behind_.in_flight()) return;
  Stopwatch watch;
  reader_.cancel(behind_);
  try {
    reader_.wait(behind_);
  } catch (const CoreError&) {
    load_failed_ = true;
  }
  watch.charge(counters_.io_ns);
  keep_loaded();
  watch.charge(counters_.memory_ns);
}

void FfnLayer::drop_load() noexcept {
  if (!behind_.in_flight()) return;
  reader_.cancel(behind_);
  reader_.settle(behind_);
  keep_loaded();
}

// No unit counts that did not come whole; none at all where a read may still be under way.
void FfnLayer::keep_loaded() noexcept {
  const bool lost = reader_.is_lost();
  forget_busy();
  counters_.behind_bytes += behind_.stats().bytes;
  listed_.clear();
  for (const ReadJob& job : behind_.jobs) {
    const std::int32_t unit = cache_.unit_at(job.destination);
    if ((lost || !job.landed) && std::exchange(is_listed_[static_cast<std::size_t>(unit)], 1) == 0)
      listed_.push_back(unit);
  }
  cache_.forget(listed_);
  for (const std::int32_t unit : listed_) is_listed_[static_cast<std::size_t>(unit)] = 0;
  behind_ = {};  // its memory, too: every layer has one
}

void FfnLayer::begin_fill(const float* x, std::size_t tokens, const std::vector<std::int32_t>* passing) {
  end_load();
  Stopwatch watch;
  abandon();
  if (holds_prefetch()) end_prefetch();  // for a token that never came here
  accept(0);
  abandon_fill();
  watch.charge(counters_.memory_ns);
  for (std::size_t t = 0; t < tokens; ++t) {
    const std::vector<std::int32_t>& active = predict(x + t * options_.format.d_model, t);
    watch.restart();  // it has counted its own time
    cache_.observe(active);
    watch.charge(counters_.memory_ns);
  }
  cache_.begin_fill(passing);
  watch.charge(counters_.memory_ns);
}

void FfnLayer::observe(const std::vector<std::vector<std::int32_t>>& active) {
  Stopwatch watch;
  for (const std::vector<std::int32_t>& units : active) cache_.observe(units);
  watch.charge(counters_.memory_ns);
}

void FfnLayer::fill_from(const std::byte* rows, std::int32_t first_neuron, std::int32_t count) {
  Stopwatch watch;
  cache_.fill_from(rows, first_neuron, count, pool_);
  watch.charge(counters_.memory_ns);
}

void FfnLayer::set_capacity(std::int32_t rows) {
  drop_load();
  Stopwatch watch;
  abandon();
  cache_.set_capacity(rows / options_.unit_rows);
  watch.charge(counters_.memory_ns);
}

std::vector<std::int32_t> FfnLayer::cached() const {
  const SlotTable& slots = cache_.slots();
  const RowUnits units = options_.units();
  std::vector<std::int32_t> neurons;
  for (std::int32_t slot = 0; slot < slots.num_used(); ++slot)
    for (std::int32_t row = 0; row < units.rows(slots.pointers()[slot]); ++row)
      neurons.push_back(units.first(slots.pointers()[slot]) + row);
  return neurons;
}

}  // namespace flashllm
