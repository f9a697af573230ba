#include "model/arithmetic.h"

#include <algorithm>

#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kValueGrain = 1 << 15;  // values a thread takes, of what is done value by value

}  // namespace

Arithmetic::Arithmetic(Dtype dtype, ThreadPool& pool, SimdLevel level, bool batches)
    : dtype_(dtype), pool_(pool), level_(level), batches_(batches), kernels_(kernel_table(level, dtype)) {}

void Arithmetic::normalize(const Norm& norm, std::size_t count, const float* x, float* y) {
  const std::size_t width = norm.width;
  const auto rows = [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) flashllm::normalize(norm, x + t * width, y + t * width);
  };
  if (count == 1) {
    rows(0, 1);
  } else {
    pool_.parallel_for(count, kTokenGrain, rows);
  }
  round(y, count * width);
}

void Arithmetic::round_inputs(std::size_t count, std::size_t width, float* x) {
  for (std::size_t t = 0; t < count; ++t) round_to_8_bits(x + t * width, width);
  round(x, count * width);
}

void Arithmetic::take_inputs(const float* x, std::size_t count, std::size_t width, bool many,
                             std::ptrdiff_t neuron) {
  set_inputs(x, width, many);
  if (watch_) watch_(x, count, width, neuron);
}

void Arithmetic::set_inputs(const float* x, std::size_t width, bool many) {
  inputs_ = x;
  width_ = width;
  many_ = many;
  has_few_ = false;
  packed_.reset();
}

void Arithmetic::project(const RowMatrix& weights, std::size_t count, float* out, bool rounded) {
  const std::size_t n = count * weights.rows;
  if (!as_many(weights.codec)) {
    const InputForm form = form_of_few(weights);
    if (!has_few_ || few_.form() != form || few_.tokens() != count)
      few_.set(inputs_, count, width_, form, level_);
    has_few_ = true;
    linear(weights, few_, count, out, pool_, level_);
    if (rounded) round(out, n);
    return;
  }
  if (!rounded)
    return linear_many(weights, packed(weights, count), Dtype::f32, reinterpret_cast<std::byte*>(out), pool_,
                       level_);
  widen(project_narrow(weights, count), n, out);
}

const std::byte* Arithmetic::project_narrow(const RowMatrix& weights, std::size_t count) {
  products_.resize(count * weights.rows * dtype_nbytes(dtype_));
  linear_many(weights, packed(weights, count), dtype_, products_.data(), pool_, level_);
  return products_.data();
}

// The inputs taken, as the weights want them of many.
const PackedTokens& Arithmetic::packed(const RowMatrix& weights, std::size_t count) {
  const TokenForm form = form_of_many(weights.codec, weights.inputs, dtype_, width_, level_);
  if (packed_ == nullptr || packed_->form() != form)
    packed_ = std::make_unique<PackedTokens>(narrowed(inputs_, count * width_), count, width_, dtype_, form,
                                             pool_, level_);
  return *packed_;
}

void Arithmetic::project_heads(const RowMatrix& weights, std::size_t heads, const float* x,
                               std::size_t x_stride, std::size_t count, bool many, float* out,
                               std::size_t out_stride) {
  const std::size_t rows = weights.rows / heads, columns = weights.columns;
  const auto gather = [&](std::size_t head, float* to) {
    for (std::size_t t = 0; t < count; ++t)
      std::copy_n(x + (t * heads + head) * x_stride, columns, to + t * columns);
  };
  set_inputs(nullptr, columns, many);
  if (!as_many(weights.codec)) {
    pool_.parallel_for(heads, 1, [&](std::size_t begin, std::size_t end) {
      const Scratch<float> own(count * columns);
      for (std::size_t head = begin; head < end; ++head) {
        gather(head, own.get());
        const RowInputs inputs(own.get(), count, columns, weights.inputs, level_);
        dot_block(weights, head * rows, rows, inputs, 0, count, out + head * out_stride, heads * out_stride,
                  level_);
      }
    });
    return;
  }
  of_head_.resize(count * columns);
  made_.resize(count * rows);
  RowMatrix part = weights;
  part.rows = rows;
  for (std::size_t head = 0; head < heads; ++head, part.data += rows * part.stride) {
    gather(head, of_head_.data());
    set_inputs(of_head_.data(), columns, many);
    project(part, count, made_.data(), false);
    for (std::size_t t = 0; t < count; ++t)
      std::copy_n(made_.data() + t * rows, rows, out + (t * heads + head) * out_stride);
  }
}

void Arithmetic::project_by_columns(const RowMatrix& weights, std::size_t count, float* out) {
  const std::size_t n = count * weights.columns;
  products_.resize(n * dtype_nbytes(dtype_));
  linear_by_columns(weights, narrowed(inputs_, count * width_), count, dtype_, dtype_, products_.data(),
                    pool_, level_);
  widen(products_.data(), n, out);
}

// A token's values are handled at once, a prompt's by all threads.
template <typename Body>
void Arithmetic::each_share(std::size_t n, const Body& body) {
  if (n <= kValueGrain) {
    body(0, n);
  } else {
    pool_.parallel_for(n, kValueGrain, body);
  }
}

void Arithmetic::round(float* values, std::size_t n) {
  if (dtype_ == Dtype::f32) return;
  const std::size_t item = dtype_nbytes(dtype_);
  rounded_.resize(std::max(rounded_.size(), n * item));
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.from_f32(values + begin, end - begin, rounded_.data() + begin * item);
    kernels_.to_f32(rounded_.data() + begin * item, end - begin, values + begin);
  });
}

void Arithmetic::add(float* x, const float* y, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] += y[i];
  round(x, n);
}

void Arithmetic::multiply(float* x, const float* y, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= y[i];
  round(x, n);
}

void Arithmetic::scale(float* x, float by, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) x[i] *= by;
  round(x, n);
}

std::byte* Arithmetic::narrow_scratch(std::size_t n) {
  narrow_.resize(n * dtype_nbytes(dtype_));
  return narrow_.data();
}

std::byte* Arithmetic::narrowed(const float* values, std::size_t n) {
  narrow(values, n, narrow_scratch(n));
  return narrow_.data();
}

void Arithmetic::narrow(const float* values, std::size_t n, std::byte* to) {
  const std::size_t item = dtype_nbytes(dtype_);
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.from_f32(values + begin, end - begin, to + begin * item);
  });
}

void Arithmetic::widen(const std::byte* from, std::size_t n, float* to) {
  const std::size_t item = dtype_nbytes(dtype_);
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.to_f32(from + begin * item, end - begin, to + begin);
  });
}

}  // namespace flashllm
