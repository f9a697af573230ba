#include "io/reader.h"

#include <string>

#include "io/error.h"
#include "io/thread_backend.h"
#include "io/uring_backend.h"

namespace flashllm {

namespace {

constexpr std::uint64_t kLargestRequest = std::uint64_t{1} << 30;  // below what one system call can return
constexpr std::uint64_t kLargestOffset = std::uint64_t{1} << 62;   // sums of offsets never wrap

void require_in_flight(const ReadBatch& batch, const char* what) {
  if (!batch.in_flight())
    throw CoreError(ErrorKind::usage, std::string(what) + " a read batch that was not submitted");
}

}  // namespace

Reader::Reader(const ReaderOptions& options) : options_(options) {
  if (options.threads < 1 || options.threads > 1024)
    throw CoreError(ErrorKind::usage,
                    "reader threads must be 1 to 1024, got " + std::to_string(options.threads));
  if (options.max_request < 4096 || options.max_request > kLargestRequest)
    throw CoreError(ErrorKind::usage,
                    "max_request must be 4 KiB to 1 GiB, got " + std::to_string(options.max_request));
  if (options.queue_depth < 1 || options.queue_depth > 1024)
    throw CoreError(ErrorKind::usage,
                    "queue_depth must be 1 to 1024, got " + std::to_string(options.queue_depth));
  if (options.backend != ReadBackendKind::threads) {
    try {
      backend_ = std::make_unique<UringBackend>(queue_, options);
      options_.backend = ReadBackendKind::io_uring;
      return;
    } catch (const CoreError& error) {
      backend_reason_ = std::string("io_uring is not available (") + error.what() + ")";
      if (options.backend == ReadBackendKind::io_uring)
        throw CoreError(error.kind(), backend_reason_ + "; use threads");
    }
  }
  options_.backend = ReadBackendKind::threads;
  backend_ = std::make_unique<ThreadBackend>(queue_, options);
}

Reader::~Reader() = default;

void Reader::submit(ReadBatch& batch, const DirectFile& file, ReadPriority priority) {
  if (batch.in_flight_) throw CoreError(ErrorKind::usage, "a read batch was submitted twice without a wait");
  for (ReadJob& job : batch.jobs) {
    if (job.nbytes == 0 ||
        (job.checksums != nullptr && (job.row_nbytes == 0 || job.nbytes % job.row_nbytes != 0)))
      throw CoreError(ErrorKind::usage, "a read job must have bytes, and whole rows if it has checksums");
    if (job.offset > kLargestOffset || job.nbytes > kLargestOffset - job.offset)
      throw CoreError(ErrorKind::usage,
                      "a read job at offset " + std::to_string(job.offset) + " lies beyond any file");
    job.landed = false;
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
  const std::size_t requests = batch.requests_.size();
  batch.stats_.requests = requests;
  for (const ReadRequest& request : batch.requests_) batch.stats_.bounced += request.bounce ? 1 : 0;
  batch.landed_.clear();
  batch.landed_.reserve(requests);  // nothing is allocated where a read ends
  batch.unfinished_ = requests;
  if (requests != 0) {
    queue_.push(batch, priority);
    backend_->work_arrived(requests);
  }
  batch.in_flight_ = true;
}

void Reader::keep(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted) {
  require_in_flight(batch, "kept or cancelled");
  queue_.keep(batch, wanted);
}

void Reader::cancel(ReadBatch& batch) {
  keep(batch, [](const ReadJob&) { return false; });
}

bool Reader::poll(ReadBatch& batch) {
  require_in_flight(batch, "polled");
  backend_->start();
  return queue_.poll(batch);
}

void Reader::wait(ReadBatch& batch) {
  require_in_flight(batch, "waited for");
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
