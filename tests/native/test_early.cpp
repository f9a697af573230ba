// Early reads: what is wanted is there, what is not is dropped or ignored; and the switch that judges them.
#include "model/early_reads.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>

#include "check.h"
#include "model/early_switch.h"
#include "io/error.h"
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
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
    CHECK(fsync(fd) == 0);
    close(fd);
    file = std::make_unique<DirectFile>(path, true);
  }
  const unsigned char* row(std::int32_t neuron) const {
    return bytes.data() + kOffset + static_cast<std::size_t>(neuron) * kStride;
  }
  RowSource source() const { return {kOffset, kStride, sums.data()}; }

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
  EarlyReads early(memory.data(), kCapacity, kStride, kNeurons, reader, *rows.file);
  std::mt19937 random(static_cast<unsigned>(threads));
  GuessLimit limit(kCapacity);
  for (int i = 0; i < 200 * scale; ++i) {
    limit = GuessLimit(kCapacity);  // it must not learn how rarely such guesses come true
    const std::vector<std::int32_t> guess = some(random, random() % (kCapacity + 20));
    std::vector<std::int32_t> active = some(random, random() % kNeurons);
    std::sort(active.begin(), active.end());
    early.start(5, guess, rows.source(), limit);
    if (i % 7 == 0) continue;  // the next start forgets it
    CHECK(early.layer() == 5);
    std::vector<bool> asked;
    for (const std::int32_t neuron : guess) asked.push_back(early.asked_for(neuron));
    CHECK(static_cast<std::size_t>(std::count(asked.begin(), asked.end(), true)) ==
          std::min<std::size_t>(guess.size(), kCapacity));
    CHECK(guess.empty() || guess.size() > kCapacity || asked[0]);
    early.keep(active);
    early.finish();
    for (std::size_t g = 0; g < guess.size(); ++g) {
      const bool wanted = std::binary_search(active.begin(), active.end(), guess[g]);
      CHECK(early.asked_for(guess[g]) == (wanted && asked[g]));
      if (wanted && asked[g]) CHECK(std::memcmp(early.row(guess[g]), rows.row(guess[g]), kStride) == 0);
    }
    if (i % 3 == 0) early.abandon();
    CHECK(early.layer() == (i % 3 == 0 ? -1 : 5));
    const ReadStats stats = early.take_stats();
    CHECK(stats.jobs <= 2 * kCapacity && stats.bytes >= stats.jobs * kStride && early.take_stats().jobs == 0);
  }
}

// The likeliest first, but what lies beside it comes with it and before others: one request reads both.
void test_neighbours(const Rows& rows) {
  Reader reader(ReaderOptions{});
  HugeBuffer memory(std::size_t{5} * kStride);
  EarlyReads early(memory.data(), 5, kStride, kNeurons, reader, *rows.file);
  GuessLimit limit(5);
  early.start(5, {20, 40, 60, 19, 21, 41}, rows.source(), limit);
  for (const std::int32_t neuron : {19, 20, 21, 40, 41}) CHECK(early.asked_for(neuron));
  CHECK(!early.asked_for(60));
  std::vector<std::int32_t> row_of(kNeurons);
  for (std::int32_t n = 0; n < kNeurons; ++n) row_of[static_cast<std::size_t>(n)] = kNeurons - 1 - n;
  std::swap(row_of[40], row_of[19]);
  early.start(5, {20, 19, 60, 50, 40, 30}, {kOffset, kStride, nullptr, row_of.data()}, limit);
  for (const std::int32_t neuron : {20, 40, 19, 60, 50}) CHECK(early.asked_for(neuron));
  early.keep({20, 40});
  early.finish();
  CHECK(std::memcmp(early.row(40), rows.row(row_of[40]), kStride) == 0);
}

// An unreadable row ends a token that wants it, and no other.
void test_errors(Rows& rows) {
  rows.sums[7] ^= 1;
  Reader reader(ReaderOptions{});
  HugeBuffer memory(static_cast<std::size_t>(kCapacity) * kStride);
  EarlyReads early(memory.data(), kCapacity, kStride, kNeurons, reader, *rows.file);
  GuessLimit limit(kCapacity);
  early.start(5, {5, 7, 9}, rows.source(), limit);
  early.keep({5, 20});
  early.finish();
  CHECK(std::memcmp(early.row(5), rows.row(5), kStride) == 0);
  early.start(5, {5, 7, 9}, rows.source(), limit);
  early.keep({7});
  bool thrown = false;
  try {
    early.finish();
  } catch (const CoreError& error) {
    thrown = error.kind() == ErrorKind::checksum;
  }
  CHECK(thrown);
  early.start(5, {9}, rows.source(), limit);
  early.keep({9});
  early.finish();
  CHECK(std::memcmp(early.row(9), rows.row(9), kStride) == 0);
  rows.sums[7] ^= 1;
}

// Lists are cut where fewer than half of the guesses come true, and no sooner than that is known.
void test_limit() {
  constexpr std::size_t kMost = 100;
  GuessLimit limit(kMost);
  CHECK(limit.worth_reading() >= kMost);
  const auto judge = [&limit](std::size_t come_true, int lists) {
    for (int i = 0; i < lists; ++i) limit.judge(200, [=](std::size_t place) { return place < come_true; });
  };
  judge(50, 1);
  CHECK(limit.worth_reading() == 3 * GuessLimit::kPlaces);  // of the fourth class two of sixteen came true
  judge(200, 60);
  CHECK(limit.worth_reading() >= kMost);
  judge(0, 200);
  CHECK(limit.worth_reading() == 0);
  judge(58, 200);  // of what is not read it learns all the same
  CHECK(limit.worth_reading() == 4 * GuessLimit::kPlaces);
  GuessLimit good(kMost), bad(kMost);  // of short lists
  for (int i = 0; i < 100; ++i) {
    good.judge(20, [](std::size_t place) { return place % 4 != 0; });
    bad.judge(20, [](std::size_t place) { return place % 4 == 0; });
  }
  CHECK(good.worth_reading() >= kMost && bad.worth_reading() == 0);
}

// Counts the tokens read ahead for, out of `tokens`, where a token takes `on` or `off` seconds.
int run_switch(EarlySwitch& early, int tokens, double on, double off) {
  int count = 0;
  double last = 0;
  for (int t = 0; t < tokens; ++t) {
    const bool reads = early.next(last);
    last = reads ? on : off;
    count += reads ? 1 : 0;
  }
  return count;
}

void test_switch() {
  EarlySwitch pays;
  CHECK(run_switch(pays, 1000, 0.2, 0.3) > 930);
  CHECK(pays.winner());
  EarlySwitch hurts;
  CHECK(run_switch(hurts, 1000, 0.3, 0.2) < 70);
  CHECK(!hurts.winner());
  CHECK(run_switch(hurts, 1000, 0.1, 0.2) > 500);  // the machine changed, and it notices
  EarlySwitch unlucky;                             // a bad moment while it was tried
  run_switch(unlucky, 12, 0.9, 0.3);
  CHECK(run_switch(unlucky, 10, 0.2, 0.3) <= 1);   // it was decided against
  CHECK(run_switch(unlucky, 100, 0.2, 0.3) > 80);  // and soon looked at again
  EarlySwitch equal;
  CHECK(run_switch(equal, 1000, 0.2, 0.2) > 930);
}

}  // namespace

void test_early(const std::string& directory, int scale) {
  Rows rows(directory + "/early");
  for (const int threads : {1, 4, 32}) test_reads(rows, threads, scale);
  test_neighbours(rows);
  test_errors(rows);
  test_limit();
  test_switch();
}
