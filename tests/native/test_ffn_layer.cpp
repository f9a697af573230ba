// The FFN layer: the same bits whatever is cached, and a cache that is right after failures of every kind.
#include "ffn_layer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "check.h"
#include "error.h"
#include "xxh3.h"

namespace {

using namespace flashllm;

constexpr std::int32_t kNeurons = 40;
constexpr std::uint32_t kWidth = 64;
constexpr std::uint32_t kStride = 512;  // up and down of 64 floats, exactly
constexpr std::uint64_t kOffset = 4096;

struct Flash {
  explicit Flash(const std::string& path) {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    std::vector<float> rows(kOffset / 4 + kNeurons * kStride / 4);
    for (float& value : rows) value = normal(random);
    for (std::int32_t n = 0; n < kNeurons; ++n)
      sums.push_back(xxh3_64(rows.data() + kOffset / 4 + static_cast<std::size_t>(n) * kStride / 4, kStride));
    file = written(path, rows);
    x.resize(kWidth);
    for (float& value : x) value = normal(random);
    // The same neurons in another order.
    row_of.resize(kNeurons);
    for (std::int32_t n = 0; n < kNeurons; ++n) row_of[static_cast<std::size_t>(n)] = n;
    std::shuffle(row_of.begin(), row_of.end(), random);
    std::vector<float> placed = rows;
    const auto row = [](std::vector<float>& all, std::int32_t r) {
      return all.data() + kOffset / 4 + static_cast<std::size_t>(r) * kStride / 4;
    };
    for (std::int32_t n = 0; n < kNeurons; ++n)
      std::memcpy(row(placed, row_of[static_cast<std::size_t>(n)]), row(rows, n), kStride);
    placed_file = written(path + ".placed", placed);
  }
  static std::unique_ptr<DirectFile> written(const std::string& path, const std::vector<float>& values) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, values.data(), 4 * values.size()) == static_cast<ssize_t>(4 * values.size()));
    CHECK(fsync(fd) == 0);
    close(fd);
    return std::make_unique<DirectFile>(path, true);
  }
  FfnLayerOptions options(std::int32_t capacity, std::int32_t window) const {
    FfnLayerOptions result;
    result.layout.stride = kStride;
    result.layout.d_model = kWidth;
    result.layout.down = kWidth;
    result.layer = 5;
    result.num_neurons = kNeurons;
    result.capacity = capacity;
    result.window = window;
    result.file_offset = kOffset;
    result.checksums = sums.data();
    result.simd = best_simd_level();
    return result;
  }

  std::unique_ptr<DirectFile> file, placed_file;
  std::vector<std::uint64_t> sums;
  std::vector<std::int32_t> row_of;  // in the placed file
  std::vector<float> x;
};

// A layer with all it refers to.
struct Layer {
  Layer(const Flash& flash, std::int32_t capacity, std::int32_t window, int threads, int io_threads,
        std::int32_t bypass = 0, bool placed = false)
      : pool(threads),
        reader(reader_options(io_threads)),
        memory(static_cast<std::size_t>(capacity) * kStride),
        bypass_memory(static_cast<std::size_t>(std::max(1, bypass)) * kStride),
        layer(options(flash, capacity, window, bypass, placed), reader,
              placed ? *flash.placed_file : *flash.file, pool, memory.data(), bypass_memory.data(),
              counters) {}
  // With bypass rows by frequency, without by the window.
  static FfnLayerOptions options(const Flash& flash, std::int32_t capacity, std::int32_t window,
                                 std::int32_t bypass, bool placed) {
    FfnLayerOptions result = flash.options(capacity, window);
    if (placed) result.row_of = flash.row_of.data();
    if (bypass > 0) result.cache_policy = "frequency";
    result.bypass_capacity = bypass;
    return result;
  }
  static ReaderOptions reader_options(int threads) {
    ReaderOptions result;
    result.threads = threads;
    return result;
  }
  std::vector<float> forward(const Flash& flash, const std::vector<std::int32_t>& active) {
    std::vector<float> y(kWidth);
    layer.forward(flash.x.data(), 0, active, y.data());
    return y;
  }

  ThreadPool pool;
  Reader reader;
  HugeBuffer memory, bypass_memory;
  FfnCounters counters;
  FfnLayer layer;
};

std::vector<std::int32_t> random_active(std::mt19937& random) {
  std::vector<std::int32_t> active;
  const unsigned rarity = 1 + random() % 6;
  for (std::int32_t n = 0; n < kNeurons; ++n)
    if (random() % rarity == 0) active.push_back(n);
  return active;
}

void bits_depend_on_the_active_set_alone(const Flash& flash, int tokens) {
  Layer whole(flash, kNeurons, 3, 1, 1), narrow(flash, 3, 2, 2, 4), middle(flash, 17, 5, 3, 2);
  Layer frequency(flash, 11, 1, 2, 3, 5), scarce(flash, 2, 1, 1, 2, 1);
  Layer placed(flash, 9, 2, 1, 3, 0, true);
  std::mt19937 random(2);
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = whole.forward(flash, active);
    for (Layer* layer : {&narrow, &middle, &frequency, &scarce, &placed}) {
      const std::vector<float> y = layer->forward(flash, active);
      CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
    }
  }
  for (const Layer* layer : {&whole, &narrow, &middle, &frequency, &scarce, &placed})
    CHECK(layer->counters.hits + layer->counters.misses == layer->counters.active);
  CHECK(narrow.counters.parts > static_cast<std::uint64_t>(tokens));
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
    flash.file->inject(std::make_shared<FaultPlan>(fault));
    try {
      const std::vector<float> y = faulty.forward(flash, active);
      CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
    } catch (const CoreError& error) {
      ++failed;
      CHECK(error.kind() == (token % 2 == 0 ? ErrorKind::io : ErrorKind::checksum));
      CHECK(std::string(error.what()).find("layer 5, neuron ") == 0);
    }
    flash.file->inject(nullptr);
    const std::vector<float> y = faulty.forward(flash, active);
    CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
  }
  CHECK(failed > tokens / 4);
}

}  // namespace

void test_ffn_layer(const std::string& directory, int scale) {
  Flash flash(directory + "/ffn.bin");
  bits_depend_on_the_active_set_alone(flash, 60 * scale);
  for (const std::int32_t bypass : {0, 6}) failures_leave_a_right_cache(flash, 60 * scale, bypass);
}
