// Memory for vectors of any level, uninitialised.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace flashllm {

template <typename T>
class Scratch {
 public:
  explicit Scratch(std::size_t n) : data_(static_cast<T*>(::operator new(n * sizeof(T), kAlignment))) {}
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(T* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
};

}  // namespace flashllm
