// Exposed times: adds the time since the last call to one counter after another, so that no instant is
// counted twice or lost.
#pragma once

#include <chrono>
#include <cstdint>

namespace flashllm {

class Stopwatch {
 public:
  void charge(std::uint64_t& counter) {
    const auto now = std::chrono::steady_clock::now();
    counter +=
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count());
    last_ = now;
  }
  void restart() { last_ = std::chrono::steady_clock::now(); }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

}  // namespace flashllm
