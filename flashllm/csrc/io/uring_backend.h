// Keeps `queue_depth` reads under way through io_uring, where thread_backend.h needs a thread for each.
//
// No thread of its own: threads that wait for reads or compute beside them (`Reader::advance`) start them,
// take them in and check them, a few at a time, so that one call of the kernel serves several. A thread of
// its own took the processor from products in the middle of a share, and the queue ran dry until its turn
// came (bench/log).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "io/io_uring.h"
#include "io/reader.h"

namespace flashllm {

class UringBackend final : public ReadBackend {
 public:
  // Throws CoreError(io) where there is no io_uring.
  UringBackend(ReadQueue& queue, const ReaderOptions& options);
  ~UringBackend() override;

  void work_arrived(std::size_t) override {}
  void start() noexcept override;
  void advance() noexcept override;
  bool wait(ReadBatch& batch, std::chrono::milliseconds at_most) override;
  void abandon() noexcept override {}

 private:
  using Clock = std::chrono::steady_clock;
  // Least time between two looks of `advance`: long enough for one call to submit a few reads, short enough
  // for a deep queue to last.
  static constexpr std::chrono::nanoseconds kBetweenLooks{100'000};
  static constexpr int kPatience = 1000;  // refusals after which requests are read without the ring
  // A read's id: which one it is of all reads, and in the lowest bits the index of its request.
  static constexpr std::uint64_t kIndices = 1024;  // the largest queue depth
  struct Active {                                  // a request under way
    Active(std::uint64_t max_request, UnpackedFrom& unpacked, std::size_t number)
        : slot(max_request, unpacked, number) {}
    RequestSlot slot;
    ReadQueue::Work work;
    std::uint64_t id = 0;   // of the read that the ring has; 0: none
    int cancellations = 0;  // of the request
  };

  void step();
  void submit(unsigned wait_for, std::chrono::milliseconds at_most = std::chrono::milliseconds(1000));
  void take_in();
  void start_requests();
  void ask(std::size_t index);
  void answer(std::size_t index, ssize_t result);
  void read_here(std::size_t index);
  void finish(std::size_t index, const RequestOutcome& outcome, std::exception_ptr error);

  ReadQueue& queue_;
  std::mutex turn_;  // guards everything below
  IoUring ring_;
  UnpackedFrom unpacked_;
  std::vector<std::unique_ptr<Active>> active_;
  std::vector<std::size_t> free_;
  std::uint64_t num_asked_ = 0;
  int refusals_ = 0;  // of the kernel to take requests, in a row
  std::atomic<std::int64_t> next_look_{0};
};

}  // namespace flashllm
