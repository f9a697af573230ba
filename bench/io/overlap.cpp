// E1: what a token costs with its reads before its compute, and behind it.
//
//   overlap FILE ROUNDS   -> one JSON object a line: {"round", "backend", "size", "recall", "token_ms",
//   "cpu_ms"}
//
// The real reader, checksums on, against resident products: each of 32 layers multiplies 4 matrices of
// 4096 x 4096 in bf16 (the attention of the OPT-6.7B shape; the weights of 8 layers in turn, far beyond any
// cache) on two threads, then needs 6.3 MB of rows at random places of FILE. Of the next layer's rows, the
// share `recall` is prefetched where this layer's FFN begins; the rest is read on demand when their layer
// needs them. Prefetched rows that were not needed are not modelled: precision is 1. Recall 0 is the serial
// token; recall -1 the reads alone, -2 the products alone. All variants take turns in each round.
//
// FILE repeats a block of 64 MiB, so that the checksums of all its rows are known.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "io/memory.h"
#include "io/reader.h"
#include "io/xxh3.h"
#include "kernels/rows.h"

namespace {

using namespace flashllm;
using Clock = std::chrono::steady_clock;

constexpr int kLayers = 32;
constexpr int kWeightLayers = 8;
constexpr int kMatrices = 4;
constexpr std::size_t kModel = 4096;
constexpr std::size_t kRow = 16384;  // the bundle of a neuron: what carries a checksum
constexpr std::size_t kRowsNeeded = 393;
constexpr std::size_t kBlock = std::size_t{64} << 20;
constexpr double kReadsAlone = -1, kProductsAlone = -2;

double cpu_ms() {  // of this process, all threads
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto ms = [](const struct timeval& time) {
    return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_usec) / 1e3;
  };
  return ms(usage.ru_utime) + ms(usage.ru_stime);
}

struct Variant {
  const char* name;
  Reader* reader;
};

class Token {
 public:
  explicit Token(const DirectFile& file) : file_(file), pool_(2), weights_(kWeightLayers * kLayerNbytes) {
    // Weights: small numbers, never denormal.
    auto* words = reinterpret_cast<std::uint16_t*>(weights_.data());
    std::uint32_t state = 1;
    for (std::size_t i = 0; i < weights_.size() / 2; ++i) {
      state = state * 1664525U + 1013904223U;
      words[i] = static_cast<std::uint16_t>(0x3c00U | (state >> 24U));
    }
    // Checksums of the block that FILE repeats.
    const HugeBuffer block(kBlock);
    ReadBatch batch;
    ReadJob job;
    job.nbytes = kBlock;
    job.destination = block.data();
    batch.jobs.push_back(job);
    ReaderOptions options;
    options.threads = 4;
    Reader(options).read(batch, file);
    for (std::size_t r = 0; r < kBlock / kRow; ++r) sums_.push_back(xxh3_64(block.data() + r * kRow, kRow));
    x_.assign(kModel, 0.01F);
    y_.resize(kModel);
  }

