// Work that compute threads move on between two shares of a loop, a little at a time: reads under way.
#pragma once

namespace flashllm {

class SideWork {
 public:
  virtual ~SideWork() = default;
  virtual void advance() noexcept = 0;  // brief, from any thread
};

}  // namespace flashllm
