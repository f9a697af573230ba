// Faults for reads and writes: the n-th system call of a file misbehaves in a chosen way. Only a core
// compiled with FLASHLLM_TESTING asks for them (csrc/io/direct_file.cpp, direct_writer.cpp).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <memory>
#include <mutex>

#include "io/direct_file.h"
#include "io/direct_writer.h"

namespace flashllm {

struct Fault {
  enum class Kind { error, short_read, end_of_file, flip, hold, interrupt };

  Kind kind = Kind::error;
  std::uint64_t first = 0;  // index of the first call that misbehaves
  std::uint64_t count = 1;  // how many calls in a row do
  std::uint64_t argument =
      0;  // error: errno; short_read: bytes let through; flip: the bit of the data flipped
};

class FaultPlan {
 public:
  explicit FaultPlan(Fault fault) : fault_(fault) {}

  // What the next call is said to have returned (bytes or -errno), given what it did.
  ssize_t distort(const struct iovec* iov, ssize_t got) {
    const std::uint64_t call = calls_.fetch_add(1);
    if (call < fault_.first || call - fault_.first >= fault_.count) return got;
    const std::size_t first_piece = got > 0 ? std::min<std::size_t>(iov[0].iov_len, got) : 0;
    switch (fault_.kind) {
      case Fault::Kind::error:
        return -static_cast<ssize_t>(fault_.argument);
      case Fault::Kind::end_of_file:
        return 0;
      case Fault::Kind::short_read:
        return got > 0 ? static_cast<ssize_t>(std::min<std::size_t>(first_piece, fault_.argument)) : got;
      case Fault::Kind::flip:
        if (got > 0) {
          const std::size_t bit = fault_.argument % (8 * first_piece);
          static_cast<unsigned char*>(iov[0].iov_base)[bit / 8] ^=
              static_cast<unsigned char>(1U << (bit % 8));
        }
        return got;
      case Fault::Kind::hold:
        hold();
        return got;
      case Fault::Kind::interrupt:
        kill(getpid(), SIGINT);
        return got;
    }
    return got;
  }

  std::uint64_t calls() const { return calls_; }

  // Of Kind::hold: the call returns only after release().
  void wait_until_held() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return held_; });
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  void hold() {
    std::unique_lock<std::mutex> lock(mutex_);
    held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
  }

  Fault fault_;
  std::atomic<std::uint64_t> calls_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false, released_ = false;
};

// The next so many calls refuse: the kernel takes no reads of a ring (EBUSY), a file's first read is
// interrupted (EINTR).
void refuse_enters(std::uint64_t count);
void interrupt_probes(std::uint64_t count);

// From now on the file's reads or writes misbehave by the plan; nullptr: no more.
void inject(const DirectFile& file, std::shared_ptr<FaultPlan> faults);
void inject(const DirectWriter& file, std::shared_ptr<FaultPlan> faults);

}  // namespace flashllm
