// Thread pool and kernels: every index once, and the same bits for any number of threads.
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "ffn/dense_ffn.h"
#include "fixture.h"
#include "io/memory.h"
#include "kernels/kernels.h"
#include "kernels/levels/levels.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"
#include "planes/scale_planes.h"
#include "random_rows.h"
#include "simd_levels.h"

namespace {

using namespace flashllm;

// One product of each kind with `threads` threads, all outputs in one vector.
std::vector<float> products(int threads, SimdLevel level, Dtype dtype, std::size_t rows, std::size_t columns,
                            std::size_t tokens) {
  std::mt19937 random(7);
  ThreadPool pool(threads);
  const KernelTable& kernels = kernel_table(level, dtype);
  // Exactly as much memory as the kernels may touch: an address sanitizer sees a load beyond it.
  std::vector<std::byte> weights(rows * columns * dtype_nbytes(dtype));
  kernels.from_f32(random_floats(rows * columns, random).data(), rows * columns, weights.data());
  const std::vector<float> x = random_floats(tokens * columns, random);
  const std::vector<float> bias = random_floats(rows, random);
  std::vector<float> out(tokens * rows);
  const RowMatrix matrix{weights.data(),  rows,       columns, columns * dtype_nbytes(dtype),
                         codec_of(dtype), bias.data()};
  linear(matrix, x.data(), tokens, out.data(), pool, level);

  std::vector<float> wide(rows * columns);
  kernels.to_f32(weights.data(), wide.size(), wide.data());
  for (std::size_t m = 0; m < tokens; ++m) {
    for (std::size_t r = 0; r < rows; ++r) {
      double sum = bias[r], magnitude = std::fabs(bias[r]);
      for (std::size_t j = 0; j < columns; ++j) {
        const double term = static_cast<double>(wide[r * columns + j]) * x[m * columns + j];
        sum += term;
        magnitude += std::fabs(term);
      }
      CHECK(std::fabs(out[m * rows + r] - sum) <= static_cast<double>(columns + 2) * 6e-8 * magnitude);
    }
  }

  std::vector<const void*> pointers;
  std::vector<std::int32_t> ids;
  for (std::size_t r = rows; r-- > 0;) {
    pointers.push_back(weights.data() + r * matrix.stride);
    ids.push_back(static_cast<std::int32_t>(r));
  }
  std::vector<float> values(rows), y(columns, 0.5F);
  dot_scattered({pointers.data(), rows, columns, codec_of(dtype)}, x.data(), ids.data(), bias.data(),
                Activation::relu, values.data(), pool, level);
  for (std::size_t r = 0; r < rows; ++r) CHECK(values[r] == std::fmax(out[rows - 1 - r], 0.0F));
  sum_scattered({pointers.data(), rows, columns, codec_of(dtype)}, values.data(), y.data(), pool, level);
  out.insert(out.end(), values.begin(), values.end());
  out.insert(out.end(), y.begin(), y.end());
  return out;
}

constexpr std::size_t kFirst = 20,
                      kLater = 281;  // rows of two blocks; the second has more than are paired together
constexpr std::size_t kNeurons = kFirst + kLater;

// A dense FFN and a linear over `tokens` of the same inputs, from `first` on, all outputs in one vector.
std::vector<float> many_tokens(int threads, SimdLevel level, Dtype dtype, std::size_t first,
                               std::size_t tokens) {
  constexpr std::size_t kWidth = 70, kAll = 300;
  std::mt19937 random(11);
  ThreadPool pool(threads);
  const KernelTable& kernels = kernel_table(level, dtype);
  const std::size_t element = dtype_nbytes(dtype);
  RowFormat format;
  format.codec = format.down_codec = codec_of(dtype);
  format.d_model = kWidth;
  format.down = static_cast<std::uint32_t>(kWidth * element);
  format.stride = static_cast<std::uint32_t>(2 * kWidth * element);
  std::vector<std::byte> rows(kNeurons * format.stride), x(kAll * kWidth * element);
  kernels.from_f32(random_floats(2 * kWidth * kNeurons, random).data(), 2 * kWidth * kNeurons, rows.data());
  kernels.from_f32(random_floats(kAll * kWidth, random).data(), kAll * kWidth, x.data());
  const std::vector<float> bias = random_floats(kNeurons, random), down_bias = random_floats(kWidth, random);
  const std::byte* inputs = x.data() + first * kWidth * element;

  DenseFfn ffn(dtype, pool, level);
  std::vector<std::byte> y(tokens * kWidth * element), out(tokens * kNeurons * element);
  std::vector<float> h(tokens * kLater);
  // In two parts, where there are tokens for them.
  const std::size_t cuts[] = {0, tokens / 3, tokens};
  ffn.begin(format, Activation::relu);
  for (std::size_t part = 0; part < 2; ++part)
    ffn.take(inputs + cuts[part] * kWidth * element, cuts[part + 1] - cuts[part]);
  for (std::size_t part = 0; part < 2; ++part) {
    ffn.activations(part, rows.data(), kFirst, bias.data());
    ffn.add(part, rows.data(), kFirst);
  }
  for (std::size_t part = 0; part < 2; ++part) {
    const float* later =
        ffn.activations(part, rows.data() + kFirst * format.stride, kLater, bias.data() + kFirst);
    for (std::size_t m = cuts[part]; m < cuts[part + 1]; ++m)
      for (std::size_t i = 0; i < kLater; ++i)
        h[m * kLater + i] = later[i * ffn.padded(part) + m - cuts[part]];
    ffn.add(part, rows.data() + kFirst * format.stride, kLater);
  }
  for (std::size_t part = 0; part < 2; ++part)
    ffn.finish(part, down_bias.data(), y.data() + cuts[part] * kWidth * element);
  CHECK(ffn.parts() == 0);
  const RowMatrix up{rows.data(), kNeurons, kWidth, format.stride, codec_of(dtype), bias.data()};
  linear_many(up,
              PackedTokens(inputs, tokens, kWidth, dtype,
                           form_of_many(codec_of(dtype), InputForm::f32, dtype, kWidth, level), pool, level),
              dtype, out.data(), pool, level);

  std::vector<float> wide(2 * kWidth * kNeurons), wide_x(tokens * kWidth), result(tokens * kWidth);
  kernels.to_f32(rows.data(), wide.size(), wide.data());
  kernels.to_f32(inputs, wide_x.size(), wide_x.data());
  kernels.to_f32(y.data(), result.size(), result.data());
  std::vector<float> products(tokens * kNeurons);
  kernels.to_f32(out.data(), products.size(), products.data());
  const double rounding = dtype == Dtype::f32 ? 1e-5 : dtype == Dtype::f16 ? 1e-3 : 8e-3;
  for (std::size_t m = 0; m < tokens; ++m) {
    std::vector<double> fires(kNeurons);
    for (std::size_t n = 0; n < kNeurons; ++n) {
      double sum = bias[n];
      for (std::size_t j = 0; j < kWidth; ++j)
        sum += static_cast<double>(wide[n * 2 * kWidth + j]) * wide_x[m * kWidth + j];
      CHECK(std::fabs(products[m * kNeurons + n] - sum) <= rounding * std::fmax(1.0, std::fabs(sum)));
      fires[n] = std::fmax(sum, 0.0);
      if (n >= kFirst) CHECK(std::fabs(h[m * kLater + n - kFirst] - fires[n]) <= 1e-3);
    }
    for (std::size_t j = 0; j < kWidth; ++j) {
      double sum = down_bias[j], magnitude = 0.0;
      for (std::size_t n = 0; n < kNeurons; ++n) {
        const double term = fires[n] * wide[n * 2 * kWidth + kWidth + j];
        sum += term;
        magnitude += std::fabs(term);
      }
      // In pairs the activations are rounded to bf16, each by at most 2^-9 of itself.
      const double of_terms = in_pairs(dtype, kWidth, level) ? magnitude / 512 : 0.0;
      CHECK(std::fabs(result[m * kWidth + j] - sum) <=
            of_terms + 1e-6 * magnitude + 4 * rounding * std::fmax(1.0, std::fabs(sum)));
    }
  }
  result.insert(result.end(), products.begin(), products.end());
  return result;
}

}  // namespace

