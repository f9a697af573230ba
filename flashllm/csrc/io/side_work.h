// Work that is done a little at a time by whoever has a moment: reads under way, between two shares of a
// loop.
#pragma once

namespace flashllm {

class SideWork {
 public:
  virtual ~SideWork() = default;
  virtual void advance() noexcept = 0;  // brief, from any thread
};

}  // namespace flashllm
