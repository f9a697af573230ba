#include "io/io_uring.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>

#include "io/error.h"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashllm {

#ifdef FLASHLLM_TESTING  // tests/native/fault.cpp
bool refuses_enter();
bool loses_completion();
bool repeats_completion(std::uint64_t& id, ssize_t& result);
void distort_completion(std::uint64_t& id, ssize_t& result);
#endif

#if defined(IORING_FEAT_FAST_POLL) && defined(__NR_io_uring_setup)

namespace {

std::string describe(const char* call) { return std::string(call) + ": " + described(errno); }

// `at_most` in milliseconds; none where the kernel has no timeouts.
int enter(int descriptor, unsigned to_submit, unsigned min_complete,
          const std::chrono::milliseconds* at_most) {
#ifdef FLASHLLM_TESTING
  if (refuses_enter()) {
    errno = EBUSY;
    return -1;
  }
#endif
#if defined(IORING_ENTER_EXT_ARG)
  if (at_most != nullptr && min_complete != 0) {
    struct __kernel_timespec time{};
    time.tv_sec = at_most->count() / 1000;
    time.tv_nsec = at_most->count() % 1000 * 1'000'000;
    struct io_uring_getevents_arg argument{};
    argument.ts = reinterpret_cast<std::uintptr_t>(&time);
    return static_cast<int>(syscall(__NR_io_uring_enter, descriptor, to_submit, min_complete,
                                    IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG, &argument,
                                    sizeof(argument)));
  }
#endif
  static_cast<void>(at_most);
  return static_cast<int>(syscall(__NR_io_uring_enter, descriptor, to_submit, min_complete,
                                  IORING_ENTER_GETEVENTS, nullptr, std::size_t{0}));
}

}  // namespace

IoUring::IoUring(unsigned entries) {
  try {
    setup(entries);
  } catch (...) {
    release();
    throw;
  }
}

void IoUring::setup(unsigned entries) {
  // 1. The ring. Completions are collected when the submitting thread next calls the kernel (5.19): a
  // notification for each would interrupt its products. Older kernels refuse the flags and notify.
  struct io_uring_params params{};
#if defined(IORING_SETUP_TASKRUN_FLAG)
  params.flags = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
#endif
  descriptor_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  if (descriptor_ < 0 && errno == EINVAL && params.flags != 0) {
    params = {};
    descriptor_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params));
  }
  if (descriptor_ < 0) throw CoreError(ErrorKind::io, describe("io_uring_setup"));
  constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_FAST_POLL;
  if ((params.features & kNeeded) != kNeeded)
    throw CoreError(ErrorKind::io, "this kernel's io_uring is older than Linux 5.7");
#if defined(IORING_FEAT_EXT_ARG)
  has_timeouts_ = (params.features & IORING_FEAT_EXT_ARG) != 0;
#endif

  // 2. Its memory.
  rings_nbytes_ = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
  rings_ = map(rings_nbytes_, IORING_OFF_SQ_RING);
  entries_nbytes_ = params.sq_entries * sizeof(io_uring_sqe);
  entries_ = map(entries_nbytes_, IORING_OFF_SQES);
  const auto in_rings = [this](unsigned offset) {
    return reinterpret_cast<unsigned*>(static_cast<char*>(rings_) + offset);
  };
  sq_tail_ = in_rings(params.sq_off.tail);
  sq_flags_ = in_rings(params.sq_off.flags);
  sq_mask_ = *in_rings(params.sq_off.ring_mask);
  sq_array_ = in_rings(params.sq_off.array);
  cq_head_ = in_rings(params.cq_off.head);
  cq_tail_ = in_rings(params.cq_off.tail);
  cq_mask_ = *in_rings(params.cq_off.ring_mask);
  cqes_ = reinterpret_cast<io_uring_cqe*>(in_rings(params.cq_off.cqes));
  sqes_ = static_cast<io_uring_sqe*>(entries_);
}

void* IoUring::map(std::size_t nbytes, std::uint64_t offset) {
  void* mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor_,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) throw CoreError(ErrorKind::io, describe("mapping an io_uring"));
  return mapped;
}

void IoUring::release() {
  if (entries_ != nullptr) munmap(entries_, entries_nbytes_);
  if (rings_ != nullptr) munmap(rings_, rings_nbytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void IoUring::read(std::uint64_t id, int descriptor, const struct iovec* iov, int iovcnt,
                   std::uint64_t offset) {
  const unsigned tail = *sq_tail_;  // only we move it
  io_uring_sqe& sqe = sqes_[tail & sq_mask_];
  sqe = {};
  sqe.opcode = IORING_OP_READV;
  sqe.fd = descriptor;
  sqe.addr = reinterpret_cast<std::uintptr_t>(iov);
  sqe.len = static_cast<unsigned>(iovcnt);
  sqe.off = offset;
  sqe.user_data = id;
  sq_array_[tail & sq_mask_] = tail & sq_mask_;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++unsubmitted_;
}

bool IoUring::has_work() const {
#if defined(IORING_SQ_TASKRUN)
  if ((__atomic_load_n(sq_flags_, __ATOMIC_RELAXED) & IORING_SQ_TASKRUN) != 0) return true;
#endif
  return unsubmitted_ != 0;
}

bool IoUring::submit(unsigned wait_for, std::chrono::milliseconds at_most) {
  const int submitted = enter(descriptor_, unsubmitted_, wait_for, has_timeouts_ ? &at_most : nullptr);
  if (submitted < 0) return errno == EINTR || errno == ETIME;
  unsubmitted_ -= static_cast<unsigned>(submitted);
  return true;
}

std::vector<std::uint64_t> IoUring::take_back() {
  std::vector<std::uint64_t> ids;
  const unsigned tail = *sq_tail_;
  for (unsigned at = tail - unsubmitted_; at != tail; ++at) ids.push_back(sqes_[at & sq_mask_].user_data);
  __atomic_store_n(sq_tail_, tail - unsubmitted_, __ATOMIC_RELEASE);  // the kernel looks in `enter` alone
  unsubmitted_ = 0;
  return ids;
}

bool IoUring::reap(std::uint64_t& id, ssize_t& result) {
#ifdef FLASHLLM_TESTING
  if (repeats_completion(id, result)) return true;
#endif
  const unsigned head = *cq_head_;  // only we move it
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& cqe = cqes_[head & cq_mask_];
  id = cqe.user_data;
  result = cqe.res;
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
#ifdef FLASHLLM_TESTING
  if (loses_completion()) return reap(id, result);
  distort_completion(id, result);
#endif
  return true;
}

#else

IoUring::IoUring(unsigned) {
  throw CoreError(ErrorKind::io, "built without io_uring: it needs Linux and its headers");
}
void IoUring::release() {}
void IoUring::read(std::uint64_t, int, const struct iovec*, int, std::uint64_t) {}
bool IoUring::has_work() const { return false; }
bool IoUring::submit(unsigned, std::chrono::milliseconds) { return true; }
std::vector<std::uint64_t> IoUring::take_back() { return {}; }
bool IoUring::reap(std::uint64_t&, ssize_t&) { return false; }

#endif

}  // namespace flashllm