// Columns of neurons whose scales lie in a plane, times values in codes: near the exact sums, the same bits
// at every level that has such products, whatever the threads and blocks.
void plane_columns(RowCodec codec, std::size_t group, bool minimums, bool factors, std::size_t tokens) {
  const bool quarters = codec == RowCodec::codes_fp4 && group == 16;
  constexpr std::size_t kWidth = 160, kAll = 608, kPadded = 32;
  std::mt19937 random(5);
  const std::size_t stride = vector_nbytes(codec, kWidth), scaled = factors ? kSharedFactors : group;
  const auto bytes = [&](std::size_t n) {
    std::vector<std::uint8_t> values(n);
    for (std::uint8_t& value : values) value = static_cast<std::uint8_t>(random());
    return values;
  };
  const std::vector<std::uint8_t> codes = bytes(kAll * stride), by = bytes(2 * kAll / group * kWidth);
  std::vector<std::uint16_t> halves(2 * ((kAll + scaled - 1) / scaled) * kWidth);
  for (std::uint16_t& half : halves) half = static_cast<std::uint16_t>(random() % 0x3C00);
  std::vector<std::uint8_t> powers(kAll / group * kWidth);
  for (std::uint8_t& power : powers)
    power = static_cast<std::uint8_t>(quarters ? random() % 127 : 110 + random() % 20);
  ScalePlane plane;
  plane.group = group;
  const auto* factor = reinterpret_cast<const std::int8_t*>(by.data());
  const std::vector<float> whole(kAll / group, 1e-3F);
  if (quarters) {
    plane.quarters = powers.data();
    plane.whole = whole.data();
  } else if (codec == RowCodec::codes_fp4)
    plane.powers = powers.data();
  else
    plane.scales = halves.data();
  if (minimums) plane.minimums = halves.data() + halves.size() / 2;
  if (factors) plane.factors = factor;
  if (factors && minimums) plane.minimum_factors = factor + by.size() / 2;
  std::vector<float> values = random_floats(kAll * kPadded, random);
  for (std::size_t n = 0; n < kAll; ++n)  // some neurons are zero for all tokens, or for every other one
    for (std::size_t m = 0; m < kPadded; ++m)
      if (n % 5 == 0 || (n % 3 == 0 && m % 2 == 0)) values[n * kPadded + m] = 0.0F;
  std::vector<float> first;
  for (const SimdLevel level : simd_levels()) {
    if (level_kernels(level).add_codes == nullptr) continue;
    // From neuron 5 on in the last case, which no block of 32 begins with.
    const std::vector<std::vector<std::size_t>> cuts = {{0, kAll}, {0, 32, 320, kAll}, {5, 301, kAll}};
    for (const std::vector<std::size_t>& cut : cuts) {
      std::vector<float> y(tokens * (kWidth + kColumnPad)), wide(kWidth), alone(kWidth);
      ThreadPool pool(cut.size() == 2 ? 1 : 3);
      std::vector<double> sum(tokens * kWidth), most(tokens * kWidth);
      for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
        const RowMatrix columns = {reinterpret_cast<const std::byte*>(codes.data()) + cut[i] * stride,
                                   cut[i + 1] - cut[i],
                                   kWidth,
                                   stride,
                                   codec,
                                   nullptr,
                                   InputForm::int8};
        const PlaneRows rows(columns, cut[i], plane, level);
        CHECK(rows.can_add_codes());
        rows.add_codes({values.data() + cut[i] * kPadded, 1, kPadded}, tokens, y.data(), kWidth + kColumnPad,
                       pool);
        rows.add_codes({values.data() + cut[i] * kPadded + tokens - 1, 1, kPadded}, 1, alone.data(), kWidth,
                       pool);
        for (std::size_t n = cut[i]; n < cut[i + 1]; ++n) {
          rows.widen(n - cut[i], 1, 0, kWidth, wide.data(), kWidth);
          for (std::size_t m = 0; m < tokens; ++m)
            for (std::size_t j = 0; j < kWidth; ++j) {
              const double term = static_cast<double>(wide[j]) * values[n * kPadded + m];
              sum[m * kWidth + j] += term;
              most[m * kWidth + j] += std::fabs(wide[j]) * 4.0 / 32767.0 + 1e-6 * std::fabs(term);
            }
        }
      }
      for (std::size_t m = 0; m < tokens; ++m)
        for (std::size_t j = 0; j < kWidth; ++j)
          CHECK(std::fabs(y[m * (kWidth + kColumnPad) + j] - sum[m * kWidth + j]) <= most[m * kWidth + j]);
      CHECK(same_bits(alone, {y.end() - kWidth - kColumnPad, y.end() - kColumnPad}));
      if (cut.front() != 0) continue;
      if (first.empty()) first = y;
      CHECK(same_bits(y, first));
    }
  }
}

