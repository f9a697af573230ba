#include "ffn/neuron_products.h"

#include <algorithm>

#include "ffn/token_ffn.h"
#include "kernels/levels/levels.h"

namespace flashllm {

namespace {

constexpr std::size_t kRowGrain = 16;   // rows a thread takes at a time
constexpr std::size_t kBlock = 32;      // neurons whose gates and ups are multiplied together
constexpr std::size_t kSoon = 4;        // neurons behind them, which are fetched meanwhile
constexpr std::size_t kTogether = 512;  // down columns handed to a kernel at a time, at most

}  // namespace

NeuronProducts::NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most)
    : options_(options), units_(options.units()), pool_(pool) {
  level_kernels(options.simd);
  // Of neurons read alone, those of value zero are to cost nothing.
  if (has_plane(options.format.down_codec))
    in_codes_ = columns(0, nullptr).can_add_codes(options.format.inputs) && units_.size > 1;
  runs_.reserve(most);
}

// Only the layer's last unit may be shorter, and it is gathered last.
std::size_t NeuronProducts::num_rows() const {
  if (runs_.empty()) return 0;
  const std::int32_t last = units_.rows(runs_.back().first / units_.size);
  return (runs_.size() - 1) * static_cast<std::size_t>(units_.size) + static_cast<std::size_t>(last);
}

// visit(neuron, its row, its value) of those gathered, from number `begin` to `end`.
template <typename Visit>
void NeuronProducts::each(std::size_t begin, std::size_t end, const Visit& visit) const {
  if (units_.size == 1) {
    for (std::size_t i = begin; i < end; ++i) visit(runs_[i].first, runs_[i].rows, runs_[i].values);
    return;
  }
  const auto size = static_cast<std::size_t>(units_.size);
  const std::size_t stride = options_.format.stride;
  std::size_t run = begin / size, row = begin % size;
  for (std::size_t left = end - begin; left > 0; ++run, row = 0) {
    const Run& one = runs_[run];
    const std::size_t to = std::min(size, row + left);
    for (left -= to - row; row < to; ++row)
      visit(one.first + static_cast<std::int32_t>(row), one.rows + row * stride, one.values + row);
  }
}

// A block's gates, then its ups, which lie beside them, while those of the next one are fetched.
void NeuronProducts::up(const float* x, const float* gate_values) {
  const RowFormat& format = options_.format;
  const RowInputs inputs(x, 1, format.d_model, format.inputs, options_.simd);
  const bool gated = format.gated() || options_.gate != nullptr;
  const std::size_t nbytes = vector_nbytes(format.codec, format.d_model);
  pool_.parallel_for(num_rows(), kRowGrain, [&](std::size_t begin, std::size_t end) {
    std::int32_t ids[kBlock + kSoon];
    const std::byte* rows[kBlock + kSoon];
    float *values[kBlock + kSoon], drivers[kBlock], products[kBlock];
    const void* vectors[kBlock + kSoon];
    std::size_t count = 0;
    // The first `n` of them; the others stay.
    const auto multiply = [&](std::size_t n) {
      const auto dots = [&](const auto& vector_of, const float* bias, Activation activation, float* to) {
        for (std::size_t i = 0; i < count; ++i) vectors[i] = vector_of(i);
        dot_block({vectors, n, format.d_model, format.codec, format.inputs, count - n}, inputs, ids, bias,
                  activation, to, options_.simd);
      };
      if (gate_values != nullptr) {
        for (std::size_t i = 0; i < n; ++i) drivers[i] = gate_values[ids[i]];
      } else {
        dots(
            [&](std::size_t i) {
              return options_.gate == nullptr ? rows[i] + format.driver()
                                              : options_.gate + static_cast<std::size_t>(ids[i]) * nbytes;
            },
            gated ? options_.gate_bias : options_.up_bias, options_.activation, drivers);
      }
      if (gated) {
        dots([&](std::size_t i) { return rows[i] + format.up; }, options_.up_bias,
             options_.activation.of_up(), products);
        for (std::size_t i = 0; i < n; ++i) drivers[i] *= products[i];
      }
      for (std::size_t i = 0; i < n; ++i) *values[i] = drivers[i];
      count -= n;
      std::copy_n(ids + n, count, ids);
      std::copy_n(rows + n, count, rows);
      std::copy_n(values + n, count, values);
    };
    each(begin, end, [&](std::int32_t neuron, const std::byte* row, float* value) {
      ids[count] = neuron;
      rows[count] = row;
      values[count] = value;
      if (++count == kBlock + kSoon) multiply(kBlock);
    });
    while (count != 0) multiply(std::min(count, kBlock));
  });
}

PlaneRows NeuronProducts::columns(std::int32_t neuron, const std::byte* rows) const {
  const RowFormat& format = options_.format;
  return {rows + format.down, format.stride,     static_cast<std::size_t>(neuron),
          format.d_model,     format.down_codec, options_.plane,
          options_.simd};
}

