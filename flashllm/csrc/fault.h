// Test-only faults for reads: the n-th system call of a file misbehaves in a chosen way. Production passes
// none.
#pragma once

#include <atomic>
#include <cstdint>

namespace flashllm {

struct Fault {
  enum class Kind { error, short_read, end_of_file, flip };

  Kind kind = Kind::error;
  std::uint64_t first = 0;  // index of the first read call that misbehaves
  std::uint64_t count = 1;  // how many calls in a row do
  std::uint64_t argument =
      0;  // error: errno; short_read: bytes let through; flip: the bit of the data flipped
};

class FaultPlan {
 public:
  explicit FaultPlan(Fault fault) : fault_(fault) {}

  // The fault of the next call, or nullptr.
  const Fault* next() {
    const std::uint64_t call = calls_.fetch_add(1);
    return call >= fault_.first && call - fault_.first < fault_.count ? &fault_ : nullptr;
  }

 private:
  Fault fault_;
  std::atomic<std::uint64_t> calls_{0};
};

}  // namespace flashllm
