// One file, read at given offsets, past the page cache where the file system allows it.
//
// Contract of direct reads: offset, length and memory must be multiples of what statx(STATX_DIOALIGN)
// reports; callers ask `offset_alignment()` and `memory_alignment()`. Some file systems accept O_DIRECT at
// open and refuse it at the first read, so opening reads one block. Others accept it and use the page cache
// all the same (statx says so; tmpfs is made of page cache). A file that cannot be read directly is read
// through the page cache, and `direct()` says so: whoever opened it must tell the user.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fault.h"

namespace flashllm {

class DirectFile {
 public:
  // Throws CoreError(io) when the file cannot be opened or read at all.
  DirectFile(std::string path, bool want_direct);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  bool direct() const { return direct_; }
  const std::string& fallback_reason() const { return fallback_reason_; }  // empty when direct or not wanted
  std::size_t offset_alignment() const { return offset_alignment_; }
  std::size_t memory_alignment() const { return memory_alignment_; }

  // Fills the iovecs from `offset` on; they must be aligned as above when direct(). Stops at the end of the
  // file, wherever that is by now. Short reads are continued, EINTR and (for a while) EAGAIN repeated, any
  // other error tried twice more. Returns the bytes read, adds to `retries`, and throws CoreError(io) naming
  // path, offset, size and errno. Changes `iov`.
  std::size_t read(struct iovec* iov, int iovcnt, std::uint64_t offset, std::uint64_t& retries) const;

  void inject(std::shared_ptr<FaultPlan> faults) { faults_ = std::move(faults); }  // tests only

 private:
  void open_buffered(const std::string& reason);
  std::string why_not_direct();  // empty when reads of the open file can be direct; sets the alignments
  std::uint64_t current_size() const;
  ssize_t read_once(const struct iovec* iov, int iovcnt, std::uint64_t offset) const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  bool direct_ = false;
  std::string fallback_reason_;
  std::size_t offset_alignment_ = 1;
  std::size_t memory_alignment_ = 1;
  std::shared_ptr<FaultPlan> faults_;
};

}  // namespace flashllm