void NeuronProducts::down_in_codes(float* y) {
  const auto rows_of = [&](const Run& run) {
    return static_cast<std::size_t>(units_.rows(run.first / units_.size));
  };
  codes_.resize(std::max(codes_.size(), runs_.size()));
  pool_.parallel_for(runs_.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const auto first = static_cast<std::size_t>(runs_[i].first);
      codes_[i].begin(1, first % kCodeUnit + rows_of(runs_[i]), options_.simd);
      codes_[i].set(0, first, rows_of(runs_[i]), runs_[i].values, 1);
    }
  });
  const std::size_t width = options_.format.d_model;
  pool_.parallel_for(width, column_share(width, pool_), [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      const CodeTokens values = codes_[i].of(0);
      columns(runs_[i].first, runs_[i].rows).add_codes(rows_of(runs_[i]), &values, 1, begin, end, y, width);
    }
  });
}

void NeuronProducts::down(float* y) {
  if (in_codes_) return down_in_codes(y);
  const RowFormat& format = options_.format;
  const std::size_t all = num_rows();
  pool_.parallel_for(
      format.d_model, column_share(format.d_model, pool_), [&](std::size_t begin, std::size_t end) {
        std::int32_t ids[kTogether];
        const void* vectors[kTogether];
        float scales[kTogether];
        std::size_t count = 0;
        const auto sum = [&] {
          if (has_plane(format.down_codec))
            sum_block({vectors, ids, count, format.d_model, format.down_codec, &options_.plane}, scales,
                      begin, end, y, options_.simd);
          else
            sum_block({vectors, count, format.d_model, format.down_codec}, scales, begin, end, y,
                      options_.simd);
          count = 0;
        };
        each(0, all, [&](std::int32_t neuron, const std::byte* row, const float* value) {
          if (*value == 0.0F) return;
          ids[count] = neuron;
          vectors[count] = row + format.down;
          scales[count] = *value;
          if (++count == kTogether) sum();
        });
        if (count != 0) sum();
      });
}

void NeuronProducts::up(const FfnShare* shares, std::size_t count, const std::byte* rows,
                        const RowInputs& x) {
  const RowFormat& format = options_.format;
  const auto first = static_cast<std::size_t>(units_.first(shares[0].unit)),
             size = static_cast<std::size_t>(units_.rows(shares[0].unit));
  const auto of = [&](std::uint32_t offset, const float* bias) {
    RowMatrix matrix = format.matrix(rows, size, offset);
    matrix.bias = bias == nullptr ? nullptr : bias + first;
    return matrix;
  };
  const RowMatrix up = of(format.up, options_.up_bias);
  const RowMatrix driver =
      format.gated() ? of(static_cast<std::uint32_t>(format.gate), options_.gate_bias) : up;
  std::size_t members[FfnTokens::kMost];
  for (std::size_t t = 0; t < count; ++t) members[t] = shares[t].member;
  pool_.parallel_for(size, kRowGrain, [&](std::size_t begin, std::size_t end) {
    float products[FfnTokens::kMost * kRowGrain];
    for (std::size_t r = begin; r < end; r += kRowGrain) {
      const std::size_t n = std::min(kRowGrain, end - r);
      const auto multiply = [&](const RowMatrix& matrix, Activation activation, const auto& put) {
        dot_listed(matrix, r, n, x, members, count, products, kRowGrain, options_.simd);
        for (std::size_t t = 0; t < count; ++t) {
          activate(activation, 0.0F, products + t * kRowGrain, n, options_.simd);
          for (std::size_t i = 0; i < n; ++i) put(shares[t].values[r + i], products[t * kRowGrain + i]);
        }
      };
      multiply(driver, options_.activation, [](float& value, float product) { value = product; });
      if (format.gated())
        multiply(up, options_.activation.of_up(), [](float& value, float product) { value *= product; });
    }
  });
}

void NeuronProducts::down(const FfnShare* shares, std::size_t count, const std::byte* rows, float* y) {
  const RowFormat& format = options_.format;
  const std::int32_t unit = shares[0].unit;
  const std::size_t size = static_cast<std::size_t>(units_.rows(unit)), width = format.d_model;
  gathered_.resize(count * (size + width));
  float *h = gathered_.data(), *sums = h + count * size;
  for (std::size_t t = 0; t < count; ++t) {
    std::copy_n(shares[t].values, size, h + t * size);
    std::copy_n(y + shares[t].member * width, width, sums + t * width);
  }
  add_columns(format, rows, size, units_.first(unit),
              has_plane(format.down_codec) ? &options_.plane : nullptr, {h, size, 1}, count, sums, pool_,
              options_.simd);
  for (std::size_t t = 0; t < count; ++t) std::copy_n(sums + t * width, width, y + shares[t].member * width);
}

}  // namespace flashllm
