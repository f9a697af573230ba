#include "io/direct_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "io/direct_file.h"
#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

#ifdef FLASHLLM_TESTING  // tests/native/fault.cpp
ssize_t distort_write(const DirectWriter& file, const struct iovec* iov, ssize_t result);
void forget_faults(const DirectWriter& file);
#endif

namespace {

constexpr std::size_t kPiece = std::size_t{2} << 20;  // bytes a thread writes at a time
constexpr int kPatience = 1000;                       // EAGAINs in a row, and calls that wrote no sector
static_assert(kPiece % DirectWriter::kAlignment == 0, "pieces must be aligned");

}  // namespace

DirectWriter::DirectWriter(std::string path, std::uint64_t nbytes, int threads)
    : path_(std::move(path)), size_(nbytes), threads_(static_cast<std::size_t>(threads)) {
  require(nbytes != 0 && nbytes % kAlignment == 0, "a file's size must be a positive multiple of " +
                                                       std::to_string(kAlignment) + ", got " +
                                                       std::to_string(nbytes));
  require(threads >= 1 && threads <= 1024,
          "writer threads must be 1 to 1024, got " + std::to_string(threads));
  require_room();
  create();
  try {
    allocate();
    fallback_reason_ = make_direct();
    direct_ = fallback_reason_.empty();
  } catch (...) {
    close();
    unlink(path_.c_str());
    throw;
  }
}

// Before the file exists: a drive that is too small would be filled to its last block before it says so, and
// everyone else on it would be out of room until the file is gone again.
void DirectWriter::require_room() const {
  const std::string folder = std::filesystem::path(path_).parent_path().string();
  struct statvfs system;
  if (statvfs(folder.empty() ? "." : folder.c_str(), &system) != 0) return;  // create() says what is wrong
  const std::uint64_t free = std::uint64_t{system.f_bavail} * system.f_frsize;
  if (free < size_) throw_no_room(", of which " + std::to_string(free) + " bytes are free", ENOSPC);
}

void DirectWriter::create() {
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (fd_ < 0) throw CoreError(ErrorKind::io, "cannot create " + path_ + ": " + described(errno));
}

void DirectWriter::allocate() {
  int result;
  do {
#if defined(__linux__)
    result = fallocate(fd_, 0, 0, static_cast<off_t>(size_)) == 0 ? 0 : errno;
#else
    result = ENOTSUP;
#endif
  } while (result == EINTR);
  if (result == EOPNOTSUPP || result == ENOTSUP)  // a file with holes: its room is not kept
    result = ftruncate(fd_, static_cast<off_t>(size_)) == 0 ? 0 : errno;
  if (result != 0) throw_no_room("", result);
}

void DirectWriter::throw_no_room(const std::string& free, int error) const {
  throw CoreError(ErrorKind::io, "cannot make room for " + std::to_string(size_) + " bytes on the drive of " +
                                     path_ + free + ": " + described(error));
}

std::string DirectWriter::make_direct() {
  const DirectAlignment alignment = direct_alignment(fd_);
  if (!alignment.obstacle.empty()) return alignment.obstacle;
  if (kAlignment % alignment.offset != 0)
    return "direct writes must be multiples of " + std::to_string(alignment.offset) + " bytes";
#if defined(O_DIRECT)
  const int flags = fcntl(fd_, F_GETFL);
  if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) return std::generic_category().message(errno);
  // Some file systems accept the flag and refuse the first write.
  const HugeBuffer block(kAlignment);
  if (pwrite(fd_, block.data(), kAlignment, 0) < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
    const std::string reason = std::generic_category().message(errno);
    if (fcntl(fd_, F_SETFL, flags) != 0)
      throw CoreError(ErrorKind::io, "cannot write " + path_ + ": " + described(errno));
    return reason;
  }
#elif defined(F_NOCACHE)
  if (fcntl(fd_, F_NOCACHE, 1) != 0) return std::generic_category().message(errno);
