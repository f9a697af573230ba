// An array as it was handed over: where it lies, what its elements are, its shape. Whoever hands it over
// keeps it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace flashllm {

enum class Element { f32, f16, bf16, i8, u8, other };

struct Tensor {
  const std::byte* data = nullptr;
  Element element = Element::other;
  std::size_t itemsize = 0;
  std::vector<std::size_t> shape;

  std::size_t size() const {
    std::size_t elements = 1;
    for (const std::size_t each : shape) elements *= each;
    return elements;
  }
  std::size_t nbytes() const { return size() * itemsize; }
  bool is(Element of, const std::vector<std::size_t>& wanted) const {
    return element == of && shape == wanted;
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

// By its name; nothing where there is none. Throws what whoever hands it over throws.
using TensorSource = std::function<std::optional<Tensor>(const std::string& name)>;

}  // namespace flashllm
