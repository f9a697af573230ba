// An FFN layer as Python holds it, with all it refers to, and what it is made of.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/bindings.h"
#include "bind/resident_tensors.h"

namespace flashllm {

class PyPrefetch;

// Where all layers read neurons, and how their caches keep them.
struct NeuronSource {
  std::shared_ptr<Reader> reader;
  std::shared_ptr<DirectFile> file;
  std::string cache_policy;
  std::int32_t window = 1;
  std::int32_t unit_rows = 1;
  std::optional<ByteArray> bypass_rows;  // from allocate(), as all memory below
  bool wait_first = false;               // as in FfnLayerOptions
  bool split_rows = false;
};

// Where a layer's rows lie in that file, and the memory of its cache.
struct LayerRows {
  ByteArray memory;
  std::uint64_t offset = 0;  // of row 0
  ChecksumArray checksums;
  std::int32_t checksum_rows = 1;        // that share one
  std::optional<FloatArray> popularity;  // of each unit
};

// The weights of a layer's neurons that are resident, `layers.LAYER.` before their names. Throws CoreError
// where they do not fit the rows.
FfnLayerOptions read_ffn(ResidentTensors& tensors, const RowFormat& rows, std::size_t layer,
                         std::size_t neurons, Activation activation);

class PyFfnLayer {
 public:
  // `options`: as read_ffn. Throws CoreError for what does not fit.
  PyFfnLayer(FfnLayerOptions options, std::shared_ptr<ResidentTensors> tensors,
             std::shared_ptr<NeuronSource> source, LayerRows rows, std::shared_ptr<ThreadPool> pool,
             std::shared_ptr<FfnCounters> counters);

  FfnLayer& layer() { return *layer_; }

  // Factors of 8 bits come with a scale for each row, others without. With `prefetch` it is the predictor
  // that tells this layer's neurons from the input of the layer before, and `prefetch` holds what is read on
  // its word.
  void set_predictor(const AnyArray& a, const AnyArray& b, const FloatArray& bias, float threshold,
                     const std::optional<AnyArray>& a_scale, const std::optional<AnyArray>& b_scale,
                     std::shared_ptr<PyPrefetch> prefetch);
  // PowerInfer's kind of predictor: b relu(a x) >= threshold, of the states before the FFN's norm. a [rank,
  // d_model] and b [num_neurons, rank]: floats, or bytes of an encoding.
  void set_relu_predictor(const AnyArray& a, const AnyArray& b, float threshold,
                          const std::optional<std::string>& a_encoding,
                          const std::optional<std::string>& b_encoding);
  // The layer's gate in codes of 4 bits as the predictor: [num_neurons, bytes of a row].
  void set_coded_gate(const AnyArray& codes, float margin);

  // A token over a given active set (ascending units). x, y: [d_model] of the dtype.
  void forward_active(std::uintptr_t x, const IdArray& active, std::uintptr_t y);
  std::vector<std::int32_t> predict(std::uintptr_t x);
  void begin_fill(std::uintptr_t x, std::size_t tokens);
  void fill_from(const ConstBytes& rows, std::int32_t first_neuron, std::int32_t count);

 private:
  void load(std::uintptr_t x, std::size_t token);
  void store(std::uintptr_t y, std::size_t token);
  template <typename... Arrays>
  void keep(const Arrays&... arrays) {
    for (const std::optional<AnyArray>& each : {std::optional<AnyArray>(arrays)...})
      if (each) kept_.push_back(*each);
  }

  std::shared_ptr<ResidentTensors> tensors_;
  std::shared_ptr<NeuronSource> source_;
  LayerRows rows_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  std::vector<AnyArray> kept_;  // what predictors point to
  std::vector<FloatArray> biases_;
  std::shared_ptr<PyPrefetch> prefetch_;
  std::vector<float> x_, y_;
  std::unique_ptr<FfnLayer> layer_;
};

}  // namespace flashllm
