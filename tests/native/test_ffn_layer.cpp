// The FFN layer: the same bits whatever is cached, and a cache that is right after failures of every kind.
#include "ffn/ffn_layer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "ffn_fixture.h"
#include "io/error.h"
#include "trace_predictor.h"

namespace {

using namespace ffn_tests;

std::vector<std::int32_t> random_active(std::mt19937& random) {
  std::vector<std::int32_t> active;
  const unsigned rarity = 1 + random() % 6;
  for (std::int32_t n = 0; n < kNeurons; ++n)
    if (random() % rarity == 0) active.push_back(n);
  return active;
}

// A predictor that names what it is told to of each token, right or wrong.
class Told final : public Predictor {
 public:
  explicit Told(const std::vector<std::int32_t>* told) : told_(told) {}
  void predict(const float* /*x*/, std::size_t token, ThreadPool& /*pool*/, SimdLevel /*level*/,
               std::vector<std::int32_t>& active) override {
    active = told_[token];
  }

 private:
  const std::vector<std::int32_t>* told_;
};

void bits_depend_on_the_active_set_alone(const Flash& flash, int tokens) {
  Layer whole(flash, kNeurons, 3, 1, 1), narrow(flash, 3, 2, 2, 4), middle(flash, 17, 5, 3, 2);
  Layer frequency(flash, 11, 1, 2, 3, 5), scarce(flash, 2, 1, 1, 2, 1);
  FfnLayerOptions plain = flash.options(12, 1);
  plain.cache_policy = "frequency";
  plain.bypass_capacity = 3;
  Layer naive(flash, plain, 2, 2);  // nothing stays, no product beside reads
  naive.layer.waits_first() = true;
  const std::vector<Layer*> layers = {&narrow, &middle, &frequency, &scarce, &naive};
  std::mt19937 random(2);
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = whole.forward(flash, active);
    for (Layer* layer : layers) CHECK(same_bits(layer->forward(flash, active), expected));
    naive.layer.cache().forget(naive.layer.cached());
    CHECK(naive.layer.cached().empty());
  }
  for (const Layer* layer : layers)
    CHECK(layer->counters.hits + layer->counters.misses == layer->counters.active);
  CHECK(narrow.counters.parts > static_cast<std::uint64_t>(tokens));
  // A norm makes parts pass twice.
  CHECK(naive.counters.hits == 0 && naive.counters.bytes_read >= naive.counters.active * kStride);
  CHECK((naive.counters.bytes_read > naive.counters.active * kStride) == static_cast<bool>(flash.norm));
}

// Tokens that go through together get what each gets alone, whatever is drafted and accepted; a pass that is
// given up leaves no trace. What is read for a token that turns out wrong is counted.
void tokens_together_are_tokens_alone(const Flash& flash, int passes) {
  Layer whole(flash, kNeurons, 3, 1, 1), narrow(flash, 3, 2, 2, 4), middle(flash, 17, 5, 3, 2);
  Layer frequency(flash, 11, 1, 2, 3, 5), scarce(flash, 2, 1, 1, 2, 1);
  const std::vector<Layer*> layers = {&narrow, &middle, &frequency, &scarce};
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  std::vector<float> x(FfnTokens::kMost * kWidth), y(x.size()), expected(x.size());
  std::vector<std::vector<std::int32_t>> active(FfnTokens::kMost);
  for (int pass = 0; pass < passes; ++pass) {
    const std::size_t count = 1 + random() % FfnTokens::kMost, drafted = random() % count;
    for (float& value : x) value = normal(random);
    for (auto& one : active) one = random_active(random);
    for (std::size_t t = 0; t < count; ++t)
      whole.layer.forward(x.data() + t * kWidth, t, active[t], expected.data() + t * kWidth);
    const FfnTokens tokens{x.data(), active.data(), count, 0, drafted};
    const std::size_t accepted = random() % (drafted + 1);
    for (Layer* layer : layers) {
      if (pass % 5 == 0) layer->layer.begin(tokens);
      if (pass % 10 == 0) layer->layer.abandon();
      layer->layer.begin(tokens);
      layer->layer.finish(y.data());
      CHECK(std::memcmp(y.data(), expected.data(), 4 * count * kWidth) == 0);
      if (pass % 3 != 0) layer->layer.accept(accepted);
    }
  }
  for (const Layer* layer : layers) {
    const FfnCounters& counters = layer->counters;
    CHECK(counters.united < counters.active && counters.rejected_bytes > 0);
    CHECK(counters.rejected_bytes < counters.bytes_read);
  }
  for (const auto& [count, drafted] :
       std::vector<std::pair<std::size_t, std::size_t>>{{0, 0}, {2, 2}, {9, 1}}) {
    CHECK(is_refused([&] { middle.layer.begin({x.data(), active.data(), count, 0, drafted}); }));
  }
}

