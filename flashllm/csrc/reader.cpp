#include "reader.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "error.h"
#include "memory.h"
#include "xxh3.h"

namespace flashllm {

namespace {

constexpr std::uint64_t kLargestRequest = std::uint64_t{1} << 30;  // below what one system call can return
constexpr std::uint64_t kLargestOffset = std::uint64_t{1} << 62;   // sums of offsets never wrap

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

// One thread's memory for gaps and unaligned requests, and the iovecs of the request at hand.
class Scratch {
 public:
  Scratch(std::uint64_t max_request, std::uint64_t max_gap)
      : max_request_(max_request), gap_(std::min(max_gap, max_request)) {  // a gap lies inside a request
    iov.reserve(2 * kMaxPieces);
  }

  std::byte* gap() { return gap_.data(); }
  // An unaligned request can be longer than max_request when a single row is; grown then, once.
  std::byte* bounce(std::size_t nbytes) {
    if (!bounce_ || bounce_->size() < nbytes)
      bounce_ = std::make_unique<HugeBuffer>(std::max<std::size_t>(nbytes, max_request_ + 2 * kSector));
    return bounce_->data();
  }

  std::vector<struct iovec> iov;

 private:
  static constexpr std::size_t kSector = 4096;
  std::uint64_t max_request_;
  HugeBuffer gap_;
  std::unique_ptr<HugeBuffer> bounce_;  // made on first use: most files are aligned
};

void verify_job(const ReadJob& job, const DirectFile& file) {
  const std::uint64_t rows = job.nbytes / job.row_nbytes;
  for (std::uint64_t r = 0; r < rows; ++r) {
    if (xxh3_64(job.destination + r * job.row_nbytes, job.row_nbytes) != job.checksums[r]) {
      const std::uint64_t offset = job.offset + r * job.row_nbytes;
      throw CoreError(ErrorKind::checksum,
                      "wrong checksum of the row at offset " + std::to_string(offset) + " of " + file.path(),
                      offset);
    }
  }
}

[[noreturn]] void throw_shrank(const ReadRequest& request, std::size_t got, const DirectFile& file) {
  throw CoreError(ErrorKind::format,
                  file.path() + " ends at byte " + std::to_string(request.offset + got) +
                      ", expected at least " + std::to_string(request.offset + request.nbytes) +
                      ": the file shrank or is truncated",
                  request.offset + got);
}

struct RequestOutcome {
  std::uint64_t bytes = 0;
  std::uint64_t gap_bytes = 0;
  std::uint64_t retries = 0;
};

RequestOutcome read_scattered(const ReadRequest& request, const ReadJob* jobs, const DirectFile& file,
                              Scratch& scratch) {
  RequestOutcome outcome;
  scratch.iov.clear();
  std::uint64_t at = request.offset;
  for (std::uint32_t i = 0; i < request.num_jobs; ++i) {
    if (jobs[i].offset > at) {
      scratch.iov.push_back({scratch.gap(), jobs[i].offset - at});
      outcome.gap_bytes += jobs[i].offset - at;
    }
    scratch.iov.push_back({jobs[i].destination, jobs[i].nbytes});
    at = jobs[i].offset + jobs[i].nbytes;
  }
  outcome.bytes =
      file.read(scratch.iov.data(), static_cast<int>(scratch.iov.size()), request.offset, outcome.retries);
  if (outcome.bytes < request.nbytes) throw_shrank(request, outcome.bytes, file);
  return outcome;
}

RequestOutcome read_bounced(const ReadRequest& request, const ReadJob* jobs, const DirectFile& file,
                            Scratch& scratch) {
  RequestOutcome outcome;
  const std::uint64_t alignment = file.offset_alignment();
  const std::uint64_t start = request.offset / alignment * alignment;
  const std::uint64_t end = (request.offset + request.nbytes + alignment - 1) / alignment * alignment;
  std::byte* data = scratch.bounce(end - start);
  struct iovec whole = {data, end - start};
  outcome.bytes = file.read(&whole, 1, start, outcome.retries);
  const std::uint64_t skipped = request.offset - start;
  if (outcome.bytes < skipped + request.nbytes)
    throw_shrank(request, outcome.bytes - std::min<std::uint64_t>(skipped, outcome.bytes), file);
  std::uint64_t wanted = 0;
  for (std::uint32_t i = 0; i < request.num_jobs; ++i) {
    std::memcpy(jobs[i].destination, data + (jobs[i].offset - start), jobs[i].nbytes);
    wanted += jobs[i].nbytes;
  }
  outcome.gap_bytes = outcome.bytes - std::min(outcome.bytes, wanted);
  return outcome;
}

}  // namespace

// Threads that take one request at a time from the oldest batch that has any left.
class ThreadBackend final : public ReadBackend {
 public:
  explicit ThreadBackend(const ReaderOptions& options) : options_(options) {
    // All memory is taken here, where running out of it can be told; on a thread it would end the process.
    const auto threads = static_cast<std::size_t>(options.threads);
    threads_.reserve(threads);
    for (std::size_t i = 0; i < threads; ++i)
      scratch_.push_back(std::make_unique<Scratch>(options.max_request, options.max_gap));
    try {
      for (const auto& scratch : scratch_) threads_.emplace_back([this, &scratch] { serve(*scratch); });
    } catch (const std::system_error& error) {
      stop();
      throw CoreError(ErrorKind::io, "cannot start " + std::to_string(options.threads) + " reader threads (" +
                                         error.what() + "); use fewer with --io-threads");
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadBackend() override { stop(); }

  void submit(ReadBatch& batch) override {
    const std::size_t requests = batch.requests_.size();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(&batch);
    }
    if (requests >= threads_.size()) {
      work_.notify_all();
    } else {
      for (std::size_t i = 0; i < requests; ++i) work_.notify_one();
    }
  }

  void wait(ReadBatch& batch) override {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return batch.unfinished_ == 0; });
  }

