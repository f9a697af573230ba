// One request on its way: the iovecs it reads into, and afterwards its rows put in place and checked.
// Backends begin it, make the system calls its `read` asks for, and finish it.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
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

// Holds the memory of one request at a time, where it bounces.
class RequestSlot {
 public:
  explicit RequestSlot(std::uint64_t max_request);

  void begin(const ReadRequest& request, const ReadJob* jobs, const DirectFile& file);
  DirectRead read;
  // Throws CoreError: format when the file ended too early, checksum when `verify` and a row is wrong.
  RequestOutcome finish(bool verify);

 private:
  std::byte* bounce(std::size_t nbytes);

  const std::uint64_t max_request_;
  std::vector<struct iovec> iov_;
  std::unique_ptr<HugeBuffer> bounce_;  // made on first use
  const ReadRequest* request_ = nullptr;
  const ReadJob* jobs_ = nullptr;
  const DirectFile* file_ = nullptr;
  std::uint64_t start_ = 0;  // where `read` starts: before the request when it bounces
};

}  // namespace flashllm
