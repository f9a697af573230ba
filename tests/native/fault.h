// Faults for reads and writes: the n-th system call of a file misbehaves in a chosen way. Only a core
// compiled with FLASHLLM_TESTING asks for them (csrc/io/direct_file.cpp, direct_writer.cpp).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <memory>
#include <mutex>

#include "io/direct_file.h"
#include "io/direct_writer.h"

namespace flashllm {

struct Fault {
  // random: one in `argument` calls, of the seed `first`, meets any of the others but hold and interrupt.
  enum class Kind { error, short_read, end_of_file, flip, hold, interrupt, random };

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
    if (fault_.kind == Fault::Kind::random) return distort_at_random(call, iov, got);
    if (call < fault_.first || call - fault_.first >= fault_.count) return got;
    return apply(fault_.kind, fault_.argument, iov, got);
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
  ssize_t apply(Fault::Kind kind, std::uint64_t argument, const struct iovec* iov, ssize_t got) {
    const std::size_t first_piece = got > 0 ? std::min<std::size_t>(iov[0].iov_len, got) : 0;
    switch (kind) {
      case Fault::Kind::error:
        return -static_cast<ssize_t>(argument);
      case Fault::Kind::end_of_file:
        return 0;
      case Fault::Kind::short_read:
        return got > 0 ? static_cast<ssize_t>(std::min<std::size_t>(first_piece, argument)) : got;
      case Fault::Kind::flip:
        if (got > 0) {
          const std::size_t bit = argument % (8 * first_piece);
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
      case Fault::Kind::random:
        break;
    }
    return got;
  }

  // What the n-th call meets depends on seed and n alone.
  ssize_t distort_at_random(std::uint64_t call, const struct iovec* iov, ssize_t got) {
    std::uint64_t bits = fault_.first * 0x9e3779b97f4a7c15U + call;  // splitmix64
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9U;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebU;
    bits ^= bits >> 31;
    if (again_.exchange(false)) return -EIO;  // an error that comes back at once
    if (fault_.argument == 0 || bits % fault_.argument != 0) return got;
    const std::uint64_t argument = bits / fault_.argument / 8;
    switch (bits / fault_.argument % 8) {
      case 0:
        return apply(Fault::Kind::error, EINTR, iov, got);
      case 1:
        return apply(Fault::Kind::error, EAGAIN, iov, got);
      case 2:
        again_ = true;
        return apply(Fault::Kind::error, EIO, iov, got);
      case 3:
        return apply(Fault::Kind::error, EIO, iov, got);
      case 4:
        return apply(Fault::Kind::end_of_file, 0, iov, got);
      case 5:
        return apply(Fault::Kind::short_read, argument % 8192, iov, got);
      default:
        return apply(Fault::Kind::flip, argument, iov, got);
    }
  }

  void hold() {
    std::unique_lock<std::mutex> lock(mutex_);
    held_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
  }

  Fault fault_;
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<bool> again_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false, released_ = false;
};

// The next so many calls refuse: the kernel takes no reads of a ring (EBUSY), a file's first read is
// interrupted (EINTR).
void refuse_enters(std::uint64_t count);
void interrupt_probes(std::uint64_t count);
// The next so many reads, but for the first `after`, never end: their system call (threads) does not return
// before `count` is 0 again, or their completion (io_uring) is lost.
void hang_reads(std::uint64_t count, std::uint64_t after = 0);
void lose_completions(std::uint64_t count);

// What a ring says of `count` reads in a row, from the `first` on, is not what the kernel said.
struct WrongCompletions {
  enum class Kind { id, length, error, twice };

  Kind kind = Kind::id;
  std::uint64_t first = 0;
  std::uint64_t count = 1;
  std::int64_t argument = 0;  // id: bits that are flipped; length: added; error: errno
};
void distort_completions(WrongCompletions wrong);

// From now on the file's reads or writes misbehave by the plan; nullptr: no more.
void inject(const DirectFile& file, std::shared_ptr<FaultPlan> faults);
void inject(const DirectWriter& file, std::shared_ptr<FaultPlan> faults);

}  // namespace flashllm
