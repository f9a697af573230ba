// Threads that take one request at a time (paper A, section 4). Works wherever there is preadv.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "reader.h"

namespace flashllm {

class ThreadBackend final : public ReadBackend {
 public:
  // Throws CoreError(io) when the threads cannot be started.
  ThreadBackend(ReadQueue& queue, const ReaderOptions& options);
  ~ThreadBackend() override { stop(); }

  void work_arrived(std::size_t requests) override;
  void start() noexcept override {}
  void advance() noexcept override {}
  void wait(ReadBatch& batch) override { queue_.wait(batch); }

 private:
  void serve(RequestSlot& slot);
  void stop();

  ReadQueue& queue_;
  const bool verify_;
  std::vector<std::unique_ptr<RequestSlot>> slots_;  // one a thread
  std::vector<std::thread> threads_;
};

}  // namespace flashllm
