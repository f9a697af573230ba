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
  const ExpertsSpec& spec = router.spec();
  std::vector<std::vector<std::int32_t>> tokens_of(spec.runs());
  std::vector<std::vector<float>> factors_of(spec.runs());
  for (std::size_t t = 0; t < tokens; ++t) {
    router.route(x + t * format_.d_model, pool_, weights_);
    for (std::size_t run = 0; run < spec.runs(); ++run) {
      if (weights_[run] == 0.0F) continue;
      tokens_of[run].push_back(static_cast<std::int32_t>(t));
      factors_of[run].push_back(weights_[run]);
    }
  }
  runs_.clear();
  tokens_.clear();
  factors_.clear();
  biases_.clear();
  for (std::size_t run = 0; run < spec.runs(); ++run) {
    if (tokens_of[run].empty()) continue;
    runs_.push_back({spec.first(run), spec.neurons(run)});
    tokens_.push_back(std::move(tokens_of[run]));
    factors_.push_back(std::move(factors_of[run]));
    biases_.push_back(router.down_bias(run));
  }
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
  dense_.finish_into(tokens_[run_].data(), factors_[run_].data(), biases_[run_], y);
  ++run_;
  rows_ = 0;
}

// The inputs of the run's tokens, side by side.
void ExpertFfn::begin_run() {
  const std::size_t width = format_.d_model, nbytes = width * dtype_nbytes(dtype_);
  const std::vector<std::int32_t>& tokens = tokens_[run_];
  gathered_.resize(tokens.size() * nbytes);
  for (std::size_t m = 0; m < tokens.size(); ++m)
    kernels_.from_f32(x_ + static_cast<std::size_t>(tokens[m]) * width, width, gathered_.data() + m * nbytes);
  dense_.begin(gathered_.data(), tokens.size(), activation_, plane_, runs_[run_].first_row);
}

}  // namespace flashllm