 private:
  void serve(Scratch& scratch) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      ReadBatch& batch = *queue_.front();
      const ReadRequest& request = batch.requests_[batch.next_request_++];
      if (batch.next_request_ == batch.requests_.size()) queue_.pop_front();
      const bool skip = batch.error_ != nullptr;
      lock.unlock();

      RequestOutcome outcome;
      std::exception_ptr error;
      if (!skip) {
        try {
          outcome = execute(request, batch, scratch);
        } catch (...) {
          error = std::current_exception();
        }
      }

      lock.lock();
      batch.stats_.bytes += outcome.bytes;
      batch.stats_.gap_bytes += outcome.gap_bytes;
      batch.stats_.retries += outcome.retries;
      if (error && !batch.error_) batch.error_ = error;
      if (--batch.unfinished_ == 0) {
        batch.stats_.wall_ns = now_ns() - batch.submitted_at_ns_;
        done_.notify_all();
      }
    }
  }

  RequestOutcome execute(const ReadRequest& request, const ReadBatch& batch, Scratch& scratch) const {
    const ReadJob* jobs = batch.jobs.data() + request.first_job;
    const RequestOutcome outcome = request.bounce ? read_bounced(request, jobs, *batch.file_, scratch)
                                                  : read_scattered(request, jobs, *batch.file_, scratch);
    if (options_.verify) {
      // Here, on the reader's threads: the row is still in the processor's cache, and other reads are under
      // way.
      for (std::uint32_t i = 0; i < request.num_jobs; ++i)
        if (jobs[i].checksums != nullptr) verify_job(jobs[i], *batch.file_);
    }
    return outcome;
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const ReaderOptions options_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<ReadBatch*> queue_;  // batches with requests nobody has taken
  bool stopping_ = false;
  std::vector<std::unique_ptr<Scratch>> scratch_;  // one a thread
  std::vector<std::thread> threads_;
};

Reader::Reader(const ReaderOptions& options) : options_(options) {
  if (options.threads < 1 || options.threads > 1024)
    throw CoreError(ErrorKind::usage,
                    "reader threads must be 1 to 1024, got " + std::to_string(options.threads));
  if (options.max_request < 4096 || options.max_request > kLargestRequest)
    throw CoreError(ErrorKind::usage,
                    "max_request must be 4 KiB to 1 GiB, got " + std::to_string(options.max_request));
  backend_ = std::make_unique<ThreadBackend>(options);
}

Reader::~Reader() = default;

void Reader::submit(ReadBatch& batch, const DirectFile& file) {
  if (batch.in_flight_) throw CoreError(ErrorKind::usage, "a read batch was submitted twice without a wait");
  for (const ReadJob& job : batch.jobs) {
    if (job.nbytes == 0 ||
        (job.checksums != nullptr && (job.row_nbytes == 0 || job.nbytes % job.row_nbytes != 0)))
      throw CoreError(ErrorKind::usage, "a read job must have bytes, and whole rows if it has checksums");
    if (job.offset > kLargestOffset || job.nbytes > kLargestOffset - job.offset)
      throw CoreError(ErrorKind::usage,
                      "a read job at offset " + std::to_string(job.offset) + " lies beyond any file");
  }
  batch.file_ = &file;
  batch.stats_ = ReadStats{};
  batch.stats_.jobs = batch.jobs.size();
  batch.next_request_ = 0;
  batch.error_ = nullptr;
  RequestLimits limits;
  limits.max_gap = options_.max_gap;
  limits.max_request = options_.max_request;
  limits.offset_alignment = file.offset_alignment();
  limits.memory_alignment = file.memory_alignment();
  plan_requests(batch.jobs, limits, batch.requests_);
  batch.stats_.requests = batch.requests_.size();
  for (const ReadRequest& request : batch.requests_) batch.stats_.bounced += request.bounce ? 1 : 0;
  batch.unfinished_ = batch.requests_.size();
  batch.submitted_at_ns_ = now_ns();
  if (batch.unfinished_ != 0) backend_->submit(batch);
  batch.in_flight_ = true;
}

void Reader::wait(ReadBatch& batch) {
  if (!batch.in_flight_) throw CoreError(ErrorKind::usage, "waited for a read batch that was not submitted");
  backend_->wait(batch);
  batch.in_flight_ = false;
  if (batch.error_) std::rethrow_exception(batch.error_);
}

void Reader::settle(ReadBatch& batch) noexcept {
  if (!batch.in_flight_) return;
  backend_->wait(batch);
  batch.in_flight_ = false;
}

}  // namespace flashllm
