// Work that is done a little at a time by whoever has a moment: see ThreadPool and Reader.
#pragma once

namespace flashllm {

class SideWork {
 public:
  virtual ~SideWork() = default;
  virtual void advance() noexcept = 0;  // brief, from any thread
};

}  // namespace flashllm
