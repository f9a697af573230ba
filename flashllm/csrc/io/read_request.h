// One request on its way: the iovecs it reads into, and afterwards its rows put in place and checked.
// Backends begin it, make the system calls its `read` asks for, and finish it.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "io/direct_file.h"
#include "io/memory.h"
#include "io/request_plan.h"

namespace flashllm {

struct RequestOutcome {
  std::uint64_t bytes = 0;
  std::uint64_t gap_bytes = 0;
  std::uint64_t retries = 0;
};

// Memory that a backend's requests are unpacked from, a piece for each, made when the first asks. It is one
// buffer, so that it has huge pages: reads into ordinary ones reach a third of the rate (bench/log,
// 2026-11-26).
class UnpackedFrom {
 public:
  UnpackedFrom(std::size_t requests, std::uint64_t max_request);
  std::size_t nbytes() const { return nbytes_; }  // of a piece
  std::byte* piece(std::size_t request);          // throws std::bad_alloc

 private:
  const std::size_t requests_, nbytes_;
  std::once_flag once_;
  std::unique_ptr<HugeBuffer> memory_;
};

// Holds the memory of one request at a time, where it bounces.
class RequestSlot {
 public:
  // The `number`-th of those that share `unpacked`, which outlives it.
  RequestSlot(std::uint64_t max_request, UnpackedFrom& unpacked, std::size_t number);

  void begin(const ReadRequest& request, const ReadJob* jobs, const DirectFile& file);
  DirectRead read;
  // Throws CoreError: format when the file ended too early, checksum when a row is wrong.
  RequestOutcome finish();

 private:
  std::byte* bounce(std::size_t nbytes);

  const std::uint64_t max_request_;
  UnpackedFrom& unpacked_;
  const std::size_t number_;
  std::vector<struct iovec> iov_;
  std::unique_ptr<HugeBuffer> bounce_;  // of what is not unpacked, or longer; made on first use
  std::byte* bounced_to_ = nullptr;
  const ReadRequest* request_ = nullptr;
  const ReadJob* jobs_ = nullptr;
  const DirectFile* file_ = nullptr;
  std::uint64_t start_ = 0;  // where `read` starts: before the request when it bounces
};

}  // namespace flashllm
