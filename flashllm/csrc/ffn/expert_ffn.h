// The experts of a layer over many tokens, which come in parts: each expert that any of them goes to is read
// once, and computed for the tokens that go to it. A token's sum is over its experts in their order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffn/dense_ffn.h"
#include "ffn/experts.h"
#include "io/row_stream.h"

namespace flashllm {

class ExpertFfn {
 public:
  // `dtype`: of what goes in. `together`: tokens of an expert whose products are made at once, at most.
  ExpertFfn(Dtype dtype, std::size_t together, ThreadPool& pool, SimdLevel level)
      : dtype_(dtype),
        together_(together),
        pool_(pool),
        kernels_(kernel_table(level, dtype)),
        dense_(dtype, pool, level) {}

  // No tokens yet. `format`, `shared`: of the experts' rows, and of those that every token uses; `plane`: of
  // the layer's down columns, where their scales lie apart.
  void begin(const RowFormat& format, const RowFormat& shared, Router& router, Activation activation,
             const ScalePlane* plane = nullptr);
  // The next tokens: x [tokens, d_model] fp32, of values that the dtype has; and what the router reads.
  void take(const float* routed_by, const float* x, std::size_t tokens);
  const ExpertTokens& experts() const { return experts_; }
  // After the last tokens: `runs` says which rows are to be handed in, ascending.
  void end();
  const std::vector<RowRun>& runs() const { return runs_; }
  // The first row that has not been; behind the last run, its end.
  std::size_t next_row() const {
    if (runs_.empty()) return 0;
    return run_ < runs_.size() ? runs_[run_].first_row + rows_ : runs_.back().first_row + runs_.back().count;
  }
  // The next rows of those, none of two runs. Biases: [num_neurons] or nullptr.
  void add(const RowRun& block, const float* up_bias, const float* gate_bias);
  // After the last rows: y [count, d_model] of the tokens from `first` on. The next layer has their memory.
  void give(std::size_t first, std::size_t count, float* y);
  void rest() noexcept;  // as DenseFfn::rest
  void clear() noexcept;

 private:
  void gather(std::size_t begin, std::size_t end);

  RowFormat format_, shared_;
  const Dtype dtype_;
  const std::size_t together_;
  ThreadPool& pool_;
  const KernelTable& kernels_;
  DenseFfn dense_;
  Router* router_ = nullptr;
  Activation activation_;
  const ScalePlane* plane_ = nullptr;
  std::vector<std::byte> x_;  // [tokens, d_model]
  std::vector<float> y_;      // the same
  std::vector<RowRun> runs_;
  ExpertTokens experts_;
  std::size_t run_ = 0, rows_ = 0;  // the run at hand, and its rows that came
  std::vector<std::byte> gathered_;
};

}  // namespace flashllm
