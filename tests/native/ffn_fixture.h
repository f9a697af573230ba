// A layer's neurons in a file of random numbers, and FFN layers over it, for the tests of the layer and of
// the decoder.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fault.h"
#include "ffn/ffn_layer.h"
#include "fixture.h"
#include "io/memory.h"
#include "io/xxh3.h"

namespace ffn_tests {

using namespace flashllm;

constexpr std::int32_t kNeurons = 40;
constexpr std::uint32_t kWidth = 64;
constexpr std::uint32_t kStride = 512;  // up and down of 64 floats, exactly
constexpr std::uint64_t kOffset = 4096;

struct Flash {
  explicit Flash(const std::string& path) {
    std::mt19937 random(11);
    const std::vector<float> rows = random_floats(kOffset / 4 + kNeurons * kStride / 4, random);
    for (std::int32_t n = 0; n < kNeurons; ++n)
      sums.push_back(xxh3_64(rows.data() + kOffset / 4 + static_cast<std::size_t>(n) * kStride / 4, kStride));
    for (std::int32_t n = 0; n < kNeurons; n += 2)
      sums_of_two.push_back(
          xxh3_64(rows.data() + kOffset / 4 + static_cast<std::size_t>(n) * kStride / 4, 2 * kStride));
    write_file(path, rows.data(), 4 * rows.size());
    file = std::make_unique<DirectFile>(path, true);
    contents = rows;
    x = random_floats(kWidth, random);
  }
  FfnLayerOptions options(std::int32_t capacity, std::int32_t window) const {
    FfnLayerOptions result;
    result.format.stride = kStride;
    result.format.d_model = kWidth;
    result.format.down = 4 * kWidth;
    result.layer = 5;
    result.num_neurons = kNeurons;
    result.capacity = capacity;
    result.window = window;
    result.rows.file_offset = kOffset;
    result.rows.checksums = sums.data();
    result.simd = best_simd_level();
    result.neuron_norm = norm;
    return result;
  }
  // Units of `rows` neurons, of which `checksum_rows`, one or two, share a checksum.
  FfnLayerOptions units(std::int32_t rows, std::int32_t checksum_rows, std::int32_t capacity,
                        std::int32_t bypass, const std::string& policy) const {
    FfnLayerOptions result = options(capacity, 2);
    result.unit_rows = rows;
    result.rows.checksum_rows = checksum_rows;
    result.rows.checksums = checksum_rows == 1 ? sums.data() : sums_of_two.data();
    result.bypass_capacity = bypass;
    result.cache_policy = policy;
    return result;
  }
  // From now on layers have a norm before their down columns.
  void put_norm(bool rounds) {
    weights.resize(kNeurons);
    for (std::size_t n = 0; n < kNeurons; ++n) weights[n] = 0.5F + 0.03F * static_cast<float>(n);
    norm = {weights.data(), kNeurons, 1e-5F, rounds};
  }

  std::unique_ptr<DirectFile> file;
  std::vector<std::uint64_t> sums, sums_of_two;
  std::vector<float> contents, x, weights;  // of the file; inputs; of the norm
  NeuronNorm norm;
};

// A layer with all it refers to.
struct Layer {
  Layer(const Flash& flash, std::int32_t capacity, std::int32_t window, int threads, int io_threads,
        std::int32_t bypass = 0)
      : Layer(flash, options(flash, capacity, window, bypass), threads, io_threads) {}
  Layer(const Flash& flash, const FfnLayerOptions& options, int threads, int io_threads)
      : pool(threads),
        reader(reader_options(io_threads)),
        memory(nbytes(options, std::max(1, options.capacity))),
        bypass_memory(nbytes(options, std::max(1, options.bypass_capacity))),
        layer(options, reader, *flash.file, pool, memory.data(), bypass_memory.data(), counters) {}
  // With bypass rows by frequency, without by the window.
  static FfnLayerOptions options(const Flash& flash, std::int32_t capacity, std::int32_t window,
                                 std::int32_t bypass) {
    FfnLayerOptions result = flash.options(capacity, window);
    if (bypass > 0) result.cache_policy = "frequency";
    result.bypass_capacity = bypass;
    return result;
  }
  static std::size_t nbytes(const FfnLayerOptions& options, std::int32_t units) {
    return static_cast<std::size_t>(units * options.unit_rows) * kStride;
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

}  // namespace ffn_tests
