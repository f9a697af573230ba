#include "io/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace flashllm {

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
  // Small buffers stay on ordinary pages: a huge page for each would exceed the memory plan.
  if (nbytes >= 4 * kAlignment) madvise(data_, nbytes / kAlignment * kAlignment, MADV_HUGEPAGE);
#endif
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

void populate(std::byte* data, std::size_t nbytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto start = (reinterpret_cast<std::uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(data) + nbytes) / kPage * kPage;
  if (start >= end) return;
#ifdef MADV_POPULATE_WRITE
  if (madvise(reinterpret_cast<void*>(start), end - start, MADV_POPULATE_WRITE) == 0) return;
#endif
  for (std::uintptr_t page = start; page < end; page += kPage) {
    auto* byte = reinterpret_cast<volatile unsigned char*>(page);
    *byte = *byte;
  }
}

}  // namespace flashllm
