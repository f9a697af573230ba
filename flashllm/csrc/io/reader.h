// Batches of reads: submit returns at once, wait returns when every byte is there, checked.
//
// A ReadBatch belongs to its caller, who fills `jobs`, submits it, may compute meanwhile, and waits. Many
// batches may be in flight: demand reads start before prefetches, each kind in the order of submission. Once
// the caller knows which rows of a prefetch it wants, `keep` makes those demand reads and drops the others,
// as far as they have not been started. The first error of a batch wins, the rest of the batch is
// skipped, and wait throws it. After wait each job says whether it landed, and the batch can be used again.
// One thread at a time uses a batch.
//
// A read that never ends (a drive that is gone, a server that does not answer) cannot be taken back from the
// system. Where nothing has moved for `patience` the reader is lost: wait throws, and every later submit. Its
// threads, and all memory that reads may land in, are then kept to the process's end.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/direct_file.h"
#include "io/read_queue.h"
#include "io/request_plan.h"
#include "io/side_work.h"

namespace flashllm {

struct ReadStats {
  std::uint64_t jobs = 0;
  std::uint64_t requests = 0;   // without those dropped before they were started
  std::uint64_t dropped = 0;    // requests
  std::uint64_t bytes = 0;      // asked from the device, gaps included
  std::uint64_t gap_bytes = 0;  // read and thrown away
  std::uint64_t bounced = 0;    // requests read in one piece and copied out, dropped or not
  std::uint64_t retries = 0;
  std::uint64_t wall_ns = 0;  // from submit to the last byte
};

class ReadBatch {
 public:
  std::vector<ReadJob> jobs;  // filled by the caller before submit, which sorts them

  const ReadStats& stats() const { return stats_; }  // of the last submit, complete after wait
  bool in_flight() const { return in_flight_; }      // submitted and not yet waited for

 private:
  friend class Reader;
  friend class ReadQueue;

  const DirectFile* file_ = nullptr;
  std::vector<ReadRequest> requests_;
  // Used by the caller's thread alone.
  bool in_flight_ = false;
  bool interrupted_ = false;  // its wait
  // Guarded by the queue's lock.
  ReadStats stats_;
  ReadPriority priority_ = ReadPriority::demand;
  std::size_t next_request_ = 0;            // those before it were started
  std::size_t unfinished_ = 0;              // requests neither finished nor dropped
  std::vector<const ReadRequest*> landed_;  // finished since the last poll
  std::exception_ptr error_;
  std::uint64_t submitted_at_ns_ = 0;
};

enum class ReadBackendKind {
  threads,
  io_uring,   // an error where there is none
  automatic,  // io_uring where the system has it, else threads
};

struct ReaderOptions {
  ReadBackendKind backend = ReadBackendKind::threads;
  int threads = 32;      // of the threads backend; paper A, section 4
  int queue_depth = 64;  // of io_uring
  std::uint64_t max_gap = 0;
  std::uint64_t max_request = std::uint64_t{1} << 20;
  // Longer than the kernel gives a drive before it tries again or gives it up (30 s).
  std::chrono::milliseconds patience{60'000};
  std::function<void()> look = nullptr;  // called now and then in a wait; what it throws ends the wait
  // Of idle requests at a time, or one: an expert where it lies in a file is many, of which one leaves the
  // drive idle.
  std::uint64_t idle_nbytes = std::uint64_t{4} << 20;
};

// Takes work from a ReadQueue and finishes it. All memory and threads are taken when it is made.
class ReadBackend {
 public:
  virtual ~ReadBackend() = default;                     // ends after the requests under way
  virtual void work_arrived(std::size_t requests) = 0;  // called at each submit: brief
  virtual void start() noexcept = 0;                    // as Reader::start
  virtual void advance() noexcept = 0;                  // as Reader::advance
  // True once all of it is finished; false where that is not so after `at_most`, or the queue is lost.
  virtual bool wait(ReadBatch& batch, std::chrono::milliseconds at_most) = 0;
  virtual void abandon() noexcept = 0;  // the queue is lost, and this is never destroyed
};

class Reader final : public SideWork {
 public:
  explicit Reader(const ReaderOptions& options);
  ~Reader() override;

  // With the backend in use; `backend_reason` says why an automatic choice was not io_uring.
  const ReaderOptions& options() const { return options_; }
  const std::string& backend_reason() const { return backend_reason_; }

  void submit(ReadBatch& batch, const DirectFile& file, ReadPriority priority = ReadPriority::demand);
  // Of the requests not yet started, those with a job that is `wanted` (called with the queue's lock held:
  // brief, and no call of the reader) become demand reads; the others are dropped.
  void keep(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted);
  void cancel(ReadBatch& batch);  // keeps none; wait then returns as soon as the started ones are done
  // Sets `landed` of the jobs that are there, read and checked. True when wait would return at once.
  bool poll(ReadBatch& batch);
  void wait(ReadBatch& batch);  // as poll, but waits; throws CoreError
  // Starts submitted reads, as many as there is room for, and takes in those that have landed; does not wait;
  // any thread may call it. Submitted reads begin here, or at the next `advance`, `poll` or `wait`. The
  // threads backend needs no more calls. On io_uring reads move on in these calls alone, so code that
  // computes beside reads calls `advance` now and then, as a ThreadPool does between two shares of a loop.
  // `advance` returns at once where the last look was a moment ago.
  void start() noexcept { backend_->start(); }
  void advance() noexcept override { backend_->advance(); }
  // Time since the last call in which any batch was under way; batches that overlap count once.
  std::uint64_t take_busy_ns() { return queue_->take_busy_ns(); }
  // Waits if it is in flight, and drops its error. Where its wait was interrupted (`look` threw), or any wait
  // of the last seconds, it does not wait for long.
  void settle(ReadBatch& batch) noexcept;
  // Somebody who does not wait was interrupted: as if a wait had been.
  void interrupt() noexcept;
  bool is_lost() const { return queue_->is_lost(); }
  void read(ReadBatch& batch, const DirectFile& file) {
    submit(batch, file);
    wait(batch);
  }

 private:
  static constexpr std::chrono::milliseconds kBetweenLooks{100};
  // Who interrupts does not wait for long. What is settled later than `kSoon` belongs to something else.
  static constexpr std::chrono::milliseconds kAfterInterruption{700};
  static constexpr std::chrono::seconds kSoon{5};

  // False where the reader is lost.
  bool await(ReadBatch& batch, std::chrono::milliseconds patience, bool look);
  bool was_interrupted() const;
  void name_lost(const ReadBatch& batch, std::chrono::milliseconds patience);
  [[noreturn]] void throw_lost(const std::string& what);

  ReaderOptions options_;
  std::string backend_reason_;
  std::unique_ptr<ReadQueue> queue_;
  std::unique_ptr<ReadBackend> backend_;
  std::mutex naming_;  // guards the two below
  std::string lost_;   // the read that did not end
  std::uint64_t lost_offset_ = 0;
  std::atomic<std::chrono::steady_clock::rep> hurried_until_{0};  // ticks since the clock's epoch
};

}  // namespace flashllm
