// The arithmetic of experts whose rows lie in memory, for the tokens that want them. A thread takes a chunk
// of an expert's neurons: block by block their values, then the sums of their down columns, while the block's
// rows are in the processor's second cache. Does not know why these experts, nor how their rows came there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ffn/ffn_group.h"
#include "ffn/ffn_options.h"
#include "kernels/scratch.h"
#include "kernels/thread_pool.h"

namespace flashllm {

// How experts are cut. Chunks are the same whatever computes them, as each has a sum of its own.
struct ExpertChunks {
  // Neurons whose values are made before their columns are added: of rows, whose columns the processor has
  // fetched on the way, or of matrices that lie apart.
  static constexpr std::size_t kRows = 128, kApart = 2 * kRows;
  static constexpr std::size_t kLeast = kApart, kMost = 8;

  explicit ExpertChunks(std::size_t neurons)
      : size(round_up(std::max(kLeast, (neurons + kMost - 1) / kMost), kRows)) {}
  std::size_t count(std::size_t neurons) const { return (neurons + size - 1) / size; }

  const std::size_t size;  // neurons
};

// An expert, and the tokens that want it.
struct ExpertRun {
  const std::byte* rows;
  const FfnShare* shares;  // values: sums [chunks, d_model]
  std::size_t tokens;
};

class ExpertProducts {
 public:
  // Keeps references.
  ExpertProducts(const FfnLayerOptions& options, ThreadPool& pool);

  // Of an expert and a token.
  std::size_t num_sums() const {
    return chunks_.count(static_cast<std::size_t>(units_.size)) * options_.format.d_model;
  }
  // The sums of each run's chunks for each of its tokens. x: the inputs of the tokens of `group`.
  void multiply(const std::vector<ExpertRun>& runs, const FfnGroup& group, const RowInputs& x);
  // y [d_model] += the sums of the member's experts in the part, in their order.
  void add(const FfnMember& member, float* y);

 private:
  void multiply_chunk(const ExpertRun& run, std::size_t chunk, const FfnGroup& group, const RowInputs& x,
                      std::vector<float>& together) const;
  void find_values(const ExpertRun& run, const RowFormat& format, std::size_t first, std::size_t count,
                   const FfnGroup& group, const RowInputs& x, float* values) const;
  void multiply_rows(const std::byte* row, std::size_t count, const CodedInputs& x, InputForm form,
                     float* gates, float* ups) const;

  const FfnLayerOptions& options_;
  const RowUnits units_;
  ThreadPool& pool_;
  const ExpertChunks chunks_;
  std::vector<const void*> sums_;
  std::vector<float> ones_;
};

}  // namespace flashllm
