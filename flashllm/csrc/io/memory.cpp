#include "io/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>

namespace flashllm {

namespace {

// Smaller buffers stay on ordinary pages: a huge page for each would exceed the memory plan. Direct reads
// into ordinary pages reach three quarters of the rate (bench/log, 2026-11-26): a request of 4 MiB is to have
// huge ones.
[[maybe_unused]] constexpr std::size_t kHugeFrom = 2 * HugeBuffer::kAlignment;

std::atomic<bool> all_is_kept{false};

}  // namespace

std::size_t system_page() noexcept {
  static const auto nbytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return nbytes;
}

HugeBuffer::HugeBuffer(std::size_t nbytes) : size_(nbytes) {
  // Mapped a little larger, so that data_ can start on a huge-page boundary; untouched pages cost nothing.
  mapped_ = nbytes + kAlignment;
  if (mapped_ < nbytes) throw std::bad_alloc();
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::byte*>((address + kAlignment - 1) / kAlignment * kAlignment);
#ifdef MADV_DONTFORK
  madvise(mapping_, mapped_, MADV_DONTFORK);
#endif
#ifdef MADV_HUGEPAGE
  if (nbytes >= kHugeFrom) madvise(data_, nbytes / kAlignment * kAlignment, MADV_HUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr && !all_is_kept) munmap(mapping_, mapped_);
}

void keep_all_memory() noexcept { all_is_kept = true; }

namespace {

// The whole pages inside a range.
struct Pages {
  Pages(std::byte* data, std::size_t nbytes)
      : start((reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page),
        end((reinterpret_cast<std::uintptr_t>(data) + nbytes) / page * page) {}
  bool empty() const { return start >= end; }
  void advise(int advice) const { madvise(reinterpret_cast<void*>(start), end - start, advice); }

  const std::uintptr_t page = system_page();
  std::uintptr_t start, end;
};

}  // namespace

void release_pages(std::byte* data, std::size_t nbytes) {
  const Pages pages(data, nbytes);
  if (pages.empty() || all_is_kept) return;
#ifdef MADV_NOHUGEPAGE
  pages.advise(MADV_NOHUGEPAGE);  // or khugepaged may fill the hole with a huge page of zeros
#endif
  pages.advise(MADV_DONTNEED);
}

void reclaim_pages(std::byte* data, std::size_t nbytes) {
#ifdef MADV_HUGEPAGE
  const Pages pages(data, nbytes);
  if (nbytes >= kHugeFrom && !pages.empty()) pages.advise(MADV_HUGEPAGE);
#else
  static_cast<void>(data);
  static_cast<void>(nbytes);
#endif
}

void populate(std::byte* data, std::size_t nbytes) {
  const Pages pages(data, nbytes);
  if (pages.empty()) return;
#ifdef MADV_POPULATE_WRITE
  if (madvise(reinterpret_cast<void*>(pages.start), pages.end - pages.start, MADV_POPULATE_WRITE) == 0)
    return;
#endif
  for (std::uintptr_t at = pages.start; at < pages.end; at += pages.page) {
    auto* byte = reinterpret_cast<volatile unsigned char*>(at);
    *byte = *byte;
  }
}

}  // namespace flashllm