// Rows that a drafted token wants are read, and leave like any others unless it is accepted.
void the_window_ends_with_the_last_accepted_token(const Flash& flash) {
  const std::vector<std::vector<std::int32_t>> active = {{1, 2}, {2, 3}, {4, 5}};
  const std::vector<float> x(3 * kWidth, 1.0F);
  std::vector<float> y(3 * kWidth);
  for (const std::size_t accepted : {0U, 1U, 2U}) {
    Layer layer(flash, 20, 2, 1, 1);
    layer.layer.begin({x.data(), active.data(), 3, 0, 2});
    layer.layer.finish(y.data());
    CHECK(layer.counters.active == 6 && layer.counters.united == 5 && layer.counters.misses == 5);
    layer.layer.accept(accepted);
    const std::vector<std::size_t> rejected_rows = {3, 2, 0};
    CHECK(layer.counters.rejected_bytes == rejected_rows[accepted] * kStride);
    layer.layer.forward(x.data(), 0, {9}, y.data());
    std::vector<std::int32_t> cached = layer.layer.cached();
    std::sort(cached.begin(), cached.end());
    const std::vector<std::vector<std::int32_t>> kept = {{1, 2, 9}, {2, 3, 9}, {4, 5, 9}};
    CHECK(cached == kept[accepted]);
  }
}

// Whatever is prefetched, for this token or for one that never comes, with a `begin` here and there that is
// given up.
void prefetching_changes_no_bit(const Flash& flash, int tokens, std::int32_t bypass) {
  constexpr std::int32_t kRoom = 15;
  Layer whole(flash, kNeurons, 3, 1, 1), prefetching(flash, 11, 2, 2, 3, bypass);
  HugeBuffer memory(std::size_t{kRoom} * kStride);
  Prefetch buffer(memory.data(), kRoom, kStride, kNeurons, prefetching.reader, *flash.file);
  std::vector<std::int32_t> told;
  CHECK(!prefetching.layer.can_prefetch());
  prefetching.layer.set_prefetch(std::make_unique<Told>(&told), buffer);
  CHECK(prefetching.layer.can_prefetch());
  std::mt19937 random(5);
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = whole.forward(flash, active);
    told = token % 5 == 0 ? random_active(random) : active;
    if (token % 3 != 0) prefetching.layer.prefetch(flash.x.data(), 1);
    if (token % 7 == 0) {
      prefetching.layer.begin({flash.x.data(), &told, 1, 0, 0});
      if (token % 2 == 0) prefetching.layer.abandon();
    }
    CHECK(same_bits(prefetching.forward(flash, active), expected));
    CHECK(buffer.layer() == -1);
  }
  const FfnCounters& counters = prefetching.counters;
  CHECK(counters.prefetch_used > 0 && counters.prefetched >= counters.prefetch_used);
  prefetching.layer.prefetch(flash.x.data(), 1);  // the destructor waits for these
}

