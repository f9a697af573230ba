// Jobs to requests: which rows one system call reads. Plain bookkeeping; knows no file and reads nothing.
//
// Jobs are sorted by offset. Neighbours merge into one vectored request; no request exceeds `max_request`
// bytes or kMaxPieces pieces, and a longer job is split (between rows where it has rows). Those with a gap of
// at most `max_gap` bytes between them merge, too, up to kMaxThrough bytes: such a request bounces, that is,
// it is read in one piece and its jobs are copied out, as pieces that end within pages cost a drive more than
// the copy does (bench/log). So does one of which any piece is unaligned, and one whose bytes are unpacked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashllm {

class DirectFile;

// How bytes that lie in a file otherwise than in memory are put in place.
class Unpacking {
 public:
  virtual ~Unpacking() = default;
  // `stored`: `nbytes` of a slice, from its byte `first` on; `rows`: where the slice's rows begin. Brief: it
  // runs where a read ends. Throws CoreError for bytes that cannot be.
  virtual void unpack(const std::byte* stored, std::uint64_t first, std::uint64_t nbytes,
                      std::byte* rows) const = 0;
};

struct ReadJob {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::byte* destination = nullptr;
  const std::uint64_t* checksums = nullptr;  // xxh3-64 of each row of `row_nbytes`, or nullptr: not checked
  std::uint32_t row_nbytes = 0;              // 0: not rows
  bool landed = false;                       // read and checked; set by the Reader
  const DirectFile* file = nullptr;          // nullptr: the batch's
  const Unpacking* unpacking = nullptr;      // nullptr: bytes are copied. Else the job is not split, and
  std::uint64_t first = 0;                   // it begins at this byte of a slice
};

struct ReadRequest {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;     // gaps included
  std::uint32_t first_job = 0;  // into the plan's jobs
  std::uint32_t num_jobs = 0;
  bool aligned = true;  // all its pieces
  bool gaps = false;    // between its pieces

  bool bounces() const { return gaps || !aligned; }
};

struct RequestLimits {
  std::uint64_t max_gap = 0;
  std::uint64_t max_request = std::uint64_t{1} << 20;
  std::size_t offset_alignment = 1;  // of the batch's file; jobs of another one are never merged
  std::size_t memory_alignment = 1;
};

constexpr std::uint32_t kMaxPieces = 512;
static_assert(kMaxPieces <= 1024, "pieces must fit the kernel's IOV_MAX");
constexpr std::uint64_t kMaxThrough = std::uint64_t{64} << 10;  // bytes of a request with gaps

// Sorts and splits `jobs` in place and fills `requests`. Both vectors keep their capacity between tokens.
void plan_requests(std::vector<ReadJob>& jobs, const RequestLimits& limits,
                   std::vector<ReadRequest>& requests);

}  // namespace flashllm
