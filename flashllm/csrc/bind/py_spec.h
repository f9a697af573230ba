// A BlockSpec of flashllm/arch as the core has it: the names of its options, and what they mean here.
#pragma once

#include <list>
#include <utility>
#include <vector>

#include "bind/bindings.h"
#include "model/spec.h"

namespace flashllm {

// Attributes of a BlockSpec (flashllm/arch/spec.py).
class SpecReader {
 public:
  explicit SpecReader(nb::object spec) : spec_(std::move(spec)) {}
  template <typename T>
  T get(const char* name) const {
    return nb::cast<T>(spec_.attr(name));
  }
  // `missing` for None
  template <typename T>
  T get_or(const char* name, T missing) const {
    const nb::object value = spec_.attr(name);
    return value.is_none() ? missing : nb::cast<T>(value);
  }
  // 0 for None
  float number(const char* name) const { return get_or(name, 0.0F); }

 private:
  nb::object spec_;
};

// What a spec says of all norms of a model.
struct NormStyle {
  Norm::Kind kind = Norm::Kind::layer;
  float epsilon = 0.0F;
  float shift = 0.0F;  // of their weights
};

// A model's spec but for what a run chooses, with what it points to. Moving it moves nothing of that.
struct PySpec {
  ModelSpec spec;
  NormStyle norms;
  std::size_t context = 0;
  std::vector<LayerSpec> layers;
  std::list<std::vector<float>> frequencies, slopes;
};

// Of an Attention's `alibi`, which may be None. What it points to is in `slopes`.
Alibi read_alibi(const nb::object& alibi, std::size_t heads, std::vector<float>& slopes);

// Throws CoreError where options do not fit each other, and what Python throws where there is none of a name.
PySpec read_spec(const SpecReader& reader, Dtype dtype, SimdLevel level);

}  // namespace flashllm