// The same of tokens that share a pass.
void prefetching_for_several_changes_no_bit(const Flash& flash, int passes) {
  constexpr std::int32_t kRoom = 9;
  Layer whole(flash, kNeurons, 3, 1, 1), prefetching(flash, 11, 2, 2, 3);
  HugeBuffer memory(std::size_t{kRoom} * kStride);
  Prefetch buffer(memory.data(), kRoom, kStride, kNeurons, prefetching.reader, *flash.file);
  std::vector<std::vector<std::int32_t>> active(FfnTokens::kMost), told(FfnTokens::kMost);
  prefetching.layer.set_prefetch(std::make_unique<Told>(told.data()), buffer);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(FfnTokens::kMost * kWidth), y(x.size()), expected(x.size());
  for (int pass = 0; pass < passes; ++pass) {
    const std::size_t count = 1 + random() % FfnTokens::kMost;
    for (float& value : x) value = normal(random);
    for (std::size_t t = 0; t < count; ++t) {
      active[t] = random_active(random);
      told[t] = random() % 4 == 0 ? random_active(random) : active[t];
      whole.layer.forward(x.data() + t * kWidth, t, active[t], expected.data() + t * kWidth);
    }
    prefetching.layer.prefetch(x.data(), count);
    prefetching.layer.begin({x.data(), active.data(), count, 0, 0});
    prefetching.layer.finish(y.data());
    CHECK(std::memcmp(y.data(), expected.data(), 4 * count * kWidth) == 0);
    CHECK(buffer.layer() == -1);
  }
  CHECK(prefetching.counters.prefetch_used > 0);
}

// The same of experts.
void prefetching_experts_changes_no_bit(const Flash& flash, int tokens) {
  constexpr std::int32_t kRows = 4, kUnits = kNeurons / kRows;
  Layer whole(flash, flash.units(kRows, 2, kUnits, 0, "window"), 1, 1);
  Layer prefetching(flash, flash.units(kRows, 2, 3, 2, "frequency"), 2, 3);
  HugeBuffer memory(std::size_t{2} * kRows * kStride);
  Prefetch buffer(memory.data(), 2, std::size_t{kRows} * kStride, kUnits, prefetching.reader, *flash.file);
  std::vector<std::int32_t> told, active(kUnits);
  prefetching.layer.set_prefetch(std::make_unique<Told>(&told), buffer);
  std::mt19937 random(6);
  for (int token = 0; token < tokens; ++token) {
    active.resize(kUnits);
    std::iota(active.begin(), active.end(), 0);
    std::shuffle(active.begin(), active.end(), random);
    active.resize(1 + random() % 4);
    told = active;
    if (token % 5 == 0) told[0] = static_cast<std::int32_t>(random() % kUnits);
    std::sort(active.begin(), active.end());
    if (token % 3 != 0) prefetching.layer.prefetch(flash.x.data(), 1);
    CHECK(same_bits(prefetching.forward(flash, active), whole.forward(flash, active)));
  }
  const FfnCounters& counters = prefetching.counters;
  CHECK(counters.prefetch_used > 0 && counters.prefetch_used % kRows == 0);
  CHECK(counters.prefetched >= counters.prefetch_used && counters.prefetched % kRows == 0);
}

// Pages of the cache's memory from row `from` on that hold anything.
std::size_t resident_pages(const Layer& layer, std::int32_t from) {
  constexpr std::size_t kPage = 4096;
  const std::size_t first = (static_cast<std::size_t>(from) * kStride + kPage - 1) / kPage;
  std::vector<unsigned char> pages(layer.memory.size() / kPage - first);
  CHECK(mincore(layer.memory.data() + first * kPage, pages.size() * kPage, pages.data()) == 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1U) != 0; }));
}

