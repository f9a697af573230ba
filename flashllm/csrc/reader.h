// Batches of reads: submit returns at once, wait returns when every byte is there, checked.
//
// A ReadBatch belongs to its caller, who fills `jobs`, submits it, may compute meanwhile, and waits. The
// first error of a batch wins, the rest of the batch is skipped, and wait throws it. A batch can be used
// again after wait. The backend is one small interface, so that others (io_uring) can stand beside the
// threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "direct_file.h"
#include "request_plan.h"

namespace flashllm {

struct ReadStats {
  std::uint64_t jobs = 0;
  std::uint64_t requests = 0;
  std::uint64_t bytes = 0;      // asked from the device, gaps included
  std::uint64_t gap_bytes = 0;  // read and thrown away
  std::uint64_t bounced = 0;    // requests that needed an aligned copy
  std::uint64_t retries = 0;
  std::uint64_t wall_ns = 0;  // from submit to the last byte
};

class ReadBatch {
 public:
  std::vector<ReadJob> jobs;  // the caller's to fill before submit; rearranged by it

  const ReadStats& stats() const { return stats_; }  // of the last submit, complete after wait
  bool in_flight() const { return in_flight_; }      // submitted and not yet waited for

 private:
  friend class Reader;
  friend class ThreadBackend;

  const DirectFile* file_ = nullptr;
  std::vector<ReadRequest> requests_;
  ReadStats stats_;
  // Guarded by the backend's mutex.
  std::size_t next_request_ = 0;
  std::size_t unfinished_ = 0;
  std::exception_ptr error_;
  std::uint64_t submitted_at_ns_ = 0;
  bool in_flight_ = false;  // the caller's own, never seen by the backend's threads
};

class ReadBackend {
 public:
  virtual ~ReadBackend() = default;
  virtual void submit(ReadBatch& batch) = 0;
  virtual void wait(ReadBatch& batch) = 0;  // does not throw the batch's own error
};

struct ReaderOptions {
  int threads = 32;  // paper A, section 4
  std::uint64_t max_gap = 0;
  std::uint64_t max_request = std::uint64_t{1} << 20;
  bool verify = true;  // compare the checksums of jobs that carry them
};

class Reader {
 public:
  explicit Reader(const ReaderOptions& options);
  ~Reader();

  const ReaderOptions& options() const { return options_; }
  void submit(ReadBatch& batch, const DirectFile& file);
  void wait(ReadBatch& batch);             // throws CoreError
  void settle(ReadBatch& batch) noexcept;  // waits if it is in flight; its error is not wanted
  void read(ReadBatch& batch, const DirectFile& file) {
    submit(batch, file);
    wait(batch);
  }

 private:
  ReaderOptions options_;
  std::unique_ptr<ReadBackend> backend_;
};

}  // namespace flashllm
