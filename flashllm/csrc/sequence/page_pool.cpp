#include "sequence/page_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

PagePool::~PagePool() {
  for (const Chunk& chunk : chunks_) munmap(chunk.mapping, chunk.nbytes);
}

Page PagePool::take() {
  std::byte* page = nullptr;
  {
    const std::lock_guard locked(lock_);
    if (free_.empty()) reserve();
    page = free_.back();
    free_.pop_back();
    ++taken_;
  }
  return {page, [pool = shared_from_this()](std::byte* given) { pool->give_back(given); }};
}

void PagePool::reserve() {
  constexpr std::size_t kHugePage = HugeBuffer::kAlignment;
  const std::size_t nbytes = together_ * page_nbytes_;
  free_.reserve((chunks_.size() + 1) * together_);
  chunks_.reserve(chunks_.size() + 1);
  const Chunk chunk{mmap(nullptr, nbytes + kHugePage, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
                    nbytes + kHugePage};
  if (chunk.mapping == MAP_FAILED) {
    throw CoreError(ErrorKind::io, "cannot reserve " + std::to_string(chunk.nbytes) +
                                       " bytes of addresses for keys and values (" + std::strerror(errno) +
                                       "); use a smaller context");
  }
  chunks_.push_back(chunk);
  const auto address = reinterpret_cast<std::uintptr_t>(chunk.mapping);
  auto* data = reinterpret_cast<std::byte*>((address + kHugePage - 1) / kHugePage * kHugePage);
#ifdef MADV_HUGEPAGE
  // Elsewhere a huge page would take memory of pages that nobody holds.
  madvise(data, nbytes, page_nbytes_ % kHugePage == 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  for (std::size_t i = together_; i-- > 0;) free_.push_back(data + i * page_nbytes_);
}

void PagePool::give_back(std::byte* page) noexcept {
  // Without this the memory would stay in use; there is nothing else to do about it.
  madvise(page, page_nbytes_, MADV_DONTNEED);
  const std::lock_guard locked(lock_);
  free_.push_back(page);
  --taken_;
}

}  // namespace flashllm
