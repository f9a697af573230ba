#include "ffn/expert_ffn.h"

#include <algorithm>
#include <cstring>

#include "io/error.h"

namespace flashllm {

void ExpertFfn::begin(const RowFormat& format, const RowFormat& shared, Router& router, Activation activation,
                      const ScalePlane* plane) {
  format_ = format;
  shared_ = shared;
  router_ = &router;
  activation_ = activation;
  plane_ = plane;
  experts_.begin(router);
  x_.clear();
}

void ExpertFfn::take(const float* routed_by, const float* x, std::size_t tokens) {
  experts_.add(*router_, routed_by, tokens, pool_);
  const std::size_t n = tokens * format_.d_model, before = x_.size();
  x_.resize(before + n * dtype_nbytes(dtype_));
  kernels_.from_f32(x, n, x_.data() + before);
}

void ExpertFfn::end() {
  runs_.clear();
  for (const ExpertTokens::Run& run : experts_.end()) runs_.push_back({run.first, run.count, nullptr});
  run_ = rows_ = 0;
  y_.assign(experts_.tokens() * format_.d_model, 0.0F);
}

// An expert whose rows come at once serves some of its tokens after the other; of others, all wait for the
// last rows.
void ExpertFfn::add(const RowRun& block, const float* up_bias, const float* gate_bias) {
  require(run_ != runs_.size() && block.first_row == runs_[run_].first_row + rows_ &&
              rows_ + block.count <= runs_[run_].count,
          "rows of experts come in another order than they were asked for");
  const ExpertTokens::Run& run = experts_.runs()[run_];
  const std::size_t tokens = run.tokens.size();
  const bool is_first = rows_ == 0, is_last = rows_ + block.count == run.count;
  const std::size_t most = is_first && is_last ? together_ : tokens;
  for (std::size_t begin = 0; begin < tokens; begin += most) {
    if (is_first) gather(begin, std::min(tokens, begin + most));
    for (std::size_t part = 0; part < dense_.parts(); ++part) {
      dense_.activations(part, block.rows, block.count, part_of(up_bias, block.first_row),
                         part_of(gate_bias, block.first_row));
      dense_.add(part, block.rows, block.count);
      const std::size_t first = begin + part * together_;
      if (is_last)
        dense_.finish_into(part, run.tokens.data() + first, run.factors.data() + first, run.bias, y_.data());
    }
  }
  rows_ += block.count;
  if (!is_last) return;
  ++run_;
  rows_ = 0;
}

// The inputs of some of the run's tokens, side by side.
void ExpertFfn::gather(std::size_t begin, std::size_t end) {
  const std::size_t nbytes = format_.d_model * dtype_nbytes(dtype_);
  const std::vector<std::int32_t>& tokens = experts_.runs()[run_].tokens;
  const std::size_t row = runs_[run_].first_row;
  const bool is_shared = row >= router_->spec().first(router_->spec().count);
  dense_.begin(is_shared ? shared_ : format_, activation_, {}, plane_, row);
  for (; begin < end; begin += together_) {
    const std::size_t count = std::min(together_, end - begin);
    gathered_.resize(count * nbytes);
    for (std::size_t m = 0; m < count; ++m)
      std::memcpy(gathered_.data() + m * nbytes,
                  x_.data() + static_cast<std::size_t>(tokens[begin + m]) * nbytes, nbytes);
    dense_.take(gathered_.data(), count);
  }
}

void ExpertFfn::give(std::size_t first, std::size_t count, float* y) {
  std::copy_n(y_.data() + first * format_.d_model, count * format_.d_model, y);
}

void ExpertFfn::rest() noexcept {
  if (rows_ == 0)  // no tokens wait for the rest of an expert
    dense_.clear();
  else
    dense_.rest();
  std::vector<std::byte>().swap(gathered_);
}

void ExpertFfn::clear() noexcept {
  dense_.clear();
  std::vector<std::byte>().swap(x_);
  std::vector<float>().swap(y_);
}

}  // namespace flashllm
