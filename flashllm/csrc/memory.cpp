#include "memory.h"

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

}  // namespace flashllm
