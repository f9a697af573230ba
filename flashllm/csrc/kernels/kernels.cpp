#include "kernels/kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "io/error.h"
#include "io/memory.h"
#include "kernels/levels/levels.h"
#include "machine/processor.h"

namespace flashllm {

namespace scalar {
extern const LevelKernels kLevel;
}
#if defined(__x86_64__)
namespace avx2 {
extern const LevelKernels kLevel;
}
namespace avx2_vnni {
extern const LevelKernels kLevel;  // products of codes alone; empty where the compiler has none
}
namespace avx512 {
extern const LevelKernels kLevel;
}
namespace avx512_bf16 {
extern const PairKernels kPairs;
}
namespace avx512_amx {
bool permit();  // asks the system for tiles, for all threads of the process
extern const TileKernels kTiles;
}  // namespace avx512_amx
#elif defined(__aarch64__)
namespace neon {
extern const LevelKernels kLevel;
}
namespace neon_dot {
extern const LevelKernels kLevel;  // as avx2_vnni's
}
#endif

namespace {

constexpr std::size_t kSumGrain = (std::size_t{1} << 20) / sizeof(float);  // floats of a MiB

#if defined(__x86_64__)
bool has_avx_vnni() {
  static const bool has = this_processor().avx_vnni && avx2_vnni::kLevel.multiply_bytes != nullptr;
  return has;
}
#endif

}  // namespace

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  static const SimdLevel best = [] {
    const Processor processor = this_processor();
    if (processor.avx512_vnni)
      return !processor.avx512_bf16 ? SimdLevel::avx512
             : avx512_amx::permit() ? SimdLevel::avx512_amx
                                    : SimdLevel::avx512_bf16;
    if (has_avx_vnni()) return SimdLevel::avx2_vnni;
    if (processor.avx2) return SimdLevel::avx2;
    return SimdLevel::scalar;
  }();
  return best;
#elif defined(__aarch64__)
  static const bool has_dot = this_processor().dot && neon_dot::kLevel.multiply_bytes != nullptr;
  return has_dot ? SimdLevel::neon_dot : SimdLevel::neon;  // which is part of every one
#else
  return SimdLevel::scalar;
#endif
}

void require_simd_level(SimdLevel level) {
  bool is_there = level <= best_simd_level();
#if defined(__x86_64__)
  if (level == SimdLevel::neon || level == SimdLevel::neon_dot) is_there = false;
  if (level == SimdLevel::avx2_vnni && !has_avx_vnni()) is_there = false;
#endif
  require(is_there, "this processor lacks the SIMD level asked for");
}

namespace {

// A level's kernels, with products of codes of another.
LevelKernels with_products(LevelKernels kernels, const LevelKernels& own) {
  kernels.multiply_codes = own.multiply_codes;
  kernels.multiply_bytes = own.multiply_bytes;
  kernels.add_codes = own.add_codes;
  kernels.int8 = own.int8;
  kernels.int16 = own.int16;
  kernels.planes = own.planes;
  return kernels;
}

}  // namespace

const LevelKernels& level_kernels(SimdLevel level) {
  require_simd_level(level);
#if defined(__x86_64__)
  static const LevelKernels kWithVnni = with_products(avx2::kLevel, avx2_vnni::kLevel);
  static const LevelKernels kWithPairs = [] {
    LevelKernels kernels = avx512::kLevel;
    kernels.pairs = &avx512_bf16::kPairs;
    return kernels;
  }();
  static const LevelKernels kWithTiles = [] {
    LevelKernels kernels = kWithPairs;
    kernels.tiles = &avx512_amx::kTiles;
    return kernels;
  }();
  if (level == SimdLevel::avx512_amx) return kWithTiles;
  if (level == SimdLevel::avx512_bf16) return kWithPairs;
  if (level == SimdLevel::avx512) return avx512::kLevel;
  if (level == SimdLevel::avx2_vnni) return kWithVnni;
  if (level == SimdLevel::avx2) return avx2::kLevel;
#elif defined(__aarch64__)
  static const LevelKernels kWithDot = with_products(neon::kLevel, neon_dot::kLevel);
  if (level == SimdLevel::neon_dot) return kWithDot;
  if (level == SimdLevel::neon) return neon::kLevel;
#endif
  return scalar::kLevel;
}

const KernelTable& kernel_table(SimdLevel level, Dtype dtype) {
  return level_kernels(level).tables[static_cast<std::size_t>(dtype)];
}

