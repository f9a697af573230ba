#include "io/request_plan.h"

#include <algorithm>
#include <utility>

namespace flashllm {

namespace {

void split_long_jobs(std::vector<ReadJob>& jobs, const RequestLimits& limits) {
  const std::size_t given = jobs.size();
  for (std::size_t i = 0; i < given; ++i) {
    const ReadJob job = jobs[i];
    if (job.nbytes <= limits.max_request || job.unpacking != nullptr) continue;
    // A piece ends between rows, or between 4 KiB blocks, so that it stays as aligned as the job was.
    const std::uint64_t unit = job.row_nbytes != 0 ? job.row_nbytes : 4096;
    const std::uint64_t piece = std::max(unit, limits.max_request / unit * unit);
    jobs[i].nbytes = std::min(piece, job.nbytes);
    for (std::uint64_t start = piece; start < job.nbytes; start += piece) {
      ReadJob part = job;
      part.offset += start;
      part.destination += start;
      part.nbytes = std::min(piece, job.nbytes - start);
      if (part.checksums != nullptr) part.checksums += start / unit;
      jobs.push_back(part);
    }
  }
}

bool is_aligned(const ReadJob& job, const RequestLimits& limits) {
  return job.unpacking == nullptr && job.offset % limits.offset_alignment == 0 &&
         job.nbytes % limits.offset_alignment == 0 &&
         reinterpret_cast<std::uintptr_t>(job.destination) % limits.memory_alignment == 0;
}

}  // namespace

void plan_requests(std::vector<ReadJob>& jobs, const RequestLimits& limits,
                   std::vector<ReadRequest>& requests) {
  requests.clear();
  split_long_jobs(jobs, limits);
  const auto before = [](const ReadJob& a, const ReadJob& b) {
    return std::make_pair(a.file, a.offset) < std::make_pair(b.file, b.offset);
  };
  if (!std::is_sorted(jobs.begin(), jobs.end(), before)) std::sort(jobs.begin(), jobs.end(), before);

  std::uint64_t end = 0;  // of the open request, in the file
  for (std::uint32_t i = 0; i < jobs.size(); ++i) {
    const ReadJob& job = jobs[i];
    const bool aligned = is_aligned(job, limits);
    if (!requests.empty()) {
      ReadRequest& open = requests.back();
      const std::uint64_t gap = job.offset - end;
      const bool gaps = open.gaps || gap != 0;
      const std::uint64_t most = gaps ? std::min(kMaxThrough, limits.max_request) : limits.max_request;
      if (job.offset >= end && gap <= limits.max_gap && gap % limits.offset_alignment == 0 &&
          aligned == open.aligned && job.file == nullptr && jobs[i - 1].file == nullptr &&
          open.num_jobs < kMaxPieces && job.offset + job.nbytes - open.offset <= most) {
        open.nbytes = job.offset + job.nbytes - open.offset;
        open.gaps = gaps;
        ++open.num_jobs;
        end = job.offset + job.nbytes;
        continue;
      }
    }
    requests.push_back({job.offset, job.nbytes, i, 1, aligned, false});
    end = job.offset + job.nbytes;
  }
}

}  // namespace flashllm
