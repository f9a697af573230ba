// Who keeps keys and values, and attends to them.
#pragma once

#include "attention/attention.h"
#include "kernels/thread_pool.h"
#include "model/pass.h"

namespace flashllm {

class AttentionMemory {
 public:
  virtual ~AttentionMemory() = default;
  // Keeps keys and values [tokens, kv_heads * head_dim] of a part's tokens; each token's queries attend to
  // what is kept up to it: queries and out [tokens, heads * head_dim]. keys nullptr: they are kept already,
  // an earlier layer's.
  virtual void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
                      const float* values, float* out) = 0;
  // Keeps them alone, where tokens have sequences, whose views attention can read. Throws CoreError
  // elsewhere.
  virtual void keep(const AttentionShape& shape, const Part& part, const float* keys, const float* values);
};

// The memory of a model that runs: each token's sequence keeps its keys and values, as layer `part.kv_layer`.
class SequenceMemory final : public AttentionMemory {
 public:
  SequenceMemory(ThreadPool& pool, SimdLevel level) : pool_(pool), level_(level) {}
  void attend(const AttentionShape& shape, const Part& part, const float* queries, const float* keys,
              const float* values, float* out) override;
  void keep(const AttentionShape& shape, const Part& part, const float* keys, const float* values) override;

 private:
  void seal_pages(const Part& part) const;

  ThreadPool& pool_;
  const SimdLevel level_;
};

}  // namespace flashllm
