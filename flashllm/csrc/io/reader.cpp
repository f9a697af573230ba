#include "io/reader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "io/error.h"
#include "io/memory.h"
#include "io/thread_backend.h"
#include "io/uring_backend.h"

namespace flashllm {

namespace {

constexpr std::uint64_t kLargestRequest = std::uint64_t{1} << 30;  // below what one system call can return
constexpr std::uint64_t kLargestOffset = std::uint64_t{1} << 62;   // sums of offsets never wrap

void require_in_flight(const ReadBatch& batch, const char* what) {
  require(batch.in_flight(), std::string(what) + " a read batch that was not submitted");
}

}  // namespace

Reader::Reader(const ReaderOptions& options)
    : options_(options), queue_(std::make_unique<ReadQueue>(options.idle_nbytes)) {
  require(options.threads >= 1 && options.threads <= 1024,
          "reader threads must be 1 to 1024, got " + std::to_string(options.threads));
  require(options.max_request >= 4096 && options.max_request <= kLargestRequest,
          "max_request must be 4 KiB to 1 GiB, got " + std::to_string(options.max_request));
  require(options.queue_depth >= 1 && options.queue_depth <= 1024,
          "queue_depth must be 1 to 1024, got " + std::to_string(options.queue_depth));
  if (options.backend != ReadBackendKind::threads) {
    try {
      backend_ = std::make_unique<UringBackend>(*queue_, options);
      options_.backend = ReadBackendKind::io_uring;
      return;
    } catch (const CoreError& error) {
      backend_reason_ = std::string("io_uring is not available (") + error.what() + ")";
      if (options.backend == ReadBackendKind::io_uring)
        throw CoreError(error.kind(), backend_reason_ + "; use threads");
    }
  }
  options_.backend = ReadBackendKind::threads;
  backend_ = std::make_unique<ThreadBackend>(*queue_, options);
}

Reader::~Reader() {
  if (!is_lost()) return;
  static auto* const lost = new std::vector<std::pair<ReadBackend*, ReadQueue*>>;  // found by leak checkers
  backend_->abandon();
  lost->emplace_back(backend_.release(), queue_.release());
}

void Reader::submit(ReadBatch& batch, const DirectFile& file, ReadPriority priority) {
  require(!batch.in_flight_, "a read batch was submitted twice without a wait");
  if (is_lost()) throw_lost("nothing more can be read; load the model again: ");
  for (ReadJob& job : batch.jobs) {
    require(job.nbytes != 0 &&
                (job.checksums == nullptr || (job.row_nbytes != 0 && job.nbytes % job.row_nbytes == 0)),
            "a read job must have bytes, and whole rows if it has checksums");
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
  for (const ReadRequest& request : batch.requests_) batch.stats_.bounced += request.bounces() ? 1 : 0;
  batch.landed_.clear();
  batch.landed_.reserve(requests);  // nothing is allocated where a read ends
  batch.unfinished_ = requests;
  if (requests != 0) {
    queue_->push(batch, priority);
    backend_->work_arrived(requests);
  }
  batch.in_flight_ = true;
  batch.interrupted_ = false;
}

void Reader::keep(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted) {
  require_in_flight(batch, "kept or cancelled");
  const std::size_t kept = queue_->keep(batch, wanted);
  if (kept != 0) backend_->work_arrived(kept);
}

void Reader::cancel(ReadBatch& batch) {
  keep(batch, [](const ReadJob&) { return false; });
}

bool Reader::poll(ReadBatch& batch) {
  require_in_flight(batch, "polled");
  backend_->start();
  if (is_lost()) throw_lost("");
  return queue_->poll(batch);
}

void Reader::wait(ReadBatch& batch) {
  require_in_flight(batch, "waited for");
  const bool ended = await(batch, options_.patience, true);
  batch.in_flight_ = false;
  if (!ended) throw_lost("");
  if (batch.error_) std::rethrow_exception(batch.error_);
}

void Reader::settle(ReadBatch& batch) noexcept {
  if (!batch.in_flight_) return;
  const bool hurried = batch.interrupted_ || was_interrupted();
  await(batch, hurried ? std::min(kAfterInterruption, options_.patience) : options_.patience, false);
  batch.in_flight_ = false;
}

void Reader::interrupt() noexcept {
  hurried_until_ = (std::chrono::steady_clock::now() + kSoon).time_since_epoch().count();
}

bool Reader::was_interrupted() const {
  return std::chrono::steady_clock::now().time_since_epoch().count() < hurried_until_;
}

bool Reader::await(ReadBatch& batch, std::chrono::milliseconds patience, bool look) {
  while (!backend_->wait(batch, std::min(kBetweenLooks, patience))) {
    if (queue_->lose(patience)) {
      keep_all_memory();
      name_lost(batch, patience);
      return false;
    }
    if (!look || !options_.look) continue;
    try {
      options_.look();
    } catch (...) {
      batch.interrupted_ = true;
      interrupt();
      throw;
    }
  }
  return true;
}

// Of the requests that were started, the first whose jobs have not landed.
void Reader::name_lost(const ReadBatch& batch, std::chrono::milliseconds patience) {
  const std::lock_guard<std::mutex> lock(naming_);
  if (!lost_.empty()) return;
  for (const ReadRequest& request : batch.requests_) {
    if (batch.jobs[request.first_job].landed) continue;
    lost_offset_ = request.offset;
    lost_ = "a read of " + std::to_string(request.nbytes) + " bytes at offset " +
            std::to_string(request.offset) + " did not end within " + std::to_string(patience.count()) +
            " ms, " + batch.file_->path();
    return;
  }
}

void Reader::throw_lost(const std::string& what) {
  const std::lock_guard<std::mutex> lock(naming_);
  throw CoreError(ErrorKind::io, what + lost_, lost_offset_);
}

}  // namespace flashllm