// A prompt's products with coded weights: as near the exact sums as inputs in 8 bits are, the same bits at
// every level that has products of codes.
void prompt_in_codes(RowCodec codec, InputForm form) {
  constexpr std::size_t kRows = 21, kColumns = 300, kTokens = 27;
  std::mt19937 random(13);
  const std::vector<std::byte> rows = random_rows(codec, kRows, kColumns, random);
  const std::vector<float> x = random_floats(kTokens * kColumns, random);
  const RowMatrix matrix{rows.data(), kRows, kColumns, vector_nbytes(codec, kColumns), codec};
  float largest = 0.0F;
  for (const float value : x) largest = std::fmax(largest, std::fabs(value));
  std::vector<float> first, wide(kColumns);
  for (const SimdLevel level : simd_levels()) {
    ThreadPool pool(2);
    std::vector<float> out(kTokens * kRows);
    const PackedTokens packed(reinterpret_cast<const std::byte*>(x.data()), kTokens, kColumns, Dtype::f32,
                              form_of_many(codec, form, Dtype::f32, kColumns, level), pool, level);
    CHECK(packed.has_codes() || packed.has_bytes() || level == SimdLevel::scalar);
    linear_many(matrix, packed, Dtype::f32, reinterpret_cast<std::byte*>(out.data()), pool, level);
    for (std::size_t r = 0; r < kRows; ++r) {
      widen_row(matrix, r, wide.data(), level);
      for (std::size_t m = 0; m < kTokens; ++m) {
        double sum = 0.0, rounding = 0.0;
        for (std::size_t j = 0; j < kColumns; ++j) {
          sum += static_cast<double>(wide[j]) * x[m * kColumns + j];
          rounding += std::fabs(wide[j]) * (largest / 254.0 + 1e-5 * std::fabs(x[m * kColumns + j]));
        }
        CHECK(std::fabs(out[m * kRows + r] - sum) <= rounding);
      }
    }
    if (level == SimdLevel::scalar) continue;
    if (first.empty()) first = out;
    CHECK(same_bits(out, first));
  }
}