// The cache shrinks and grows between tokens: no bit changes, what is cached fits, and the memory behind it
// is given back.
void capacity_changes_no_bit(const Flash& flash, int tokens, std::int32_t bypass) {
  Layer whole(flash, kNeurons, 3, 1, 1), changing(flash, kNeurons, 4, 2, 3, bypass);
  std::mt19937 random(4);
  for (int token = 0; token < tokens; ++token) {
    const auto least = bypass == 0 ? 1U : 0U;  // everything may pass by
    const auto capacity = static_cast<std::int32_t>(least + random() % kNeurons);
    const std::vector<std::int32_t> before = changing.layer.cached();
    changing.layer.set_capacity(capacity);
    CHECK(changing.layer.capacity() == capacity);
    const std::vector<std::int32_t> after = changing.layer.cached();
    CHECK(after.size() == std::min(before.size(), static_cast<std::size_t>(capacity)));
    for (const std::int32_t neuron : after)
      CHECK(std::find(before.begin(), before.end(), neuron) != before.end());
    CHECK(resident_pages(changing, capacity) == 0);
    for (int again = 0; again < 3; ++again) {
      const std::vector<std::int32_t> active = random_active(random);
      CHECK(same_bits(changing.forward(flash, active), whole.forward(flash, active)));
      CHECK(static_cast<std::int32_t>(changing.layer.cached().size()) <= capacity);
    }
  }
  CHECK(changing.counters.hits > 0);
  for (const std::int32_t capacity : {bypass == 0 ? 0 : -1, kNeurons + 1}) {
    CHECK(is_refused([&] { changing.layer.set_capacity(capacity); }));
  }
}

// What leaves a shrinking cache is what the policy would evict first.
void the_unlikely_leave_first(const Flash& flash) {
  for (const std::int32_t bypass : {0, 4}) {
    Layer layer(flash, 20, 9, 1, 1, bypass);
    for (const auto& active : std::vector<std::vector<std::int32_t>>{{1, 2, 3}, {4, 5, 6}, {4, 5}, {5}})
      layer.forward(flash, active);
    std::vector<std::int32_t> cached;
    for (const auto& [capacity, kept] : std::vector<std::pair<std::int32_t, std::vector<std::int32_t>>>{
             {3, {4, 5, 6}}, {2, {4, 5}}, {1, {5}}}) {
      layer.layer.set_capacity(capacity);
      cached = layer.layer.cached();
      std::sort(cached.begin(), cached.end());
      CHECK(cached == kept);
    }
    layer.layer.set_capacity(20);
    layer.counters = FfnCounters{};
    layer.forward(flash, {4, 5, 6});
    CHECK(layer.counters.hits == 1);
  }
}

// The neurons of units of `rows` each.
std::vector<std::int32_t> neurons_of(const std::vector<std::int32_t>& units, std::int32_t rows) {
  std::vector<std::int32_t> neurons;
  for (const std::int32_t unit : units)
    for (std::int32_t n = unit * rows; n < std::min(kNeurons, (unit + 1) * rows); ++n) neurons.push_back(n);
  return neurons;
}

