#include "offload/linear.h"

#include <vector>

#include "io/error.h"
#include "kernels/matmul.h"
#include "model/arithmetic.h"

namespace flashllm {

Linear::Linear(const RowMatrix& weights, Dtype dtype, bool by_inputs, ThreadPool& pool, SimdLevel level)
    : weights_(weights), dtype_(dtype), by_inputs_(by_inputs), pool_(pool), level_(level) {
  const RowCodec codec = weights.codec;
  require(
      by_inputs ? is_coded(codec) && codec != RowCodec::bf12 : is_coded(codec) || codec == codec_of(dtype),
      "a linear's encoding must be its dtype or one in groups");
}

void Linear::forward(const std::byte* x, std::size_t tokens, std::byte* out) const {
  if (by_inputs_) return forward_many(x, tokens, dtype_, out);
  std::vector<float> wide(tokens * inputs()), made(tokens * outputs());
  Arithmetic arithmetic(dtype_, pool_, level_);
  arithmetic.widen(x, wide.size(), wide.data());
  linear(weights_, wide.data(), tokens, made.data(), pool_, level_);
  arithmetic.narrow(made.data(), made.size(), out);
}

void Linear::forward_many(const std::byte* x, std::size_t tokens, Dtype to, std::byte* out) const {
  if (by_inputs_) return linear_by_columns(weights_, x, tokens, dtype_, to, out, pool_, level_);
  const TokenForm form = form_of_many(weights_.codec, weights_.inputs, dtype_, weights_.columns, level_);
  const PackedTokens packed(x, tokens, weights_.columns, dtype_, form, pool_, level_);
  linear_many(weights_, packed, to, out, pool_, level_);
}

}  // namespace flashllm