void test_many_tokens(int scale) {
  for (std::size_t i = 0; i < kCodedCodecs; ++i)
    for (const InputForm form : {InputForm::int8, InputForm::int16, InputForm::token_int8}) {
      const auto codec = static_cast<RowCodec>(kFirstCoded + i);
      if (codec != RowCodec::bf12 && takes_inputs(codec, form)) prompt_in_codes(codec, form);
    }
  for (const SimdLevel level : simd_levels()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      const std::vector<float> together = many_tokens(1, level, dtype, 0, 300);
      for (const int threads : {2, 2 + scale})
        CHECK(same_bits(many_tokens(threads, level, dtype, 0, 300), together));
      // A token's bits do not depend on its company.
      for (const std::size_t first : {0, 3, 259}) {
        const std::vector<float> few = many_tokens(2, level, dtype, first, 7);
        CHECK(std::memcmp(few.data(), together.data() + first * 70, 7 * 70 * sizeof(float)) == 0);
        CHECK(std::memcmp(few.data() + 7 * 70, together.data() + 300 * 70 + first * kNeurons,
                          7 * kNeurons * sizeof(float)) == 0);
      }
    }
  }
}

void test_thread_pool(int scale) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    std::mt19937 random(static_cast<unsigned>(threads));
    for (int loop = 0; loop < 200 * scale; ++loop) {
      const std::size_t count = random() % 300, grain = 1 + random() % 20;
      std::vector<int> visits(count, 0);  // not atomic: a shared index is a race a sanitizer sees
      pool.parallel_for(count, grain, [&](std::size_t begin, std::size_t end) {
        CHECK(begin < end && end <= count && begin % grain == 0);
        for (std::size_t i = begin; i < end; ++i) ++visits[i];
      });
      for (const int n : visits) CHECK(n == 1);
      if (loop % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // workers fall asleep
    }
  }
  // Loops of several callers take turns.
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<long> total{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int loop = 0; loop < 100; ++loop) {
        long sum[40] = {};
        pool.parallel_for(40, 1, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) sum[i] = static_cast<long>(i);
        });
        for (const long value : sum) total += value;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 3L * 100 * (39 * 40 / 2));
}

// Every product of rows in groups, in exactly as much memory as may be touched.
void grouped_products(RowCodec codec, SimdLevel level, std::size_t rows, std::size_t columns) {
  std::mt19937 random(11);
  const std::size_t stride = vector_nbytes(codec, columns);
  const std::vector<std::byte> codes = random_rows(codec, rows, columns, random);
  const RowMatrix matrix{codes.data(), rows, columns, stride, codec};
  std::vector<float> wide(rows * columns);
  for (std::size_t r = 0; r < rows; ++r) widen_row(matrix, r, wide.data() + r * columns, level);
  for (const float weight : wide) CHECK(std::isfinite(weight));
  const std::vector<float> x = random_floats(2 * columns, random), scales = random_floats(rows, random);
  std::vector<const void*> vectors;
  std::vector<std::int32_t> ids;
  for (std::size_t r = 0; r < rows; ++r) {
    vectors.push_back(codes.data() + r * stride);
    ids.push_back(static_cast<std::int32_t>(r));
  }
  const ScatteredRows scattered{vectors.data(), rows, columns, codec};
  ThreadPool single(1);
  std::vector<float> expected(2 * rows), found(2 * rows), values(rows), sum(columns), same(columns);
  linear({reinterpret_cast<const std::byte*>(wide.data()), rows, columns, 4 * columns}, x.data(), 2,
         expected.data(), single, level);
  dot_scattered(scattered, x.data(), ids.data(), nullptr, Activation::identity, values.data(), single, level);
  CHECK(same_bits(values, std::vector<float>(expected.begin(), expected.begin() + rows)));
  sum_scattered(scattered, scales.data(), sum.data(), single, level);
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    linear(matrix, x.data(), 2, found.data(), pool, level);
    CHECK(same_bits(found, expected));
    std::fill(same.begin(), same.end(), 0.0F);
    sum_scattered(scattered, scales.data(), same.data(), pool, level);
    CHECK(same_bits(same, sum));
  }
}

