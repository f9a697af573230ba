// The KV cache of one sequence: keys and values of every layer, in blocks of kKvBlock positions.
//
// Layout: [block][layer][key, value][kv_head][position in block][head_dim] of the model's dtype. Address
// space for the whole context is reserved at once, memory is taken block by block as positions are written,
// so that views stay valid while a sequence grows. Knows neither models nor the memory plan.
//
// A pass: reserve(length), append(...) each layer's new rows, read through view(layer), commit(length). A
// pass that fails ends with truncate(length()).
#pragma once

#include <cstddef>

#include "kernels/attention.h"

namespace flashllm {

struct KvShape {
  std::size_t layers = 0;
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t context = 0;  // positions at most
  Dtype dtype = Dtype::f32;

  std::size_t row_nbytes() const { return head_dim * dtype_nbytes(dtype); }
  std::size_t head_nbytes() const { return kKvBlock * row_nbytes(); }
  std::size_t layer_nbytes() const { return 2 * kv_heads * head_nbytes(); }
  std::size_t block_nbytes() const;  // of all layers, in whole pages
  std::size_t max_blocks() const { return (context + kKvBlock - 1) / kKvBlock; }
};

class KvSequence {
 public:
  // Throws CoreError: usage for a size of zero; io when the system refuses the address space.
  explicit KvSequence(const KvShape& shape);
  ~KvSequence();
  KvSequence(const KvSequence&) = delete;
  KvSequence& operator=(const KvSequence&) = delete;

  const KvShape& shape() const { return shape_; }
  std::size_t length() const { return length_; }  // committed positions
  std::size_t blocks() const { return blocks_; }  // whose memory is in use
  std::size_t nbytes() const { return blocks_ * block_nbytes_; }
  // Blocks that reserve(length) would add to blocks().
  std::size_t blocks_to_add(std::size_t length) const;

  // Makes positions below `length` writable. Throws CoreError (usage) beyond the context.
  void reserve(std::size_t length);

  // Writes the key and the value [kv_heads, head_dim] of one reserved position, rounded to the dtype. Threads
  // may write different positions, layers or both.
  void append(std::size_t layer, std::size_t position, const float* key, const float* value);

  // Keys and values of a layer; valid as long as the sequence.
  KvView view(std::size_t layer) const;

  // The positions below `length`, all reserved and written, belong to the sequence from now on.
  void commit(std::size_t length);

  // Keeps the first `length` committed positions, and gives whole blocks beyond them back to the system,
  // reserved ones included.
  void truncate(std::size_t length);

  // The bytes of the blocks in use, one after the other: for whoever keeps them elsewhere. What lies behind
  // the committed positions means nothing.
  std::byte* memory() const { return data_; }

  // Becomes a copy of the committed positions of `other`, which has the same shape.
  void copy_from(const KvSequence& other);

 private:
  std::byte* block(std::size_t index) const { return data_ + index * block_nbytes_; }

  KvShape shape_;
  std::size_t block_nbytes_;
  const KernelTable& kernels_;
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  std::size_t length_ = 0;
  std::size_t blocks_ = 0;
};

}  // namespace flashllm
