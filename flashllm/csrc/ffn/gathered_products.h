// An FFN layer that has all of its rows cached, for a clock: what a token's products over some of them take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "ffn/ffn_layer.h"
#include "ffn/neuron_products.h"
#include "io/memory.h"
#include "kernels/kernels.h"

namespace flashllm {

class GatheredProducts {
 public:
  // `row`: of every neuron, `format.stride` bytes. Nothing is read from the file at `path`, which a layer
  // must have. Keeps a reference to the pool.
  GatheredProducts(const RowFormat& format, const std::byte* row, std::int32_t neurons,
                   const std::string& path, ThreadPool& pool, SimdLevel simd)
      : options_(options_of(format, neurons, simd)),
        file_(path, true),
        reader_(ReaderOptions{ReadBackendKind::threads, 1}),
        memory_(static_cast<std::size_t>(neurons) * format.stride),
        x_(format.d_model, kInput),
        y_(format.d_model),
        layer_(options_, reader_, file_, pool, memory_.data(), nullptr, counters_),
        products_(options_, pool, 0) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(neurons));
    std::iota(all.begin(), all.end(), 0);
    layer_.observe({all});
    layer_.begin_fill(nullptr, 0);
    for (const std::int32_t neuron : all) layer_.fill_from(row, neuron, 1);
  }

  std::int32_t num_neurons() const { return layer_.num_neurons(); }
  // Those of a token that wants these neurons, which are ascending.
  void run(const std::vector<std::int32_t>& active) { layer_.forward(x_.data(), 0, active, y_.data()); }
  // Its two parts, each by itself: the values of these neurons, and the sum of their down columns.
  void up(const std::vector<std::int32_t>& active) {
    gather(active);
    products_.up(x_.data(), nullptr);
  }
  void down(const std::vector<std::int32_t>& active) {
    gather(active);
    std::fill(y_.begin(), y_.end(), 0.0F);
    products_.down(y_.data());
  }

 private:
  static constexpr float kInput = 0.01F;
  static FfnLayerOptions options_of(const RowFormat& format, std::int32_t neurons, SimdLevel simd) {
    FfnLayerOptions options;
    options.format = format;
    options.num_neurons = options.capacity = neurons;
    options.window = INT32_MAX;                   // nothing leaves
    options.activation = {Activation::identity};  // every down column is read, whatever the rows are
    options.simd = simd;
    return options;
  }
  void gather(const std::vector<std::int32_t>& active) {
    values_.assign(active.size(), kInput);
    products_.clear();
    for (std::size_t i = 0; i < active.size(); ++i)
      products_.gather(active[i], layer_.cached_rows(active[i]), &values_[i]);
  }

  const FfnLayerOptions options_;
  DirectFile file_;
  Reader reader_;
  HugeBuffer memory_;
  FfnCounters counters_;
  std::vector<float> x_, y_, values_;
  FfnLayer layer_;
  NeuronProducts products_;
};

}  // namespace flashllm
