#include "ffn/expert_ffn.h"

#include "io/error.h"

namespace flashllm {

namespace {

const float* part_of(const float* bias, std::size_t first) {
  return bias == nullptr ? nullptr : bias + first;
}

}  // namespace

const std::vector<RowRun>& ExpertFfn::begin(Router& router, const float* x, std::size_t tokens,
                                            Activation activation, const ScalePlane* plane) {
  experts_.route(router, x, tokens, pool_);
  runs_.clear();
  for (const ExpertTokens::Run& run : experts_.runs()) runs_.push_back({run.first, run.count});
  activation_ = activation;
  x_ = x;
  plane_ = plane;
  run_ = rows_ = 0;
  return runs_;
}

void ExpertFfn::add(const RowBlock& block, const float* up_bias, const float* gate_bias, float* y) {
  if (run_ == runs_.size() || block.first_row != runs_[run_].first_row + rows_ ||
      rows_ + block.count > runs_[run_].count)
    throw CoreError(ErrorKind::usage, "rows of experts come in another order than they were asked for");
  if (rows_ == 0) begin_run();
  dense_.activations(block.rows, block.count, part_of(up_bias, block.first_row),
                     part_of(gate_bias, block.first_row));
  dense_.add(block.rows, block.count);
  rows_ += block.count;
  if (rows_ != runs_[run_].count) return;
  const ExpertTokens::Run& run = experts_.runs()[run_];
  dense_.finish_into(run.tokens.data(), run.factors.data(), run.bias, y);
  ++run_;
  rows_ = 0;
}

// The inputs of the run's tokens, side by side.
void ExpertFfn::begin_run() {
  const std::size_t width = format_.d_model, nbytes = width * dtype_nbytes(dtype_);
  const std::vector<std::int32_t>& tokens = experts_.runs()[run_].tokens;
  gathered_.resize(tokens.size() * nbytes);
  for (std::size_t m = 0; m < tokens.size(); ++m)
    kernels_.from_f32(x_ + static_cast<std::size_t>(tokens[m]) * width, width, gathered_.data() + m * nbytes);
  dense_.begin(gathered_.data(), tokens.size(), activation_, plane_, runs_[run_].first_row);
}

}  // namespace flashllm
