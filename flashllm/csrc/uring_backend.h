// One thread that keeps `queue_depth` reads under way through io_uring, where thread_backend.h needs a
// thread for each.
//
// The thread submits, reaps and checks; callers only queue and wake it, so reads go on being started and
// finished while they compute.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "io_uring.h"
#include "reader.h"

namespace flashllm {

class UringBackend final : public ReadBackend {
 public:
  // Throws CoreError(io) where there is no io_uring, or its thread cannot be started.
  UringBackend(ReadQueue& queue, const ReaderOptions& options);
  ~UringBackend() override;

  void work_arrived(std::size_t requests) override;

 private:
  struct Active {  // a request under way
    explicit Active(const ReaderOptions& options) : slot(options.max_request, options.max_gap) {}
    RequestSlot slot;
    ReadQueue::Work work;
  };

  void serve();
  void wake();
  void listen();
  void start_requests();
  void ask(std::size_t index);
  void answer(std::size_t index, ssize_t result);
  void finish(std::size_t index, const RequestOutcome& outcome, std::exception_ptr error);

  ReadQueue& queue_;
  const bool verify_;
  IoUring ring_;
  std::vector<std::unique_ptr<Active>> active_;
  std::vector<std::size_t> free_;
  int wake_ = -1;                 // an eventfd; the ring always has one read of it
  std::uint64_t wake_value_ = 0;  // read from it
  struct iovec wake_iov_ = {nullptr, 0};
  std::atomic<bool> idle_{false};  // the thread may sleep while it could start more: work must wake it
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace flashllm
