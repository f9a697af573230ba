// Slot table and window policy: random sequences against sets, whatever rows they use.
#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "check.h"
#include "error.h"
#include "slot_table.h"
#include "window_policy.h"

namespace {

using flashllm::SlotTable;
using flashllm::WindowPolicy;
using Ids = std::vector<std::int32_t>;

// What lies in each row if every move and every arrival is carried out, as bytes would be.
struct Rows {
  std::map<std::int32_t, std::int32_t> content;

  void exchange(SlotTable& table, const Ids& leaving, const Ids& coming) {
    std::vector<SlotTable::Move> moves;
    table.exchange(leaving, coming, moves);
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
    for (std::int32_t neuron = 0; neuron < table.num_neurons(); ++neuron)
      CHECK(table.contains(neuron) == (expected.count(neuron) == 1));
  }
};

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
  bool refused = false;
  try {
    table.exchange({}, {3}, moves);
  } catch (const flashllm::CoreError&) {
    refused = true;
  }
  CHECK(refused && table.num_used() == 2 && table.contains(1) && !table.contains(3));
}

// The window policy with a plain statement of it: keep the union of the newest token sets that fits.
void window_policy_follows_its_definition(std::mt19937& random) {
  const std::int32_t neurons = 1 + static_cast<std::int32_t>(random() % 30);
  const std::int32_t window = 1 + static_cast<std::int32_t>(random() % 5);
  SlotTable table(neurons, 1 + static_cast<std::int32_t>(random() % 30));
  WindowPolicy policy(neurons, window);
  Rows rows;
  std::set<std::int32_t> cached;
  std::deque<std::set<std::int32_t>> recent;  // the newest token first
  for (int token = 0; token < 50; ++token) {
    Ids active;
    const unsigned rarity = 1 + random() % 8;
    for (std::int32_t neuron = 0; neuron < neurons; ++neuron)
      if (random() % rarity == 0) active.push_back(neuron);
    policy.observe(active);
    recent.emplace_front(active.begin(), active.end());
    if (recent.size() > static_cast<std::size_t>(window)) recent.pop_back();

    const auto capacity = static_cast<std::size_t>(table.capacity());
    for (std::size_t begin = 0; begin < active.size(); begin += capacity) {
      const Ids part(active.begin() + static_cast<std::ptrdiff_t>(begin),
                     active.begin() + static_cast<std::ptrdiff_t>(std::min(begin + capacity, active.size())));
      Ids misses, leaving;
      for (const std::int32_t neuron : part)
        if (!table.contains(neuron)) misses.push_back(neuron);
      policy.choose_leaving(table, part.data(), part.data() + part.size(),
                            static_cast<std::int32_t>(misses.size()), leaving);
      for (const std::int32_t neuron : leaving) {
        CHECK(cached.erase(neuron) == 1);
        CHECK(!std::binary_search(part.begin(), part.end(), neuron));
      }
      rows.exchange(table, leaving, misses);
      cached.insert(misses.begin(), misses.end());
      rows.check(table, cached);
    }
    if (active.empty() || active.size() > capacity) {
      // An empty token chooses nothing; one above the capacity keeps only what its parts need.
      while (recent.size() > static_cast<std::size_t>(policy.current_window())) recent.pop_back();
      continue;
    }
    // The window shrank to the most tokens whose cached neurons and the newest's fit.
    CHECK(policy.current_window() >= 1 &&
          policy.current_window() <= static_cast<std::int32_t>(recent.size()));
    while (recent.size() > static_cast<std::size_t>(policy.current_window())) recent.pop_back();
    std::set<std::int32_t> wanted;
    for (const auto& set : recent) wanted.insert(set.begin(), set.end());
    for (const std::int32_t neuron : cached) CHECK(wanted.count(neuron) == 1);
    for (const std::int32_t neuron : active) CHECK(cached.count(neuron) == 1);
    Ids kept;
    policy.choose_kept(table.capacity(), kept);
    CHECK(kept.size() <= capacity && std::is_sorted(kept.begin(), kept.end()));
    for (const std::int32_t neuron : kept) CHECK(wanted.count(neuron) == 1);
    for (const std::int32_t neuron : active) CHECK(std::binary_search(kept.begin(), kept.end(), neuron));
  }
}

}  // namespace

void test_cache(int scale) {
  slot_table_refuses_what_does_not_fit();
  for (int seed = 0; seed < 40 * scale; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    slot_table_follows_a_set(random);
    window_policy_follows_its_definition(random);
  }
}