#else
  return "this system has no direct writes";
#endif
  memory_alignment_ = alignment.memory;
  return "";
}

void DirectWriter::require_run(const Run& run) const {
  require(run.offset % kAlignment == 0 && run.nbytes % kAlignment == 0 && run.nbytes != 0,
          "a write's offset and size must be multiples of " + std::to_string(kAlignment) + ", got " +
              std::to_string(run.nbytes) + " bytes at " + std::to_string(run.offset));
  require(run.offset <= size_ && run.nbytes <= size_ - run.offset,
          "a write of " + std::to_string(run.nbytes) + " bytes at " + std::to_string(run.offset) +
              " reaches beyond the file's " + std::to_string(size_));
  require(reinterpret_cast<std::uintptr_t>(run.data) % memory_alignment_ == 0,
          "direct writes need memory at a multiple of " + std::to_string(memory_alignment_) + " bytes");
}

void DirectWriter::write(const std::vector<Run>& runs) {
  const std::shared_lock<std::shared_mutex> open(open_);
  require(fd_ >= 0, "cannot write " + path_ + ": it is closed");
  std::vector<Run> pieces;
  for (const Run& run : runs) {
    require_run(run);
    for (std::size_t at = 0; at < run.nbytes; at += kPiece)
      pieces.push_back({run.offset + at, run.data + at, std::min(kPiece, run.nbytes - at)});
  }
  std::atomic<std::size_t> next{0};
  std::mutex failing;
  std::exception_ptr error;
  const auto fail = [&] {
    const std::lock_guard<std::mutex> lock(failing);
    if (error == nullptr) error = std::current_exception();
    next = pieces.size();
  };
  const auto serve = [&] {
    try {
      for (std::size_t i = next++; i < pieces.size(); i = next++) write_piece(pieces[i]);
    } catch (...) {
      fail();
    }
  };
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(threads_);
    while (helpers.size() + 1 < std::min(threads_, pieces.size())) helpers.emplace_back(serve);
  } catch (...) {
    fail();
  }
  serve();
  for (std::thread& helper : helpers) helper.join();
  if (error != nullptr) std::rethrow_exception(error);
}

// Short writes are continued, from the last whole sector on; EINTR and (for a while) EAGAIN are repeated.
void DirectWriter::write_piece(const Run& piece) const {
  std::size_t written = 0;
  int in_vain = 0;
  while (written < piece.nbytes) {
    const struct iovec rest{const_cast<std::byte*>(piece.data + written), piece.nbytes - written};
    const ssize_t result =
        pwrite(fd_, rest.iov_base, rest.iov_len, static_cast<off_t>(piece.offset + written));
    ssize_t got = result < 0 ? -errno : result;
#ifdef FLASHLLM_TESTING
    got = distort_write(*this, &rest, got);
#endif
    if (got == -EINTR) continue;
    const std::size_t whole = got > 0 ? static_cast<std::size_t>(got) / kAlignment * kAlignment : 0;
    written += whole;
    if (whole != 0) {
      in_vain = 0;
    } else if ((got >= 0 || got == -EAGAIN) && ++in_vain < kPatience) {
      std::this_thread::yield();
    } else {
      const std::string reason =
          got < 0 ? described(static_cast<int>(-got)) : "the drive takes no more bytes";
      throw CoreError(ErrorKind::io,
                      "writing " + std::to_string(rest.iov_len) + " bytes at offset " +
                          std::to_string(piece.offset + written) + " failed, " + path_ + ": " + reason,
                      piece.offset + written);
    }
  }
}

void DirectWriter::close() {
  const std::unique_lock<std::shared_mutex> alone(open_);
  if (fd_ < 0) return;
#ifdef FLASHLLM_TESTING
  forget_faults(*this);
#endif
  ::close(fd_);
  fd_ = -1;
}

}  // namespace flashllm
