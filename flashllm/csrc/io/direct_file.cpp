#include "io/direct_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

#ifdef FLASHLLM_TESTING  // tests/native/fault.cpp
ssize_t distort_read(const DirectFile& file, const struct iovec* iov, ssize_t result);
void forget_faults(const DirectFile& file);
bool interrupts_probe();
void hang_if_asked();
#endif

namespace {

constexpr int kExtraTries = 2;   // a failing read is tried twice more
constexpr int kPatience = 1000;  // EINTRs and EAGAINs in a row: a file that is never ready must not hang us

[[noreturn]] void throw_io(const std::string& what, const std::string& path, int error,
                           std::uint64_t offset = CoreError::kNoOffset) {
  throw CoreError(ErrorKind::io, what + " " + path + ": " + described(error), offset);
}

int open_for_direct_reads(const std::string& path) {
#if defined(O_DIRECT)
  return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
#elif defined(F_NOCACHE)
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd >= 0 && fcntl(fd, F_NOCACHE, 1) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
#else
  errno = ENOTSUP;
  return -1;
#endif
}

}  // namespace

DirectFile::DirectFile(std::string path, bool want_direct) : path_(std::move(path)) {
  // 1. Open; a file system that refuses direct reads at once is met here.
  fd_ = want_direct ? open_for_direct_reads(path_) : -1;
  direct_ = fd_ >= 0;
  if (!direct_) open_buffered(want_direct ? std::generic_category().message(errno) : "");

  try {
    // 2. Size.
    struct stat status;
    if (fstat(fd_, &status) != 0) throw_io("cannot read", path_, errno);
    if (!S_ISREG(status.st_mode))
      throw CoreError(ErrorKind::io, "cannot read " + path_ + ": not a regular file");
    size_ = static_cast<std::uint64_t>(status.st_size);

    // 3. A file system that accepts the flag and goes through the page cache, or refuses the first read.
    const std::string reason = direct_ ? why_not_direct() : "";
    if (reason.empty()) return;
    close(std::exchange(fd_, -1));
    open_buffered(reason);
  } catch (...) {
    if (fd_ >= 0) close(fd_);
    throw;
  }
}

DirectAlignment direct_alignment([[maybe_unused]] int descriptor) {
  DirectAlignment alignment;
#if defined(__linux__)
  struct statfs system;
  if (fstatfs(descriptor, &system) == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    alignment.obstacle = "the file lies in memory";
    return alignment;
  }
#endif
#if defined(STATX_DIOALIGN)
  struct statx extended;
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &extended) == 0 &&
      (extended.stx_mask & STATX_DIOALIGN) != 0) {
    if (extended.stx_dio_offset_align == 0) {
      alignment.obstacle = "the file system has no direct reads and writes for this file";
    } else {
      alignment.offset = extended.stx_dio_offset_align;
      alignment.memory = std::max<std::size_t>(extended.stx_dio_mem_align, 1);
    }
  }
#endif
  return alignment;
}

std::string DirectFile::why_not_direct() {
  const DirectAlignment alignment = direct_alignment(fd_);
  if (!alignment.obstacle.empty()) return alignment.obstacle;
  offset_alignment_ = alignment.offset;
  memory_alignment_ = alignment.memory;
  const HugeBuffer block(std::max(offset_alignment_, memory_alignment_));
  if (size_ == 0) return "";
  ssize_t got = 0;
  do {
    got = pread(fd_, block.data(), offset_alignment_, 0);
#ifdef FLASHLLM_TESTING
    if (interrupts_probe()) {
      got = -1;
      errno = EINTR;
    }
#endif
  } while (got < 0 && errno == EINTR);
  if (got >= 0) return "";
  const int error = errno;
  if (error == EINVAL || error == ENOTSUP) return std::generic_category().message(error);
  throw_io("cannot read", path_, error, 0);
}

void DirectFile::open_buffered(const std::string& reason) {
  fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw_io("cannot open", path_, errno);
  direct_ = false;
  fallback_reason_ = reason;
  offset_alignment_ = memory_alignment_ = 1;
#if defined(POSIX_FADV_RANDOM)
  posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // rows are scattered: read-ahead would multiply the bytes
#endif
}

std::uint64_t DirectFile::current_size() const {
  struct stat status;
  return fstat(fd_, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : size_;
}

DirectFile::~DirectFile() {
#ifdef FLASHLLM_TESTING
  forget_faults(*this);
#endif
  if (fd_ >= 0) close(fd_);
}

DirectRead::DirectRead(const DirectFile& file, struct iovec* iov, int iovcnt, std::uint64_t offset)
    : file_(&file), fd_(file.fd_), iov_(iov), iovcnt_(iovcnt), offset_(offset) {}

std::size_t DirectRead::nbytes_left() const {
  std::size_t nbytes = 0;
  for (int i = 0; i < iovcnt_; ++i) nbytes += iov_[i].iov_len;
  return nbytes;
}

ssize_t DirectRead::call() const {
#ifdef FLASHLLM_TESTING
  hang_if_asked();
#endif
  const ssize_t got = preadv(descriptor(), iov_, iovcnt_, static_cast<off_t>(offset()));
  return got < 0 ? -errno : got;
}

void DirectRead::accept(ssize_t result) {
#ifdef FLASHLLM_TESTING
  result = distort_read(*file_, iov_, result);
#endif
  if (result < 0) {
    const auto error = static_cast<int>(-result);
    if ((error == EINTR || error == EAGAIN) && ++waits_ < kPatience) {
      if (error == EAGAIN) std::this_thread::yield();
      return;
    }
    ++retries_;
    if (++failures_ <= kExtraTries) return;
    throw_io("reading " + std::to_string(nbytes_left()) + " bytes at offset " + std::to_string(offset()) +
                 " failed three times,",
             file_->path_, error, offset());
  }
  if (result == 0) {  // the end of the file
    iovcnt_ = 0;
    return;
  }
  if (static_cast<std::size_t>(result) > nbytes_left())
    throw CoreError(ErrorKind::io,
                    "reading " + std::to_string(nbytes_left()) + " bytes at offset " +
                        std::to_string(offset()) + " gave more, " + std::to_string(result) + ", " +
                        file_->path_,
                    offset());
  waits_ = 0;
  done_ += static_cast<std::size_t>(result);
  // A short read: step over what came. A direct read that stopped between sectors can only be the file's
  // end.
  auto left = static_cast<std::size_t>(result);
  while (iovcnt_ > 0 && left >= iov_->iov_len) {
    left -= iov_->iov_len;
    ++iov_;
    --iovcnt_;
  }
  if (iovcnt_ == 0 || left == 0) return;
  if (file_->direct_ && (left % file_->memory_alignment_ != 0 || offset() % file_->offset_alignment_ != 0)) {
    if (offset() >= file_->current_size()) {
      iovcnt_ = 0;
      return;
    }
    // Mid-file and unaligned: read this piece again from its last sector, but not for ever.
    const std::size_t back = offset() % file_->offset_alignment_;
    done_ -= back;
    left -= back;
    if (left == 0 && ++failures_ > kExtraTries) {
      throw CoreError(ErrorKind::io,
                      "reading at offset " + std::to_string(offset()) +
                          " returned less than one sector three times, " + file_->path_,
                      offset());
    }
  }
  iov_->iov_base = static_cast<char*>(iov_->iov_base) + left;
  iov_->iov_len -= left;
}

}  // namespace flashllm
