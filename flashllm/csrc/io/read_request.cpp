#include "io/read_request.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "io/error.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

constexpr std::size_t kSector = 4096;

void verify_job(const ReadJob& job, const std::byte* bytes, const DirectFile& file) {
  const std::uint64_t rows = job.nbytes / job.row_nbytes;
  for (std::uint64_t r = 0; r < rows; ++r) {
    if (xxh3_64(bytes + r * job.row_nbytes, job.row_nbytes) != job.checksums[r]) {
      const std::uint64_t offset = job.offset + r * job.row_nbytes;
      throw CoreError(ErrorKind::checksum,
                      "wrong checksum of the row at offset " + std::to_string(offset) + " of " + file.path(),
                      offset);
    }
  }
}

}  // namespace

UnpackedFrom::UnpackedFrom(std::size_t requests, std::uint64_t max_request)
    : requests_(requests), nbytes_((max_request + kSector - 1) / kSector * kSector + 2 * kSector) {}

std::byte* UnpackedFrom::piece(std::size_t request) {
  std::call_once(once_, [this] { memory_ = std::make_unique<HugeBuffer>(requests_ * nbytes_); });
  return memory_->data() + request * nbytes_;
}

RequestSlot::RequestSlot(std::uint64_t max_request, UnpackedFrom& unpacked, std::size_t number)
    : max_request_(max_request), unpacked_(unpacked), number_(number) {
  iov_.reserve(kMaxPieces);
}

// Requests with gaps are short, unaligned ones of any length up to max_request, or a single row's.
std::byte* RequestSlot::bounce(std::size_t nbytes) {
  if (jobs_->unpacking != nullptr && nbytes <= unpacked_.nbytes()) return unpacked_.piece(number_);
  if (!bounce_ || bounce_->size() < nbytes) {
    const std::size_t most = request_->aligned ? kMaxThrough : max_request_ + 2 * kSector;
    bounce_.reset();
    bounce_ = std::make_unique<HugeBuffer>(std::max<std::size_t>(nbytes, most));
  }
  return bounce_->data();
}

void RequestSlot::begin(const ReadRequest& request, const ReadJob* jobs, const DirectFile& file) {
  request_ = &request;
  jobs_ = jobs;
  file_ = &file;
  start_ = request.offset;
  iov_.clear();
  if (request.bounces()) {
    const std::uint64_t alignment = file.offset_alignment();
    start_ = request.offset / alignment * alignment;
    const std::uint64_t end = (request.offset + request.nbytes + alignment - 1) / alignment * alignment;
    bounced_to_ = bounce(end - start_);
    iov_.push_back({bounced_to_, end - start_});
  } else {
    for (std::uint32_t i = 0; i < request.num_jobs; ++i)
      iov_.push_back({jobs[i].destination, jobs[i].nbytes});
  }
  read = DirectRead(file, iov_.data(), static_cast<int>(iov_.size()), start_);
}

RequestOutcome RequestSlot::finish() {
  RequestOutcome outcome;
  outcome.bytes = read.nbytes();
  outcome.retries = read.retries();
  // 1. All there?
  const std::uint64_t skipped = request_->offset - start_;
  if (outcome.bytes < skipped + request_->nbytes) {
    const std::uint64_t end = start_ + std::max(outcome.bytes, skipped);
    throw CoreError(ErrorKind::format,
                    file_->path() + " ends at byte " + std::to_string(end) + ", expected at least " +
                        std::to_string(request_->offset + request_->nbytes) +
                        ": the file shrank or is truncated",
                    end);
  }
  // 2. In place, and right? On the reader's threads, while other reads are under way. What is unpacked is
  // checked as it lies in the file.
  std::uint64_t wanted = 0;
  for (std::uint32_t i = 0; i < request_->num_jobs; ++i) {
    const ReadJob& job = jobs_[i];
    const std::byte* read_to = request_->bounces() ? bounced_to_ + (job.offset - start_) : job.destination;
    const std::byte* checked = job.unpacking != nullptr ? read_to : job.destination;
    if (checked != read_to) std::memcpy(job.destination, read_to, job.nbytes);
    if (job.checksums != nullptr) verify_job(job, checked, *file_);
    if (job.unpacking != nullptr) job.unpacking->unpack(read_to, job.first, job.nbytes, job.destination);
    wanted += job.nbytes;
  }
  outcome.gap_bytes = outcome.bytes - std::min(outcome.bytes, wanted);
  return outcome;
}

}  // namespace flashllm