std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t nbytes, double seconds, SimdLevel level) {
  const std::size_t n = nbytes / sizeof(float);
  require(n != 0, "no bytes to read");
  const SumFloats sum = level_kernels(level).sum_floats;
  const HugeBuffer buffer(n * sizeof(float));
  auto* values = reinterpret_cast<float*>(buffer.data());
  // Untouched pages would all be one page of zeros.
  pool.parallel_for(n, kSumGrain, [&](std::size_t begin, std::size_t end) {
    std::fill(values + begin, values + end, 1.0F);
  });
  std::vector<double> rates;
  std::atomic<float> sink{0.0F};  // what is summed must be used
  for (double spent = 0.0; rates.empty() || spent < seconds;) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(n, kSumGrain, [&](std::size_t begin, std::size_t end) {
      sink.store(sum(values + begin, end - begin), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> pass = std::chrono::steady_clock::now() - start;
    spent += pass.count();
    rates.push_back(static_cast<double>(n * sizeof(float)) / pass.count());
  }
  return rates;
}

namespace {

float relu(float value) { return value <= 0.0F ? 0.0F : value; }
float gelu(float value) { return 0.5F * value * (1.0F + std::erf(value * 0.70710678F)); }
// gpt-oss: gate and up are limited, and up is one more.
constexpr float kSwigluLimit = 7.0F;
float limited(float value) { return value > kSwigluLimit ? kSwigluLimit : value; }
float clamped_up(float value) { return (value < -kSwigluLimit ? -kSwigluLimit : limited(value)) + 1.0F; }

// values = value * sigmoid(of(value)), the value being before(values).
template <typename Before, typename Of>
void gate_by_sigmoid(const Before& before, const Of& of, float* values, std::size_t n, SimdLevel level) {
  constexpr std::size_t kTogether = 256, kVector = 16;
  const Sigmoids sigmoids = level_kernels(level).sigmoids;
  alignas(64) float gates[kTogether];
  for (std::size_t first = 0; first < n; first += kTogether, values += kTogether) {
    const std::size_t some = std::min(kTogether, n - first);
    const std::size_t whole = (some + kVector - 1) / kVector * kVector;
    for (std::size_t i = 0; i < some; ++i) gates[i] = of(values[i] = before(values[i]));
    std::fill(gates + some, gates + whole, 0.0F);
    sigmoids(gates, whole);
    for (std::size_t i = 0; i < some; ++i) values[i] *= gates[i];
  }
}

}  // namespace

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

float softplus(float x) { return x > 20.0F ? x : std::log1p(std::exp(x)); }

void activate(Activation activation, float bias, float* values, std::size_t n, SimdLevel level) {
  const auto input = [bias, scale = activation.scale](float value) { return scale * (value + bias); };
  const auto each = [&](auto function) {
    for (std::size_t i = 0; i < n; ++i) values[i] = function(input(values[i]));
  };
  const auto gated = [&](auto of) { gate_by_sigmoid(input, of, values, n, level); };
  const auto quick = [](float value) { return 1.702F * value; };
  switch (activation.kind) {
    case Activation::identity:
      each([](float value) { return value; });
      break;
    case Activation::relu:
    case Activation::drelu:
      each(relu);
      break;
    case Activation::squared_relu:
      each([](float value) { return value <= 0.0F ? 0.0F : value * value; });
      break;
    case Activation::fatrelu:
      each([threshold = activation.threshold](float value) { return value <= threshold ? 0.0F : value; });
      break;
    case Activation::silu:
      gated([](float value) { return value; });
      break;
    case Activation::gelu:
      each(gelu);
      break;
    case Activation::gelu_tanh:  // value / 2 * (1 + tanh(z / 2)), of this z
      gated([](float value) { return 1.5957691F * (value + 0.044715F * value * value * value); });
      break;
    case Activation::quick_gelu:
      gated(quick);
      break;
    case Activation::clamped_swiglu:
      gate_by_sigmoid([&](float value) { return limited(input(value)); }, quick, values, n, level);
      break;
    case Activation::clamped_up:
      each(clamped_up);
      break;
  }
  if (activation.cut == 0.0F) return;
  for (std::size_t i = 0; i < n; ++i) values[i] = std::fabs(values[i]) < activation.cut ? 0.0F : values[i];
}

}  // namespace flashllm
