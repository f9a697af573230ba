#include "ffn/neuron_products.h"

#include <algorithm>

#include "kernels/levels/levels.h"

namespace flashllm {

namespace {

constexpr std::size_t kRowGrain = 16;   // rows a thread takes at a time
constexpr std::size_t kBlock = 32;      // neurons whose gates and ups are multiplied together
constexpr std::size_t kSoon = 4;        // neurons behind them, which are fetched meanwhile
constexpr std::size_t kTogether = 512;  // down columns handed to a kernel at a time, at most

}  // namespace

NeuronProducts::NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most)
    : options_(options), pool_(pool) {
  level_kernels(options.simd);
  if (has_plane(options.format.down_codec))
    plane_kernels(options.simd, options.format.down_codec, options.plane);
  neurons_.reserve(most);
}

// A block's gates, then its ups, which lie beside them, while those of the next one are fetched.
void NeuronProducts::up(const float* x, const float* gate_values) {
  const RowFormat& format = options_.format;
  const RowInputs inputs(x, 1, format.d_model, format.inputs, options_.simd);
  const bool gated = format.gated() || options_.gate != nullptr;
  const std::size_t nbytes = vector_nbytes(format.codec, format.d_model);
  pool_.parallel_for(neurons_.size(), kRowGrain, [&](std::size_t begin, std::size_t end) {
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
    for (std::size_t i = begin; i < end; ++i) {
      ids[count] = neurons_[i].id;
      rows[count] = neurons_[i].row;
      values[count] = neurons_[i].value;
      if (++count == kBlock + kSoon) multiply(kBlock);
    }
    while (count != 0) multiply(std::min(count, kBlock));
  });
}

void NeuronProducts::down(float* y) {
  const RowFormat& format = options_.format;
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
        for (const Neuron& neuron : neurons_) {
          if (*neuron.value == 0.0F) continue;
          ids[count] = neuron.id;
          vectors[count] = neuron.row + format.down;
          scales[count] = *neuron.value;
          if (++count == kTogether) sum();
        }
        if (count != 0) sum();
      });
}

}  // namespace flashllm