// Units of several neurons, of which the last has fewer: what their neurons are one by one, and the same bits
// whatever is cached and however a dense pass fills the cache; each unit one request; a failed read leaves
// nothing behind.
void units_are_runs_of_neurons(const Flash& flash, int tokens) {
  constexpr std::int32_t kRows = 6, kUnits = 7;
  Layer neurons(flash, kNeurons, 3, 1, 1), whole(flash, flash.units(kRows, 1, kUnits, 0, "window"), 1, 1);
  Layer few(flash, flash.units(kRows, 1, 2, 2, "frequency"), 2, 3);
  Layer none(flash, flash.units(kRows, 2, 0, 1, "frequency"), 2, 3);
  Layer window(flash, flash.units(kRows, 2, 3, 0, "window"), 1, 1);
  Layer all(flash, flash.units(kRows, 1, kUnits, 0, "window"), 3, 2);
  const std::vector<Layer*> layers = {&few, &none, &window, &all};
  std::mt19937 random(8);
  for (int token = 0; token < tokens; ++token) {
    std::vector<std::int32_t> units;
    for (std::int32_t unit = 0; unit < kUnits; ++unit)
      if (random() % 3 == 0) units.push_back(unit);
    const std::vector<float> expected = whole.forward(flash, units),
                             one_by_one = neurons.forward(flash, neurons_of(units, kRows));
    for (std::uint32_t j = 0; j < kWidth; ++j)
      CHECK(std::fabs(expected[j] - one_by_one[j]) <= 1e-5F * (1.0F + std::fabs(one_by_one[j])));
    for (Layer* layer : layers) CHECK(same_bits(layer->forward(flash, units), expected));
    if (token % 4 == 0) {
      inject(*flash.file, std::make_shared<FaultPlan>(Fault{Fault::Kind::flip, 0, 50, random() % 2048}));
      for (Layer* layer : layers) {
        try {
          CHECK(same_bits(layer->forward(flash, units), expected));
        } catch (const CoreError& error) {
          CHECK(error.kind() == ErrorKind::checksum);
        }
        layer->counters = FfnCounters{};
      }
      inject(*flash.file, nullptr);
    }
    if (token % 5 != 0) continue;
    // Rows of a dense pass in blocks of any length, some left out: what did not come whole is not there.
    for (Layer* layer : layers) {
      layer->layer.set_predictor(std::make_unique<Told>(&units));
      layer->layer.begin_fill(flash.x.data(), 1);
      for (std::int32_t first = 0; first < kNeurons;) {
        const auto count =
            std::min<std::int32_t>(kNeurons - first, static_cast<std::int32_t>(1 + random() % 13));
        if (random() % 4 != 0)
          layer->layer.fill_from(reinterpret_cast<const std::byte*>(flash.contents.data()) + kOffset +
                                     static_cast<std::size_t>(first) * kStride,
                                 first, count);
        first += count;
      }
      layer->layer.abandon_fill();
    }
  }
  for (const Layer* layer : layers) {
    const FfnCounters& counters = layer->counters;
    CHECK(counters.hits + counters.misses == counters.active);
    CHECK(counters.bytes_read >= counters.misses * kStride);
    CHECK(counters.requests * kRows <= counters.misses + 3 * kRows * static_cast<std::uint64_t>(tokens));
  }
  CHECK(few.counters.hits > 0 && all.counters.hits > few.counters.hits && none.counters.hits == 0);
  CHECK(none.layer.capacity() == 0);
  for (const std::int32_t neuron : all.layer.cached()) CHECK(neuron >= 0 && neuron < kNeurons);
  for (const auto& [rows, checksum_rows] :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 1}, {6, 4}, {1, 2}, {6, 0}}) {
    CHECK(is_refused(
        [&] { const Layer layer(flash, flash.units(rows, checksum_rows, 2, 0, "window"), 1, 1); }));
  }
}

void await_load(Layer& layer) {
  while (layer.layer.is_loading()) std::this_thread::yield();
}

// Behind tokens the cache takes what they did not want: each unit is read once and no bit changes, wherever
// that is broken off.
void loading_behind_tokens_changes_no_bit(const Flash& flash, int rounds) {
  std::mt19937 random(12);
  for (int round = 0; round < rounds; ++round) {
    Layer every_neuron(flash, kNeurons, 3, 1, 1), every_unit(flash, flash.units(6, 1, 7, 0, "window"), 1, 1);
    Layer scarce(flash, kNeurons - 1, 1, 1, 1, 5);
    Layer neurons(flash, kNeurons, 1, 2, 3, 5), units(flash, flash.units(6, 1, 7, 0, "frequency"), 2, 1);
    scarce.forward(flash, {1});
    CHECK(!scarce.layer.load() && !scarce.layer.is_loading() && scarce.layer.cached().size() == 1);
    for (Layer* each : {&neurons, &units}) {
      const std::int32_t capacity = each->layer.capacity();
      Layer& whole = each == &neurons ? every_neuron : every_unit;
      const auto forward = [&](unsigned rarity) {
        std::vector<std::int32_t> active;
        for (std::int32_t unit = 0; unit < each->layer.units().count(); ++unit)
          if (random() % rarity == 0) active.push_back(unit);
        CHECK(same_bits(each->forward(flash, active), whole.forward(flash, active)));
      };
      for (int token = 0; token < 5; ++token) {
        forward(6);
        each->layer.load();
        const unsigned next = random() % 4;
        if (next == 0) await_load(*each);
        if (next == 1) each->layer.end_load();
        if (next == 2) each->layer.abandon_fill();
        if (round % 4 != 3) continue;
        each->layer.set_capacity(capacity - 6);
        each->layer.set_capacity(capacity);
      }
      while (each->layer.load()) await_load(*each);
      CHECK(each->layer.cached().size() == kNeurons);
      const std::uint64_t misses = each->counters.misses;
      forward(1);
      CHECK(each->counters.misses == misses);
      const std::uint64_t read = each->counters.bytes_read + each->counters.behind_bytes;
      CHECK(round % 4 == 3 ? read >= kNeurons * kStride : read == kNeurons * kStride);
    }
  }
}