  // Milliseconds of one token whose reads are of `size` bytes.
  double run(Reader& reader, std::size_t size, double recall, std::mt19937& random) {
    pool_.set_side_work(&reader);
    const bool reads = recall != kProductsAlone, products = recall != kReadsAlone;
    const std::size_t count = kRowsNeeded * kRow / size;
    const auto prefetched = static_cast<std::size_t>(std::max(recall, 0.0) * static_cast<double>(count));
    plan(size, count, random);
    ReadBatch demanded, prefetches[2];
    const Clock::time_point start = Clock::now();
    for (int layer = 0; layer < kLayers; ++layer) {
      if (products) multiply(layer);
      if (!reads) continue;
      ReadBatch& here = prefetches[layer % 2];
      ReadBatch& next = prefetches[(layer + 1) % 2];
      // What was not prefetched, then the next layer's prefetch; then nothing goes on without this one's.
      fill(demanded, layer, here.in_flight() ? prefetched : 0, count, size);
      reader.submit(demanded, file_);
      reader.start();
      if (here.in_flight()) reader.keep(here, [](const ReadJob&) { return true; });
      if (prefetched != 0 && layer + 1 < kLayers) {
        fill(next, layer + 1, 0, prefetched, size);
        reader.submit(next, file_, ReadPriority::prefetch);
        reader.start();
      }
      if (here.in_flight()) reader.wait(here);
      reader.wait(demanded);
    }
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

 private:
  static constexpr std::size_t kLayerNbytes = kMatrices * kModel * kModel * 2;

  void multiply(int layer) {
    for (int m = 0; m < kMatrices; ++m) {
      RowMatrix matrix;
      matrix.data = weights_.data() + static_cast<std::size_t>(layer % kWeightLayers) * kLayerNbytes +
                    static_cast<std::size_t>(m) * kModel * kModel * 2;
      matrix.rows = matrix.columns = kModel;
      matrix.stride = kModel * 2;
      matrix.codec = RowCodec::bf16;
      linear(matrix, x_.data(), 1, y_.data(), pool_, best_simd_level());
    }
  }

  // Distinct random places of the file, apart from each other, for every layer.
  void plan(std::size_t size, std::size_t count, std::mt19937& random) {
    const std::size_t places = file_.size() / size;
    std::uniform_int_distribution<std::size_t> any(0, places - 1);
    offsets_.assign(kLayers, {});
    for (auto& offsets : offsets_)
      for (std::size_t i = 0; i < count; ++i) offsets.push_back(any(random) * size);
  }

  void fill(ReadBatch& batch, int layer, std::size_t begin, std::size_t end, std::size_t size) {
    batch.jobs.clear();
    for (std::size_t i = begin; i < end; ++i) {
      ReadJob job;
      job.offset = offsets_[static_cast<std::size_t>(layer)][i];
      job.nbytes = size;
      job.destination = rows_.data() + (static_cast<std::size_t>(layer % 2) * kRowsNeeded * kRow) + i * size;
      job.row_nbytes = kRow;
      job.checksums = sums_.data() + job.offset % kBlock / kRow;
      batch.jobs.push_back(job);
    }
  }

  const DirectFile& file_;
  ThreadPool pool_;
  HugeBuffer weights_;
  HugeBuffer rows_{2 * kRowsNeeded * kRow};
  std::vector<std::uint64_t> sums_;
  std::vector<std::vector<std::uint64_t>> offsets_;
  std::vector<float> x_, y_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: overlap FILE ROUNDS\n");
    return 2;
  }
  try {
    const DirectFile file(argv[1], true);
    if (!file.direct()) std::fprintf(stderr, "NOT direct: %s\n", file.fallback_reason().c_str());
    std::vector<std::unique_ptr<Reader>> readers;
    std::vector<Variant> variants;
    const auto add = [&](const char* name, ReadBackendKind backend, int at_a_time) {
      ReaderOptions options;
      options.backend = backend;
      options.threads = options.queue_depth = at_a_time;
      readers.push_back(std::make_unique<Reader>(options));
      variants.push_back({name, readers.back().get()});
    };
    add("threads 32", ReadBackendKind::threads, 32);
    add("io_uring 64", ReadBackendKind::io_uring, 64);
    add("io_uring 32", ReadBackendKind::io_uring, 32);
    Token token(file);
    std::mt19937 random(std::random_device{}());
    const auto measure = [&](int round, const char* backend, Reader& reader, std::size_t size,
                             double recall) {
      const double cpu = cpu_ms(), ms = token.run(reader, size == 0 ? kRow : size, recall, random);
      std::printf(
          "{\"round\": %d, \"backend\": \"%s\", \"size\": %zu, \"recall\": %.1f, \"token_ms\": %.2f, "
          "\"cpu_ms\": %.2f}\n",
          round, backend, size, recall, ms, cpu_ms() - cpu);
      std::fflush(stdout);
    };
    for (int round = 0; round < std::atoi(argv[2]); ++round) {
      measure(round, "none", *readers[0], 0, kProductsAlone);
      for (const std::size_t size : {kRow, 2 * kRow, 4 * kRow})
        for (const double recall : {kReadsAlone, 0.0, 0.5, 0.7, 0.9})
          for (const Variant& variant : variants) measure(round, variant.name, *variant.reader, size, recall);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
