// A ring of reads shared with the kernel: io_uring(7) by raw system calls, no library. Knows descriptors,
// iovecs and numbers, no files and no batches. One thread at a time uses a ring, any thread.
//
// Rings are locked memory to kernels before 5.12 and again to newer ones: on 6.18 an RLIMIT_MEMLOCK of 64 KiB
// was enough for 65 entries and 16 KiB for 33. Where no ring can be made, the error says why.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

struct io_uring_sqe;
struct io_uring_cqe;

namespace flashllm {

class IoUring {
 public:
  // Room for `entries` operations under way. Throws CoreError(io) saying why not.
  explicit IoUring(unsigned entries);
  ~IoUring() { release(); }
  IoUring(const IoUring&) = delete;
  IoUring& operator=(const IoUring&) = delete;

  // Queues a read; the iovecs stay where they are until it is reaped.
  void read(std::uint64_t id, int descriptor, const struct iovec* iov, int iovcnt, std::uint64_t offset);

  // Submits what was queued and collects completions; returns when `wait_for` of them can be reaped, a signal
  // came, or `at_most` is over (kernels before 5.11 do not look at the time). False where the kernel refuses
  // for now (it is short of memory, or busy).
  bool submit(unsigned wait_for, std::chrono::milliseconds at_most);
  // The ids of the reads that the kernel does not have, taken out of the queue.
  std::vector<std::uint64_t> take_back();
  // Whether `submit` has anything to do.
  bool has_work() const;

  // The next completion: bytes or -errno. False when there is none.
  bool reap(std::uint64_t& id, ssize_t& result);

 private:
  void setup(unsigned entries);
  void* map(std::size_t nbytes, std::uint64_t offset);
  void release();

  int descriptor_ = -1;
  void* rings_ = nullptr;
  std::size_t rings_nbytes_ = 0;
  void* entries_ = nullptr;
  std::size_t entries_nbytes_ = 0;
  // In the shared rings: heads and tails are exchanged with the kernel.
  unsigned* sq_tail_ = nullptr;
  unsigned* sq_flags_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* cq_head_ = nullptr;
  unsigned* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  struct io_uring_sqe* sqes_ = nullptr;
  struct io_uring_cqe* cqes_ = nullptr;
  unsigned unsubmitted_ = 0;
  bool has_timeouts_ = false;
};

}  // namespace flashllm
