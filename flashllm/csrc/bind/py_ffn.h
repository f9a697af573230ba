// An FFN layer as Python holds it, with all it refers to, and what it is made of.
#pragma once

#include "bind/bindings.h"

namespace flashllm {

// Where all layers read neurons, and how their caches keep them.
struct NeuronSource : UnitRule {
  std::shared_ptr<Reader> reader;
  std::shared_ptr<DirectFile> file;
  std::optional<ByteArray> bypass_rows;  // from allocate(), as all memory below
};

struct LayerCache {
  ByteArray memory;
  std::optional<FloatArray> popularity;  // of each unit
};

// Throws CoreError for others than ascending ids below `units`.
std::vector<std::int32_t> checked_ids(const IdArray& active, std::int32_t units);

// What all layers refer to.
struct FfnParts {
  std::shared_ptr<NamedTensors> tensors;
  std::shared_ptr<NeuronSource> source;
  std::shared_ptr<ThreadPool> pool;
  std::shared_ptr<FfnCounters> counters;
};

class PyFfnLayer {
 public:
  // `options`: as read_ffn. Throws CoreError for what does not fit.
  PyFfnLayer(FfnLayerOptions options, FfnParts parts, FileRows rows, const LayerCache& cache);

  FfnLayer& layer() const { return *layer_; }
  const NamedTensors& tensors() const { return *parts_.tensors; }

  // Of one of the kinds of flashllm/format/predictors.py, whose tensors' names begin with `prefix`;
  // `encodings`: of some of them, by name. With `prefetch` it is the predictor that tells this layer's
  // neurons from the input of the layer before, and `prefetch` holds what is read on its word.
  void set_predictor(const nb::dict& tensors, const std::string& prefix,
                     const std::map<std::string, std::string>& encodings, std::shared_ptr<Prefetch> prefetch);
  // The layer's router on the input of the layer before says what `prefetch` is read into.
  void guess_by_router(std::shared_ptr<Prefetch> prefetch);

 private:
  const FfnParts parts_;
  const FileRows rows_;
  const ByteArray memory_;
  std::vector<nb::dict> predictors_;  // the arrays that they point to
  std::shared_ptr<Prefetch> prefetch_;
  std::unique_ptr<FfnLayer> layer_;
};

}  // namespace flashllm
