#include "kernels/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

namespace {

constexpr std::size_t kGrain = (std::size_t{1} << 20) / sizeof(float);

}  // namespace

std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t nbytes, double seconds, SimdLevel level) {
  const std::size_t n = nbytes / sizeof(float);
  if (n == 0) throw CoreError(ErrorKind::usage, "no bytes to read");
  const SumFloats sum = sum_floats_kernel(level);
  const HugeBuffer buffer(n * sizeof(float));
  auto* values = reinterpret_cast<float*>(buffer.data());
  // Untouched pages would all be one page of zeros.
  pool.parallel_for(
      n, kGrain, [&](std::size_t begin, std::size_t end) { std::fill(values + begin, values + end, 1.0F); });
  std::vector<double> rates;
  std::atomic<float> sink{0.0F};  // what is summed must be used
  for (double spent = 0.0; rates.empty() || spent < seconds;) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(n, kGrain, [&](std::size_t begin, std::size_t end) {
      sink.store(sum(values + begin, end - begin), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> pass = std::chrono::steady_clock::now() - start;
    spent += pass.count();
    rates.push_back(static_cast<double>(n * sizeof(float)) / pass.count());
  }
  return rates;
}

}  // namespace flashllm
