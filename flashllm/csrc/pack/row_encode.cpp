#include "pack/row_encode.h"

#include <algorithm>
#include <atomic>

#include "kernels/half.h"
#include "kernels/rows.h"
#include "kernels/scratch.h"
#include "pack/group_fit.h"
#include "pack/lanes.h"

namespace flashllm {

namespace {

constexpr std::size_t kGrain = 16;  // rows a thread takes at a time

// Codes of a group as they are stored, a byte each.
void encode_group(const CodecShape& shape, const float* weights, float scale, float minimum,
                  std::uint8_t* codes) {
  const float zero = shape.has_minimum || shape.bits == 8 ? 0.0F : static_cast<float>(1 << (shape.bits - 1));
  const float lowest = shape.bits == 8 ? -128.0F : -zero,
              highest = shape.bits == 8 ? 127.0F : static_cast<float>((1 << shape.bits) - 1) - zero;
  const float inverse = scale != 0.0F ? 1.0F / scale : 0.0F;
  for (std::size_t i = 0; i < shape.group; i += kLanes) {
    const Lanes code = nearest((load(weights + i) - minimum) * inverse, lowest, highest) + zero;
    for (std::size_t l = 0; l < kLanes; ++l)
      codes[i + l] = static_cast<std::uint8_t>(static_cast<std::int32_t>(code[l]));
  }
}

// The bytes of some codes: of 4 bits, 32 to 16 bytes.
void store_codes(const CodecShape& shape, const std::uint8_t* codes, std::size_t n, std::uint8_t* to) {
  if (shape.bits == 8) {
    std::copy_n(codes, n, to);
    return;
  }
  constexpr std::size_t kHalf = kCodeUnit / 2;
  for (std::size_t i = 0; i < n; i += kCodeUnit, to += kHalf)
    for (std::size_t b = 0; b < kHalf; ++b)
      to[b] = static_cast<std::uint8_t>(codes[i + b] | codes[i + kHalf + b] << 4);
}

bool are_finite(const float* values, std::size_t n) {
  Lanes products{};  // 0, or not a number
  for (std::size_t i = 0; i < n; i += kLanes) products += load(values + i) * 0.0F;
  return sum(products) == 0.0F;
}

}  // namespace

Encoded encode_rows(RowCodec codec, const std::byte* weights, Dtype dtype, std::size_t rows,
                    std::size_t columns, std::uint8_t* to, ThreadPool& pool, SimdLevel level) {
  const CodecShape shape = group_shape(codec);
  const KernelTable& kernels = kernel_table(level, dtype);
  const std::size_t groups = (columns + shape.group - 1) / shape.group, padded = groups * shape.group;
  const std::size_t row_nbytes = columns * dtype_nbytes(dtype), stride = vector_nbytes(codec, columns);
  std::atomic<Encoded> result{Encoded::whole};
  pool.parallel_for(rows, kGrain, [&](std::size_t begin, std::size_t end) {
    const Scratch<float> values(padded);
    const Scratch<std::uint8_t> codes(padded);
    std::fill(values.get() + columns, values.get() + padded, 0.0F);
    for (std::size_t r = begin; r < end && result == Encoded::whole; ++r) {
      kernels.to_f32(weights + r * row_nbytes, columns, values.get());
      if (!are_finite(values.get(), padded)) {
        result = Encoded::not_finite;
        return;
      }
      auto* scales = reinterpret_cast<std::uint16_t*>(to + r * stride);
      std::uint16_t* minimums = shape.has_minimum ? scales + groups : nullptr;
      if (!fit_groups(shape, values.get(), groups, scales, minimums)) {
        result = Encoded::too_large;
        return;
      }
      for (std::size_t g = 0; g < groups; ++g)
        encode_group(shape, values.get() + g * shape.group, half_to_float(scales[g]),
                     minimums != nullptr ? half_to_float(minimums[g]) : 0.0F, codes.get() + g * shape.group);
      store_codes(shape, codes.get(), padded,
                  reinterpret_cast<std::uint8_t*>(scales + groups * (shape.has_minimum ? 2 : 1)));
    }
  });
  return result;
}

}  // namespace flashllm
