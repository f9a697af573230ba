// Prefetching: what is wanted is there, what is not is dropped or ignored, and lists are cut where they are
// wrong.
#include "ffn/prefetch.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "fault.h"
#include "fixture.h"
#include "io/memory.h"
#include "io/xxh3.h"

namespace {

using namespace flashllm;

constexpr std::int32_t kNeurons = 300;
constexpr std::uint32_t kStride = 512;
constexpr std::int32_t kCapacity = 64;
constexpr std::uint64_t kOffset = 4096;

struct Rows {
  explicit Rows(const std::string& path) : bytes(kOffset + kNeurons * kStride) {
    std::mt19937 random(3);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    for (std::int32_t n = 0; n < kNeurons; ++n) sums.push_back(xxh3_64(row(n), kStride));
    write_file(path, bytes.data(), bytes.size());
    file = std::make_unique<DirectFile>(path, true);
  }
  const unsigned char* row(std::int32_t neuron) const {
    return bytes.data() + kOffset + static_cast<std::size_t>(neuron) * kStride;
  }
  RowSource source() const { return {{kNeurons, 1}, kOffset, kStride, sums.data()}; }

  std::vector<unsigned char> bytes;
  std::vector<std::uint64_t> sums;
  std::unique_ptr<DirectFile> file;
};

std::vector<std::int32_t> some(std::mt19937& random, std::size_t count) {
  std::vector<std::int32_t> all(kNeurons);
  for (std::int32_t n = 0; n < kNeurons; ++n) all[static_cast<std::size_t>(n)] = n;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

void test_reads(const Rows& rows, int threads, int scale) {
  ReaderOptions options;
  options.threads = threads;
  Reader reader(options);
  HugeBuffer memory(static_cast<std::size_t>(kCapacity) * kStride);
  Prefetch prefetch(memory.data(), kCapacity, kStride, kNeurons, reader, *rows.file);
  std::mt19937 random(static_cast<unsigned>(threads));
  PrefetchDepth depth(kCapacity);
  for (int i = 0; i < 200 * scale; ++i) {
    depth = PrefetchDepth(kCapacity);  // it must not learn how rarely such listes come true
    const std::vector<std::int32_t> list = some(random, random() % (kCapacity + 20));
    std::vector<std::int32_t> active = some(random, random() % kNeurons);
    std::sort(active.begin(), active.end());
    prefetch.start(5, list, rows.source(), depth);
    if (i % 7 == 0) continue;  // the next start forgets it
    CHECK(prefetch.layer() == 5);
    std::vector<bool> chosen;
    for (const std::int32_t neuron : list) chosen.push_back(prefetch.has(neuron));
    CHECK(static_cast<std::size_t>(std::count(chosen.begin(), chosen.end(), true)) ==
          std::min<std::size_t>(list.size(), kCapacity));
    CHECK(list.empty() || list.size() > kCapacity || chosen[0]);
    prefetch.keep(active);
    prefetch.finish();
    for (std::size_t g = 0; g < list.size(); ++g) {
      const bool wanted = std::binary_search(active.begin(), active.end(), list[g]);
      CHECK(prefetch.has(list[g]) == (wanted && chosen[g]));
      if (wanted && chosen[g]) CHECK(std::memcmp(prefetch.rows(list[g]), rows.row(list[g]), kStride) == 0);
    }
    if (i % 3 == 0) prefetch.abandon();
    CHECK(prefetch.layer() == (i % 3 == 0 ? -1 : 5));
    const ReadStats stats = prefetch.take_stats();
    CHECK(stats.jobs <= 2 * kCapacity && stats.bytes >= stats.jobs * kStride &&
          prefetch.take_stats().jobs == 0);
  }
}

// The likeliest first, but what lies beside it comes with it and before others: one request reads both.
void test_neighbours(const Rows& rows) {
  Reader reader(ReaderOptions{});
  HugeBuffer memory(std::size_t{5} * kStride);
  Prefetch prefetch(memory.data(), 5, kStride, kNeurons, reader, *rows.file);
  PrefetchDepth depth(5);
  prefetch.start(5, {20, 40, 60, 19, 21, 41}, rows.source(), depth);
  for (const std::int32_t neuron : {19, 20, 21, 40, 41}) CHECK(prefetch.has(neuron));
  CHECK(!prefetch.has(60));
  prefetch.keep({20, 40});
  prefetch.finish();
  CHECK(std::memcmp(prefetch.rows(40), rows.row(40), kStride) == 0);
}

// Experts are read `together`, in the order of the list and only while nothing else is; what is wanted goes
// on beside what is under way.
void test_experts(const Rows& rows, std::uint64_t together) {
  constexpr std::int32_t kRows = 4;
  constexpr std::size_t kExpert = std::size_t{kRows} * kStride;
  const auto in_vain = [] { std::this_thread::sleep_for(std::chrono::milliseconds(30)); };
  ReaderOptions options;
  options.threads = 4;
  options.idle_nbytes = together * kExpert;
  for (const bool busy : {false, true}) {
    Reader reader(options);
    HugeBuffer memory(3 * kExpert), other(kStride);
    RowSource source = rows.source();
    source.units.size = kRows;
    Prefetch prefetch(memory.data(), 3, kExpert, kNeurons / kRows, reader, *rows.file);
    PrefetchDepth depth(3, 1);
    auto plan = std::make_shared<FaultPlan>(Fault{Fault::Kind::hold, 0, together, 0});
    inject(*rows.file, plan);
    ReadBatch demand;
    source.units.size = 1;
    source.add_rows(200, 1, other.data(), demand.jobs);
    source.units.size = kRows;
    if (busy) {
      reader.submit(demand, *rows.file);
      reader.start();
      plan->wait_until_held();
    }
    prefetch.start(5, {40, 7, 21}, source, depth);
    reader.start();
    plan->wait_until_held();
    while (!busy && plan->calls() < together) std::this_thread::yield();
    in_vain();
    CHECK(plan->calls() == (busy ? 1 : together));
    prefetch.keep({7});
    reader.start();
    while (plan->calls() < 2) std::this_thread::yield();
    in_vain();
    CHECK(plan->calls() == 2);
    plan->release();
    if (busy) reader.wait(demand);
    prefetch.finish();
    CHECK(prefetch.has(7) && !prefetch.has(40) && !prefetch.has(21));
    CHECK(std::memcmp(prefetch.rows(7), rows.row(7 * kRows), kExpert) == 0);
    const ReadStats stats = prefetch.take_stats();
    CHECK(stats.jobs == (busy ? 1 : 2) && stats.dropped == (busy ? 2 : 1));
    inject(*rows.file, nullptr);
  }
}

// An unreadable row ends a token that wants it, and no other.
void test_errors(Rows& rows) {
  rows.sums[7] ^= 1;
  Reader reader(ReaderOptions{});
  HugeBuffer memory(static_cast<std::size_t>(kCapacity) * kStride);
  Prefetch prefetch(memory.data(), kCapacity, kStride, kNeurons, reader, *rows.file);
  PrefetchDepth depth(kCapacity);
  prefetch.start(5, {5, 7, 9}, rows.source(), depth);
  prefetch.keep({5, 20});
  prefetch.finish();
  CHECK(std::memcmp(prefetch.rows(5), rows.row(5), kStride) == 0);
  prefetch.start(5, {5, 7, 9}, rows.source(), depth);
  prefetch.keep({7});
  bool thrown = false;
  try {
    prefetch.finish();
  } catch (const CoreError& error) {
    thrown = error.kind() == ErrorKind::checksum;
  }
  CHECK(thrown);
  prefetch.start(5, {9}, rows.source(), depth);
  prefetch.keep({9});
  prefetch.finish();
  CHECK(std::memcmp(prefetch.rows(9), rows.row(9), kStride) == 0);
  rows.sums[7] ^= 1;
}

// Lists are cut where fewer than half turn out active, and no sooner than that is known.
void test_depth() {
  constexpr std::size_t kMost = 100;
  PrefetchDepth depth(kMost);
  CHECK(depth.worth_reading() >= kMost);
  const auto judge = [&depth](std::size_t turn_active, int lists) {
    for (int i = 0; i < lists; ++i) depth.judge(200, [=](std::size_t place) { return place < turn_active; });
  };
  judge(50, 1);
  CHECK(depth.worth_reading() == 3 * PrefetchDepth::kPlaces);  // of the fourth class two of sixteen came true
  judge(200, 60);
  CHECK(depth.worth_reading() >= kMost);
  judge(0, 200);
  CHECK(depth.worth_reading() == 0);
  judge(58, 200);  // of what is not read it learns all the same
  CHECK(depth.worth_reading() == 4 * PrefetchDepth::kPlaces);
  PrefetchDepth good(kMost), bad(kMost);  // of short lists
  for (int i = 0; i < 100; ++i) {
    good.judge(20, [](std::size_t place) { return place % 4 != 0; });
    bad.judge(20, [](std::size_t place) { return place % 4 == 0; });
  }
  CHECK(good.worth_reading() >= kMost && bad.worth_reading() == 0);
}

}  // namespace

void test_prefetch(const std::string& directory, int scale) {
  Rows rows(directory + "/prefetch");
  for (const int threads : {1, 4, 32}) test_reads(rows, threads, scale);
  test_neighbours(rows);
  for (const std::uint64_t together : {std::uint64_t{1}, std::uint64_t{2}}) test_experts(rows, together);
  test_errors(rows);
  test_depth();
}