// A read that fails behind tokens fails none; who wants the unit meets the error.
void a_failed_load_is_met_by_who_wants_the_unit(Flash& flash) {
  Layer whole(flash, kNeurons, 3, 1, 1);
  const std::vector<float> first = whole.forward(flash, {1}), both = whole.forward(flash, {1, 2});
  for (const Fault::Kind kind : {Fault::Kind::error, Fault::Kind::flip}) {
    Layer layer(flash, kNeurons, 1, 2, 3, 5);
    layer.forward(flash, {1});
    inject(*flash.file, std::make_shared<FaultPlan>(Fault{kind, 0, 1000, EIO}));
    CHECK(layer.layer.load());
    await_load(layer);
    CHECK(same_bits(layer.forward(flash, {1}), first));
    CHECK(!layer.layer.load() && layer.layer.cached() == (std::vector<std::int32_t>{1}));
    try {
      layer.forward(flash, {1, 2});
      CHECK(false);
    } catch (const CoreError& error) {
      CHECK(error.kind() == (kind == Fault::Kind::error ? ErrorKind::io : ErrorKind::checksum));
    }
    inject(*flash.file, nullptr);
    CHECK(same_bits(layer.forward(flash, {1, 2}), both));
  }
}

// By a trace a neuron's value counts where the trace says so and nowhere else; the cache sees the active set.
void a_trace_decides_what_fires(const Flash& flash) {
  Layer layer(flash, 12, 3, 1, 1), right(flash, kNeurons, 3, 1, 1);
  const std::vector<std::uint64_t> active = {0b1111'0110, 0}, firing = {0b0101'0010, 0}, none = {0, 0};
  ActivityTrace trace;
  trace.token_words = 1;
  trace.tokens = 2;
  trace.units = {kNeurons, 1};
  trace.active = active.data();
  trace.firing = firing.data();
  follow(layer.layer, trace, trace);
  CHECK(layer.layer.predict(flash.x.data(), 0) == (std::vector<std::int32_t>{1, 2, 4, 5, 6, 7}));
  std::vector<float> y(kWidth), expected = right.forward(flash, {1, 4, 6});
  const auto forward = [&](std::size_t token) {
    const std::vector<std::int32_t>& named = layer.layer.predict(flash.x.data(), token);
    layer.layer.begin({flash.x.data(), &named, 1, token, 0, true});
    layer.layer.finish(y.data());
  };
  forward(0);
  CHECK(layer.counters.misses == 6);
  // Neurons that fire by the trace and not by their weights add a thousandth of their down column.
  for (std::size_t j = 0; j < kWidth; ++j) CHECK(std::abs(y[j] - expected[j]) < 0.02F);
  forward(1);
  CHECK(same_bits(y, std::vector<float>(kWidth, 0.0F)));
  CHECK(is_refused([&] { layer.layer.predict(flash.x.data(), 2); }));
}

