#include "ffn/neuron_products.h"

namespace flashllm {

NeuronProducts::NeuronProducts(const FfnLayerOptions& options, ThreadPool& pool, std::size_t most)
    : options_(options), pool_(pool), products_(most) {
  ids_.reserve(most);
  rows_.reserve(most);
  vectors_.reserve(most);
}

void NeuronProducts::clear() {
  ids_.clear();
  rows_.clear();
}

void NeuronProducts::up(const float* x, const float* gate_values, const std::vector<std::int32_t>& at,
                        float* values) {
  const RowFormat& format = options_.format;
  const std::size_t count = ids_.size();
  const auto in_row = [this](std::uint32_t first) {
    return [this, first](std::size_t i) { return rows_[i] + first; };
  };
  if (gate_values != nullptr) {
    for (std::size_t i = 0; i < count; ++i) values[at[i]] = gate_values[ids_[i]];
  } else {
    if (options_.gate != nullptr) {
      const std::size_t nbytes = vector_nbytes(format.codec, format.d_model);
      const auto in_gate = [&](std::size_t i) {
        return options_.gate + static_cast<std::size_t>(ids_[i]) * nbytes;
      };
      dots(x, in_gate, options_.gate_bias, options_.activation);
    } else {
      dots(x, in_row(format.driver()), format.gated() ? options_.gate_bias : options_.up_bias,
           options_.activation);
    }
    for (std::size_t i = 0; i < count; ++i) values[at[i]] = products_[i];
    if (!format.gated() && options_.gate == nullptr) return;
  }
  dots(x, in_row(format.up), options_.up_bias, options_.activation.of_up());
  for (std::size_t i = 0; i < count; ++i) values[at[i]] *= products_[i];
}

// products_[i] = activation(vector . x + bias) of the i-th neuron gathered
template <typename VectorOf>
void NeuronProducts::dots(const float* x, const VectorOf& vector_of, const float* bias,
                          Activation activation) {
  vectors_.clear();
  for (std::size_t i = 0; i < ids_.size(); ++i) vectors_.push_back(vector_of(i));
  const RowFormat& format = options_.format;
  dot_scattered({vectors_.data(), vectors_.size(), format.d_model, format.codec, format.inputs}, x,
                ids_.data(), bias, activation, products_.data(), pool_, options_.simd);
}

void NeuronProducts::down(const float* scales, float* y) {
  const RowFormat& format = options_.format;
  vectors_.clear();
  for (const std::byte* row : rows_) vectors_.push_back(row + format.down);
  if (has_plane(format.down_codec))
    return sum_scattered(PlaneColumns{vectors_.data(), ids_.data(), vectors_.size(), format.d_model,
                                      format.down_codec, &options_.plane},
                         scales, y, pool_, options_.simd);
  sum_scattered({vectors_.data(), vectors_.size(), format.d_model, format.down_codec}, scales, y, pool_,
                options_.simd);
}

}  // namespace flashllm
