#include "io/direct_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
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

std::string described(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

}  // namespace

DirectWriter::DirectWriter(std::string path, std::uint64_t nbytes, int threads)
    : path_(std::move(path)), size_(nbytes) {
  if (nbytes == 0 || nbytes % kAlignment != 0)
    throw CoreError(ErrorKind::usage, "a file's size must be a positive multiple of " +
                                          std::to_string(kAlignment) + ", got " + std::to_string(nbytes));
  if (threads < 1 || threads > 1024)
    throw CoreError(ErrorKind::usage, "writer threads must be 1 to 1024, got " + std::to_string(threads));
  require_room();
  create();
  try {
    allocate();
    fallback_reason_ = make_direct();
    direct_ = fallback_reason_.empty();
    threads_.reserve(static_cast<std::size_t>(threads));
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    stop();
    unlink(path_.c_str());
    throw;
  }
}

DirectWriter::~DirectWriter() {
  try {
    close();
  } catch (const CoreError&) {  // nobody waited for it
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

std::uint64_t DirectWriter::write(std::uint64_t offset, const std::byte* data, std::size_t nbytes) {
  if (offset % kAlignment != 0 || nbytes % kAlignment != 0 || nbytes == 0)
    throw CoreError(ErrorKind::usage, "a write's offset and size must be multiples of " +
                                          std::to_string(kAlignment) + ", got " + std::to_string(nbytes) +
                                          " bytes at " + std::to_string(offset));
  if (offset > size_ || nbytes > size_ - offset)
    throw CoreError(ErrorKind::usage, "a write of " + std::to_string(nbytes) + " bytes at " +
                                          std::to_string(offset) + " reaches beyond the file's " +
                                          std::to_string(size_));
  if (reinterpret_cast<std::uintptr_t>(data) % memory_alignment_ != 0)
    throw CoreError(ErrorKind::usage, "direct writes need memory at a multiple of " +
                                          std::to_string(memory_alignment_) + " bytes");
  std::uint64_t ticket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw CoreError(ErrorKind::usage, "cannot write " + path_ + ": it is closed");
    ticket = next_ticket_++;
    writes_.emplace(ticket, Write{offset, data, nbytes, 0, nbytes, nullptr});
    unclaimed_.push_back(ticket);
    ++under_way_;
  }
  work_.notify_all();
  return ticket;
}

// The mutex is held: the next bytes of the earliest write that has any.
DirectWriter::Piece DirectWriter::claim() {
  const std::uint64_t ticket = unclaimed_.front();
  Write& write = writes_.at(ticket);
  const Piece piece{ticket, write.offset + write.claimed, write.data + write.claimed,
                    std::min(kPiece, write.nbytes - write.claimed)};
  write.claimed += piece.nbytes;
  if (write.claimed == write.nbytes) unclaimed_.pop_front();
  return piece;
}

void DirectWriter::finish(const Piece& piece, std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Write& write = writes_.at(piece.ticket);
  write.unfinished -= piece.nbytes;
  if (error != nullptr) {
    if (write.error == nullptr) write.error = std::move(error);
    if (write.claimed != write.nbytes) {  // the rest is not tried
      write.unfinished -= write.nbytes - write.claimed;
      write.claimed = write.nbytes;
      unclaimed_.erase(std::find(unclaimed_.begin(), unclaimed_.end(), piece.ticket));
    }
  }
  if (write.unfinished != 0) return;
  if (write.error == nullptr) writes_.erase(piece.ticket);
  --under_way_;
  done_.notify_all();
}

void DirectWriter::serve() {
  for (;;) {
    Piece piece;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_.wait(lock, [this] { return stopping_ || !unclaimed_.empty(); });
      if (unclaimed_.empty()) return;
      piece = claim();
    }
    std::exception_ptr error;
    try {
      write_piece(piece);
    } catch (...) {
      error = std::current_exception();
    }
    finish(piece, std::move(error));
  }
}

// Short writes are continued, from the last whole sector on; EINTR and (for a while) EAGAIN are repeated.
void DirectWriter::write_piece(const Piece& piece) const {
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

bool DirectWriter::is_finished(std::uint64_t ticket) const {
  if (ticket >= next_ticket_)
    throw CoreError(ErrorKind::usage, "no write has the ticket " + std::to_string(ticket));
  const auto found = writes_.find(ticket);
  return found == writes_.end() || found->second.unfinished == 0;
}

bool DirectWriter::finished(std::uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_finished(ticket);
}

void DirectWriter::wait(std::uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return is_finished(ticket); });
  const auto failed = writes_.find(ticket);
  if (failed == writes_.end()) return;
  const std::exception_ptr error = failed->second.error;
  writes_.erase(failed);
  std::rethrow_exception(error);
}

void DirectWriter::wait_all() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return under_way_ == 0; });
  if (writes_.empty()) return;
  const std::exception_ptr error = writes_.begin()->second.error;
  writes_.clear();
  std::rethrow_exception(error);
}

void DirectWriter::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
#ifdef FLASHLLM_TESTING
  forget_faults(*this);
#endif
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void DirectWriter::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  stop();  // threads end when nothing is left to write
  wait_all();
}

}  // namespace flashllm