// By the formula, in doubles, over all neurons of the layer: those that are not active are zeros.
void a_norm_lies_before_the_down_columns(const Flash& flash) {
  Layer layer(flash, 7, 2, 2, 2);
  const std::vector<std::int32_t> active = {0, 3, 4, 8, 11, 12, 13, 20, 21, 30, 39};
  const std::vector<float> y = layer.forward(flash, active);
  std::vector<double> values, expected(kWidth, 0.0);
  std::vector<const float*> rows;
  double squares = 0.0, largest = 0.0;
  for (const std::int32_t neuron : active) {
    rows.push_back(flash.contents.data() + (kOffset + static_cast<std::size_t>(neuron) * kStride) / 4);
    double value = 0.0;
    for (std::size_t j = 0; j < kWidth; ++j) value += static_cast<double>(rows.back()[j]) * flash.x[j];
    values.push_back(std::max(value, 0.0));
    squares += values.back() * values.back();
  }
  for (std::size_t i = 0; i < active.size(); ++i) {
    values[i] *= flash.weights[static_cast<std::size_t>(active[i])] / std::sqrt(squares / kNeurons + 1e-5);
    largest = std::max(largest, values[i]);
  }
  for (std::size_t i = 0; i < active.size(); ++i) {
    if (flash.norm.rounds) values[i] = std::nearbyint(values[i] * 127.0 / largest) * largest / 127.0;
    for (std::size_t j = 0; j < kWidth; ++j) expected[j] += values[i] * rows[i][kWidth + j];
  }
  for (std::size_t j = 0; j < kWidth; ++j) CHECK(std::fabs(y[j] - expected[j]) < 1e-4);
  CHECK(layer.counters.parts == 4);  // two, twice
}

void failures_leave_a_right_cache(Flash& flash, int tokens, std::int32_t bypass) {
  Layer right(flash, kNeurons, 3, 1, 1), faulty(flash, 12, 3, 2, 3, bypass);
  std::mt19937 random(3);
  int failed = 0;
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = right.forward(flash, active);
    Fault fault;
    fault.kind = token % 2 == 0 ? Fault::Kind::error : Fault::Kind::flip;
    fault.first = random() % 4;
    fault.count = 50;
    fault.argument = token % 2 == 0 ? EIO : random() % 4096;
    inject(*flash.file, std::make_shared<FaultPlan>(fault));
    try {
      const std::vector<float> y = faulty.forward(flash, active);
      CHECK(same_bits(y, expected));
    } catch (const CoreError& error) {
      ++failed;
      CHECK(error.kind() == (token % 2 == 0 ? ErrorKind::io : ErrorKind::checksum));
      CHECK(std::string(error.what()).find("layer 5, neuron ") == 0);
    }
    inject(*flash.file, nullptr);
    const std::vector<float> y = faulty.forward(flash, active);
    CHECK(same_bits(y, expected));
  }
  CHECK(failed > tokens / 4);
}

}  // namespace

void test_ffn_layer(const std::string& directory, int scale) {
  ffn_tests::Flash flash(directory + "/ffn.bin");
  bits_depend_on_the_active_set_alone(flash, 60 * scale);
  tokens_together_are_tokens_alone(flash, 60 * scale);
  the_window_ends_with_the_last_accepted_token(flash);
  the_unlikely_leave_first(flash);
  a_trace_decides_what_fires(flash);
  units_are_runs_of_neurons(flash, 60 * scale);
  loading_behind_tokens_changes_no_bit(flash, 20 * scale);
  a_failed_load_is_met_by_who_wants_the_unit(flash);
  prefetching_experts_changes_no_bit(flash, 80 * scale);
  prefetching_for_several_changes_no_bit(flash, 40 * scale);
  for (const std::int32_t bypass : {0, 6}) {
    prefetching_changes_no_bit(flash, 80 * scale, bypass);
    capacity_changes_no_bit(flash, 60 * scale, bypass);
    failures_leave_a_right_cache(flash, 60 * scale, bypass);
  }
  for (const bool rounds : {false, true}) {
    flash.put_norm(rounds);
    a_norm_lies_before_the_down_columns(flash);
    bits_depend_on_the_active_set_alone(flash, 30 * scale);
    tokens_together_are_tokens_alone(flash, 30 * scale);
    for (const std::int32_t bypass : {0, 6}) {
      prefetching_changes_no_bit(flash, 40 * scale, bypass);
      failures_leave_a_right_cache(flash, 40 * scale, bypass);
    }
  }
}
