// Scales of groups: within their memory, and at least as close as those of the plain range. Encoded rows:
// what their scales give, for any number of threads.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/half.h"
#include "kernels/rows.h"
#include "pack/group_fit.h"
#include "pack/row_encode.h"

using namespace flashllm;

namespace {

constexpr RowCodec kCodecs[] = {RowCodec::int8_32, RowCodec::int8_64,     RowCodec::int4_32,
                                RowCodec::int4_64, RowCodec::int4_32_min, RowCodec::int4_64_min};

// The squared error of weights rounded to code * scale + minimum.
double squared_error(const CodecShape& shape, const float* weights, float scale, float minimum) {
  const double lowest = shape.has_minimum ? 0.0 : -std::ldexp(1.0, static_cast<int>(shape.bits) - 1);
  const double highest = lowest + std::ldexp(1.0, static_cast<int>(shape.bits)) - 1.0;
  double error = 0.0;
  for (std::size_t i = 0; i < shape.group; ++i) {
    const double offset = static_cast<double>(weights[i]) - static_cast<double>(minimum);
    const double code = scale == 0.0F ? 0.0 : std::nearbyint(offset / static_cast<double>(scale));
    const double left = offset - std::clamp(code, lowest, highest) * static_cast<double>(scale);
    error += left * left;
  }
  return error;
}

double error_of_the_plain_range(const CodecShape& shape, const float* weights) {
  const auto [least, most] = std::minmax_element(weights, weights + shape.group);
  const auto in_half = [](float value) { return half_to_float(float_to_half(value)); };
  if (shape.has_minimum) {
    const float codes = static_cast<float>((1 << shape.bits) - 1);
    return squared_error(shape, weights, in_half((*most - *least) / codes), in_half(*least));
  }
  const float largest = *most > -*least ? *most : *least;
  return squared_error(shape, weights, in_half(-largest / static_cast<float>(1 << (shape.bits - 1))), 0.0F);
}

void test_fit(RowCodec codec, std::mt19937& random) {
  constexpr std::size_t kGroups = 12;
  std::normal_distribution<float> normal;
  const CodecShape shape = group_shape(codec);
  std::vector<float> weights(kGroups * shape.group);
  std::vector<std::uint16_t> scales(kGroups), minimums(kGroups);
  for (std::size_t g = 0; g < kGroups; ++g)
    for (std::size_t i = 0; i < shape.group; ++i)
      weights[g * shape.group + i] = normal(random) * std::pow(10.0F, static_cast<float>(g) - 8.0F);
  std::fill_n(weights.begin(), shape.group, 0.0F);
  std::fill_n(weights.begin() + static_cast<std::ptrdiff_t>(shape.group), shape.group, 0.25F);
  std::uint16_t* minimums_to = shape.has_minimum ? minimums.data() : nullptr;
  CHECK(fit_groups(shape, weights.data(), kGroups, scales.data(), minimums_to));
  for (std::size_t g = 0; g < kGroups; ++g) {
    const float* group = weights.data() + g * shape.group;
    const double found = squared_error(shape, group, half_to_float(scales[g]), half_to_float(minimums[g]));
    CHECK(found <= error_of_the_plain_range(shape, group) * 1.002 + 1e-12);
  }
  CHECK(scales[0] == 0 && minimums[0] == 0);
  weights[2 * shape.group] = 1e9F;
  CHECK(!fit_groups(shape, weights.data(), kGroups, scales.data(), minimums_to));
}

void test_encode(RowCodec codec, std::size_t columns, std::mt19937& random) {
  constexpr std::size_t kRows = 37;
  std::normal_distribution<float> normal;
  std::vector<float> weights(kRows * columns);
  for (float& weight : weights) weight = normal(random);
  const std::size_t stride = vector_nbytes(codec, columns);
  std::vector<std::uint8_t> first;
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<std::uint8_t> rows(kRows * stride);
    const auto encode = [&] {
      return encode_rows(codec, reinterpret_cast<const std::byte*>(weights.data()), Dtype::f32, kRows,
                         columns, rows.data(), pool, SimdLevel::scalar);
    };
    CHECK(encode() == Encoded::whole);
    if (first.empty()) first = rows;
    CHECK(rows == first);
    std::vector<float> wide(columns);
    const RowMatrix matrix{reinterpret_cast<const std::byte*>(rows.data()), kRows, columns, stride, codec};
    for (std::size_t r = 0; r < kRows; ++r) {
      widen_row(matrix, r, wide.data(), SimdLevel::scalar);
      for (std::size_t j = 0; j < columns; ++j) CHECK(std::fabs(wide[j] - weights[r * columns + j]) < 1.0F);
    }
    const float kept = weights[columns];
    weights[columns] = 1e9F;
    CHECK(encode() == Encoded::too_large);
    weights[columns] = std::nanf("");
    CHECK(encode() == Encoded::not_finite);
    weights[columns] = kept;
  }
}

}  // namespace

void test_pack(int scale) {
  std::mt19937 random(11);
  for (int round = 0; round < 4 * scale; ++round)
    for (const RowCodec codec : kCodecs) {
      test_fit(codec, random);
      for (const std::size_t columns : {1, 63, 64, 130}) test_encode(codec, columns, random);
    }
}
