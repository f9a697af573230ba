#include "model/kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "io/error.h"
#include "io/memory.h"

namespace flashllm {

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = HugeBuffer::kAlignment;

std::size_t blocks_of(std::size_t length) { return (length + kKvBlock - 1) / kKvBlock; }

KvShape checked(const KvShape& shape) {
  require(shape.layers != 0 && shape.kv_heads != 0 && shape.head_dim != 0 && shape.context != 0,
          "a KV cache's sizes must not be zero");
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 2;
  std::size_t nbytes = 1;
  for (const std::size_t factor :
       {shape.layers, shape.kv_heads, shape.head_dim, shape.context + kKvBlock, 2 * sizeof(float) * kPage}) {
    require(nbytes <= kMost / factor, "a KV cache of these sizes exceeds the address space");
    nbytes *= factor;
  }
  return shape;
}

}  // namespace

std::size_t KvShape::block_nbytes() const { return (layers * layer_nbytes() + kPage - 1) / kPage * kPage; }

KvSequence::KvSequence(const KvShape& shape)
    : shape_(checked(shape)),
      block_nbytes_(shape.block_nbytes()),
      kernels_(kernel_table(best_simd_level(), shape.dtype)) {
  const std::size_t nbytes = shape_.max_blocks() * block_nbytes_;
  mapped_ = nbytes + kHugePage;
  mapping_ =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw CoreError(ErrorKind::io, "cannot reserve " + std::to_string(mapped_) +
                                       " bytes of addresses for a context of " +
                                       std::to_string(shape_.context) + " tokens (" + std::strerror(errno) +
                                       "); use a smaller context");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::byte*>((address + kHugePage - 1) / kHugePage * kHugePage);
#ifdef MADV_HUGEPAGE
  // Elsewhere a huge page would take memory of blocks that are not in use.
  madvise(data_, nbytes, block_nbytes_ % kHugePage == 0 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
}

KvSequence::~KvSequence() { munmap(mapping_, mapped_); }

std::size_t KvSequence::blocks_to_add(std::size_t length) const {
  const std::size_t needed = blocks_of(length);
  return needed > blocks_ ? needed - blocks_ : 0;
}

void KvSequence::reserve(std::size_t length) {
  require(length <= shape_.context, "a KV cache for " + std::to_string(shape_.context) +
                                        " tokens cannot hold " + std::to_string(length));
  blocks_ += blocks_to_add(length);
}

void KvSequence::append(std::size_t layer, std::size_t position, const float* key, const float* value) {
  require(layer < shape_.layers && position < shape_.context && position / kKvBlock < blocks_,
          "a position of the KV cache must be reserved before it is written");
  const KvView rows = view(layer);
  for (std::size_t h = 0; h < shape_.kv_heads; ++h) {
    std::byte* to = const_cast<std::byte*>(rows.key_rows(h, position / kKvBlock)) +
                    position % kKvBlock * shape_.row_nbytes();
    kernels_.from_f32(key + h * shape_.head_dim, shape_.head_dim, to);
    kernels_.from_f32(value + h * shape_.head_dim, shape_.head_dim, to + rows.value_offset);
  }
}

KvView KvSequence::view(std::size_t layer) const {
  require(layer < shape_.layers, "a KV cache's layer beyond those there are");
  KvView view;
  view.base = data_ + layer * shape_.layer_nbytes();
  view.block_stride = block_nbytes_;
  view.head_stride = shape_.head_nbytes();
  view.value_offset = shape_.kv_heads * shape_.head_nbytes();
  return view;
}

void KvSequence::commit(std::size_t length) {
  require(length >= length_ && length <= shape_.context && blocks_of(length) <= blocks_,
          "a KV cache can commit only positions that it has reserved");
  length_ = length;
}

void KvSequence::truncate(std::size_t length) {
  require(length <= length_,
          "a KV cache of " + std::to_string(length_) + " tokens cannot keep " + std::to_string(length));
  const std::size_t kept = blocks_of(length);
  // Without this the memory would stay in use until the sequence ends; there is nothing else to do about it.
  if (kept < blocks_) madvise(block(kept), (blocks_ - kept) * block_nbytes_, MADV_DONTNEED);
  blocks_ = kept;
  length_ = length;
}

void KvSequence::copy_from(const KvSequence& other) {
  const KvShape &ours = shape_, &theirs = other.shape_;
  require(ours.layers == theirs.layers && ours.kv_heads == theirs.kv_heads &&
              ours.head_dim == theirs.head_dim && ours.dtype == theirs.dtype && other.length_ <= ours.context,
          "a KV cache can be copied only to one of the same shape and a context that holds it");
  if (this == &other) return;
  truncate(std::min(length_, other.length_));
  reserve(other.length_);
  for (std::size_t b = 0; b < blocks_; ++b) std::memcpy(block(b), other.block(b), block_nbytes_);
  length_ = other.length_;
}

}  // namespace flashllm
