// Memory for vectors of any level, uninitialised; and lengths in whole vectors.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace flashllm {

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

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
