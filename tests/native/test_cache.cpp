// The slot table: random sequences against sets. (Policies against their definitions: tests/cache.)
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "cache/frequency_policy.h"
#include "cache/neuron_cache.h"
#include "cache/slot_table.h"
#include "fixture.h"

namespace {

using namespace flashllm;
using Ids = std::vector<std::int32_t>;

// What lies in each row if every move and every arrival is carried out, as bytes would be.
struct Rows {
  std::map<std::int32_t, std::int32_t> content;

  void exchange(SlotTable& table, const Ids& leaving, const Ids& coming) {
    std::vector<SlotTable::Move> moves;
    table.exchange(leaving, coming, moves);
    // Those that come take the rows of those that leave; others move only into the holes that are left.
    CHECK(moves.size() <= leaving.size() - std::min(leaving.size(), coming.size()));
    for (const SlotTable::Move& move : moves) {
      CHECK(std::find(coming.begin(), coming.end(), content[move.from]) == coming.end());
      content[move.to] = content[move.from];
    }
    for (const std::int32_t neuron : coming) content[table.slot_of(neuron)] = neuron;
  }

  void check(const SlotTable& table, const std::set<std::int32_t>& expected) {
    CHECK(static_cast<std::size_t>(table.num_used()) == expected.size());
    for (std::int32_t slot = 0; slot < table.num_used(); ++slot) {
      const std::int32_t neuron = table.pointers()[slot];
      CHECK(expected.count(neuron) == 1 && table.slot_of(neuron) == slot && content[slot] == neuron);
    }
    for (std::int32_t neuron = 0; neuron < table.num_units(); ++neuron)
      CHECK(table.contains(neuron) == (expected.count(neuron) == 1));
  }
};

Ids every_unit(std::int32_t units) {
  Ids ids(static_cast<std::size_t>(units));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

Ids random_ids(std::mt19937& random, std::int32_t neurons) {
  Ids ids;
  const unsigned rarity = 1 + random() % 8;
  for (std::int32_t neuron = 0; neuron < neurons; ++neuron)
    if (random() % rarity == 0) ids.push_back(neuron);
  return ids;
}

Ids missing(const SlotTable& table, const Ids& wanted) {
  Ids misses;
  for (const std::int32_t neuron : wanted)
    if (!table.contains(neuron)) misses.push_back(neuron);
  return misses;
}

void slot_table_follows_a_set(std::mt19937& random) {
  const std::int32_t neurons = 1 + static_cast<std::int32_t>(random() % 40);
  SlotTable table(neurons, 1 + static_cast<std::int32_t>(random() % 45));
  CHECK(table.capacity() <= neurons);
  Rows rows;
  std::set<std::int32_t> cached;
  for (int step = 0; step < 60; ++step) {
    Ids leaving, coming;
    for (const std::int32_t neuron : cached)
      if (random() % 3 == 0) leaving.push_back(neuron);
    std::shuffle(leaving.begin(), leaving.end(), random);
    for (std::int32_t neuron = 0; neuron < neurons; ++neuron)
      if (cached.count(neuron) == 0 && random() % 4 == 0) coming.push_back(neuron);
    const std::size_t room = static_cast<std::size_t>(table.capacity()) - cached.size() + leaving.size();
    if (coming.size() > room) coming.resize(room);
    rows.exchange(table, leaving, coming);
    for (const std::int32_t neuron : leaving) cached.erase(neuron);
    cached.insert(coming.begin(), coming.end());
    rows.check(table, cached);
  }
}

void slot_table_refuses_what_does_not_fit() {
  SlotTable table(8, 2);
  std::vector<SlotTable::Move> moves;
  table.exchange({}, {1, 2}, moves);
  CHECK(is_refused([&] { table.exchange({}, {3}, moves); }) && table.num_used() == 2 && table.contains(1) &&
        !table.contains(3));
}

void bypass_rows_come_after_the_cache() {
  SlotTable table(8, 2, 3);
  std::vector<SlotTable::Move> moves;
  table.exchange({}, {5}, moves);
  table.bypass({1, 7});
  CHECK(table.slot_of(5) == 0 && table.slot_of(1) == 2 && table.slot_of(7) == 3 && table.num_used() == 1);
  table.bypass({0});
  CHECK(is_refused([&] { table.bypass({6}); }) && table.slot_of(0) == 4 && !table.contains(6));
  table.end_bypass();
  CHECK(table.contains(5) && !table.contains(0) && !table.contains(1) && !table.contains(7));
}

// Of two neurons one is active in every token, the other in every third: a cache of one row keeps the first.
void a_rare_neuron_does_not_displace_a_frequent_one() {
  SlotTable table(3, 1, 2);
  FrequencyPolicy policy(3, nullptr);
  std::vector<SlotTable::Move> moves;
  int reads = 0;
  for (int token = 0; token < 5000; ++token) {  // long enough for the counts to be scaled down
    const Ids active = token % 3 == 0 ? Ids{0, 2} : Ids{2};
    policy.observe(active);
    const Ids misses = missing(table, active);
    reads += static_cast<int>(misses.size());
    CacheChoice choice;
    policy.choose(table, {active.data(), active.data() + active.size(), misses}, choice);
    table.exchange(choice.leaving, choice.coming, moves);
  }
  CHECK(table.contains(2) && reads < 1680);
  Ids likely{0, 1, 2};
  policy.sort_by_likelihood(likely);
  CHECK((likely == Ids{2, 0, 1}));
}

// Counts are floats: a server's tokens are more than these can count one by one.
void a_long_run_goes_on_counting() {
  constexpr int kTokens = 1 << 25;
  FrequencyPolicy policy(2, nullptr);
  const Ids both{0, 1}, one{1}, none;
  for (int token = 0; token < kTokens; ++token) policy.observe(token % 2 == 0 ? both : one);
  for (int token = 0; token < 2000; ++token) policy.observe(none);  // what was recent is forgotten
  Ids likely{0, 1};
  policy.sort_by_likelihood(likely);
  CHECK((likely == Ids{1, 0}));
}

// A prompt's rows pass by: what is cached can be used until its own turn, what is kept of the rest has its
// bytes, and where they stop coming nothing is there that did not come.
void what_passes_by_is_kept(std::mt19937& random, const char* policy) {
  constexpr std::uint32_t kRowNbytes = 8;
  const auto size = static_cast<std::int32_t>(1 + random() % 3);
  const std::int32_t units = 1 + static_cast<std::int32_t>(random() % 30);
  const RowUnits of{units * size - static_cast<std::int32_t>(random() % 2) * (size - 1), size};
  NeuronCacheOptions options{of,     1 + static_cast<std::int32_t>(random() % 20), 2, kRowNbytes, policy, 3,
                             nullptr};
  std::vector<std::uint64_t> flash(static_cast<std::size_t>(of.num_rows));
  std::iota(flash.begin(), flash.end(), 1000);
  std::vector<std::uint64_t> memory(22 * 3), aside(2 * 3);
  NeuronCache cache(options, reinterpret_cast<std::byte*>(memory.data()),
                    reinterpret_cast<std::byte*>(aside.data()));
  ThreadPool pool(1);
  const auto check = [&](std::int32_t unit) {
    const auto* rows = reinterpret_cast<const std::uint64_t*>(cache.rows(unit));
    for (std::int32_t row = 0; row < of.rows(unit); ++row)
      CHECK(rows[row] == flash[static_cast<std::size_t>(of.first(unit) + row)]);
  };
  for (int prompt = 0; prompt < 12; ++prompt) {
    for (int token = 0; token < 4; ++token) cache.observe(random_ids(random, units));
    const Ids some = random_ids(random, units), passing = prompt % 3 == 0 ? every_unit(units) : some;
    cache.begin_fill(prompt % 6 == 0 ? nullptr : &passing);
    std::set<std::int32_t> held;
    for (const std::int32_t unit : passing)
      if (cache.contains(unit) && !cache.awaits(unit)) held.insert(unit);
    const std::size_t stop = random() % 3 == 0 ? random() % (passing.size() + 1) : passing.size();
    for (std::size_t i = 0; i < stop; ++i) {
      const std::int32_t unit = passing[i], end = of.first(unit) + of.rows(unit);
      if (prompt % 6 != 0 && held.count(unit) == 1) check(unit);
      for (std::int32_t row = of.first(unit), count = 0; row < end; row += count) {
        count = std::min(end - row, 1 + static_cast<std::int32_t>(random() % 3));
        cache.fill_from(reinterpret_cast<const std::byte*>(&flash[static_cast<std::size_t>(row)]), row, count,
                        pool);
      }
      if (cache.contains(unit)) check(unit);
    }
    cache.abandon_fill();
    std::size_t kept = 0;
    for (std::int32_t unit = 0; unit < units; ++unit)
      if (cache.contains(unit)) check(unit), ++kept;
    CHECK(kept == static_cast<std::size_t>(cache.slots().num_used()));
    // Room is for what passed by, however rarely it was active.
    if (std::string(policy) == "frequency" && stop == static_cast<std::size_t>(units) && prompt % 3 == 0)
      CHECK(kept == static_cast<std::size_t>(std::min(units, options.capacity)));
  }
}

}  // namespace

void test_cache(int scale) {
  slot_table_refuses_what_does_not_fit();
  bypass_rows_come_after_the_cache();
  a_rare_neuron_does_not_displace_a_frequent_one();
  a_long_run_goes_on_counting();
  for (int seed = 0; seed < 40 * scale; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    slot_table_follows_a_set(random);
    what_passes_by_is_kept(random, "frequency");
    what_passes_by_is_kept(random, "window");
  }
}