// Activations that have a sigmoid: near those in double, each value the same alone and among others, a NaN
// one.
void activations(SimdLevel level) {
  const auto sigmoid = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
  const auto check = [&](Activation::Kind kind, const auto& expected) {
    std::vector<float> all;
    for (float x = -100.0F; x < 100.0F; x += 0.37F) all.push_back(x);
    all.push_back(std::numeric_limits<float>::quiet_NaN());
    std::vector<float> values = all;
    activate(kind, 0.25F, values.data(), values.size(), level);
    for (std::size_t i = 0; i < all.size(); ++i) {
      float alone = all[i];
      activate(kind, 0.25F, &alone, 1, level);
      CHECK(std::memcmp(&alone, &values[i], sizeof alone) == 0);
      const double x = all[i] + 0.25F, error = std::fabs(values[i] - expected(x));
      CHECK(std::isnan(x) ? std::isnan(values[i]) : error <= 1e-6 * std::fmax(1.0, std::fabs(x)));
    }
  };
  check(Activation::silu, [&](double x) { return x * sigmoid(x); });
  check(Activation::gelu_tanh, [&](double x) { return x * sigmoid(1.5957691 * (x + 0.044715 * x * x * x)); });
  check(Activation::quick_gelu, [&](double x) { return x * sigmoid(1.702 * x); });
  check(Activation::clamped_swiglu,
        [&](double x) { return std::fmin(x, 7.0) * sigmoid(1.702 * std::fmin(x, 7.0)); });
}

void test_kernels(int scale) {
  for (const SimdLevel level : simd_levels()) {
    activations(level);
    for (const std::size_t n : {0, 1, 3, 64, 1000, 4099}) {
      const std::vector<float> ones(n, 1.0F);
      CHECK(level_kernels(level).sum_floats(ones.data(), n) == static_cast<float>(n));
    }
    ThreadPool pool(3);
    for (const double rate : read_bandwidth(pool, 4099, 1e-4, level)) CHECK(rate > 0.0);
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const std::size_t columns : {1, 7, 31, 33, 130}) {
        for (const std::size_t rows : {1, 3, 5, 17, 70 * scale}) {
          const std::vector<float> alone = products(1, level, dtype, rows, columns, 2);
          for (const int threads : {2, 4})
            CHECK(same_bits(products(threads, level, dtype, rows, columns, 2), alone));
        }
      }
    }
    for (std::size_t codec = 0; codec < kCodedCodecs; ++codec)
      for (const std::size_t columns : {1, 31, 33, 64, 130})
        for (const std::size_t rows : {1, 5, 33})
          grouped_products(static_cast<RowCodec>(kFirstCoded + codec), level, rows, columns);
  }
  for (const std::size_t tokens : {1, 5, 13}) {
    for (const RowCodec codec :
         {RowCodec::codes2, RowCodec::codes4, RowCodec::codes5, RowCodec::codes6, RowCodec::codes8})
      for (const bool factors : {false, true})
        for (const bool minimums : {false, true}) plane_columns(codec, 32, minimums, factors, tokens);
    plane_columns(RowCodec::codes6, 16, false, true, tokens);
    plane_columns(RowCodec::codes_fp4, 32, false, false, tokens);
    plane_columns(RowCodec::codes_fp4, 16, false, false, tokens);
    for (const RowCodec codec : {RowCodec::codes_iq4, RowCodec::codes_iq3_s, RowCodec::codes_iq3_xxs,
                                 RowCodec::codes_iq2, RowCodec::codes_iq1})
      plane_columns(codec, 32, false, true, tokens);
    plane_columns(RowCodec::codes_iq2, 16, false, true, tokens);
  }
}
