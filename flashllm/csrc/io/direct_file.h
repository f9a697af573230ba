// One file, read at given offsets, past the page cache where the file system allows it.
//
// Contract of direct reads: offset, length and memory must be multiples of what statx(STATX_DIOALIGN)
// reports; callers ask `offset_alignment()` and `memory_alignment()`. Some file systems accept O_DIRECT at
// open and refuse it at the first read, so opening reads one block. Others accept it and use the page cache
// all the same (statx says so; tmpfs is made of page cache). A file that cannot be read directly is read
// through the page cache, and `direct()` says so: the caller must tell the user.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashllm {

class DirectFile;

// What direct reads and writes of an open file ask for, or why they would go through the page cache.
struct DirectAlignment {
  static constexpr std::size_t kAssumed = 4096;  // where the kernel does not tell
  std::size_t offset = kAssumed;                 // and length
  std::size_t memory = kAssumed;
  std::string obstacle;  // empty: none known before the first call
};
DirectAlignment direct_alignment(int descriptor);

// One read under way: its next system call, and what the call's result means. Every backend follows the same
// rules: short reads are continued, EINTR and (for a while) EAGAIN repeated, any other error is tried twice
// more; the read stops at the end of the file, wherever that is by now.
class DirectRead {
 public:
  DirectRead() = default;
  // Fills the iovecs from `offset` on; they must be aligned as DirectFile says. Changes `iov`.
  DirectRead(const DirectFile& file, struct iovec* iov, int iovcnt, std::uint64_t offset);

  bool finished() const { return iovcnt_ == 0; }
  // The next call: what `accept` takes. Backends that make it themselves need its parts.
  // Touch only what lives as long as the read: a lost queue's file may be gone (read_queue.h).
  ssize_t call() const;
  int descriptor() const { return fd_; }
  const struct iovec* iov() const { return iov_; }
  int iovcnt() const { return iovcnt_; }
  std::uint64_t offset() const { return offset_ + done_; }
  // The call's result: bytes read, or -errno. Throws CoreError(io) naming path, offset, size and errno when
  // the read failed for good.
  void accept(ssize_t result);

  std::uint64_t nbytes() const { return done_; }  // read so far
  std::uint64_t retries() const { return retries_; }

 private:
  std::size_t nbytes_left() const;

  const DirectFile* file_ = nullptr;
  int fd_ = -1;
  struct iovec* iov_ = nullptr;
  int iovcnt_ = 0;
  std::uint64_t offset_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t retries_ = 0;
  int failures_ = 0;
  int waits_ = 0;
};

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
  const std::string& fallback_reason() const {
    return fallback_reason_;
  }  // empty when direct, or not asked for
  std::size_t offset_alignment() const { return offset_alignment_; }
  std::size_t memory_alignment() const { return memory_alignment_; }

 private:
  friend class DirectRead;

  void open_buffered(const std::string& reason);
  std::string why_not_direct();  // empty when reads of the open file can be direct; sets the alignments
  std::uint64_t current_size() const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
  bool direct_ = false;
  std::string fallback_reason_;
  std::size_t offset_alignment_ = 1;
  std::size_t memory_alignment_ = 1;
};

}  // namespace flashllm
