// Anonymous memory for weights, cached rows and staging: aligned for direct reads, huge pages where the
// kernel has them, and not shared with children (a fork during a direct read into private memory can corrupt
// it; open(2)).
#pragma once

#include <cstddef>

namespace flashllm {

// Bytes of the pages that this kernel maps and gives back: 4,096 on x86-64, up to 65,536 on ARM.
std::size_t system_page() noexcept;

class HugeBuffer {
 public:
  static constexpr std::size_t kAlignment = std::size_t{2} << 20;  // one x86-64 huge page
  static_assert(kAlignment % 4096 == 0, "direct reads need sector-aligned memory");

  // Zeroed memory of `nbytes`, which may be 0. Throws std::bad_alloc.
  explicit HugeBuffer(std::size_t nbytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// From now on no HugeBuffer is unmapped and no page given back: a read that never ended may still be written
// there.
void keep_all_memory() noexcept;

// Makes the memory [data, data + nbytes) real: page faults are taken here instead of at first use. Its
// contents stay.
void populate(std::byte* data, std::size_t nbytes);

// Gives the whole pages inside [data, data + nbytes) back to the system, and keeps it from putting huge pages
// there; the memory stays mapped and reads as zeros. `reclaim_pages` allows huge pages again.
void release_pages(std::byte* data, std::size_t nbytes);
void reclaim_pages(std::byte* data, std::size_t nbytes);

}  // namespace flashllm
