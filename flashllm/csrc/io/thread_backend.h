// Threads that take one request at a time (paper A, section 4). Works wherever there is preadv.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "io/reader.h"

namespace flashllm {

// A request that was begun and let go of, by this thread's own calls. False where the queue was lost
// meanwhile; else, also where it throws, the request is held.
bool read_by_calls(ReadQueue& queue, RequestSlot& slot, ReadQueue::Work& work);

class ThreadBackend final : public ReadBackend {
 public:
  // Throws CoreError(io) when the threads cannot be started.
  ThreadBackend(ReadQueue& queue, const ReaderOptions& options);
  ~ThreadBackend() override { stop(); }

  void work_arrived(std::size_t requests) override { unannounced_ += requests; }
  void start() noexcept override;
  void advance() noexcept override { start(); }
  bool wait(ReadBatch& batch, std::chrono::milliseconds at_most) override;
  void abandon() noexcept override;

 private:
  void serve(RequestSlot& slot);
  void stop();

  ReadQueue& queue_;
  std::atomic<std::size_t> unannounced_{0};  // requests that no thread was woken for
  UnpackedFrom unpacked_;
  std::vector<std::unique_ptr<RequestSlot>> slots_;  // one a thread
  std::vector<std::thread> threads_;
};

}  // namespace flashllm
