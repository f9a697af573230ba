#include "model/ends.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "io/error.h"

namespace flashllm {

void Ends::embed(const Token* tokens, std::size_t count, float* states) {
  const std::size_t width = spec_.embed_dim;
  std::vector<float> rows(width == spec_.block.d_model ? 0 : count * width);
  float* to = rows.empty() ? states : rows.data();
  for (std::size_t t = 0; t < count; ++t)
    widen_row(weights_.embedding, static_cast<std::size_t>(tokens[t].id), to + t * width,
              arithmetic_.level());
  embed_rows(to, tokens, count, states);
}

void Ends::embed_rows(float* rows, const Token* tokens, std::size_t count, float* states) {
  const std::size_t width = spec_.block.d_model;
  float scale = spec_.embedding_scale;
  arithmetic_.round(&scale, 1);
  if (scale != 1.0F) arithmetic_.scale(rows, scale, count * spec_.embed_dim);
  if (spec_.embed_dim != width) {
    // Once a token, few at a time: the kernel of one token, whose bits depend on nothing else.
    linear(weights_.project_in, rows, count, states, arithmetic_.pool(), arithmetic_.level());
    arithmetic_.round(states, count * width);
  } else if (rows != states) {
    std::copy_n(rows, count * width, states);
  }
  if (weights_.embedding_norm.width != 0)
    arithmetic_.normalize(weights_.embedding_norm, count, states, states);
  if (weights_.positions.data == nullptr) return;
  std::vector<float> position(width);
  for (std::size_t t = 0; t < count; ++t) {
    const std::size_t row = tokens[t].position + spec_.position_offset;
    require(row < weights_.positions.rows, "a position beyond the model's position embedding");
    widen_row(weights_.positions, row, position.data(), arithmetic_.level());
    for (std::size_t j = 0; j < width; ++j) states[t * width + j] += position[j];
  }
  arithmetic_.round(states, count * width);
}

void Ends::project_rows(const float* states, std::size_t count, bool many, float* rows) {
  const BlockSpec& block = spec_.block;
  arithmetic_.project(weights_.per_layer_projection, states, count, many, rows);
  arithmetic_.scale(rows, 1.0F / std::sqrt(static_cast<float>(block.d_model)), count * block.row_width());
  arithmetic_.normalize(weights_.per_layer_norm, count * block.layers, rows, rows);
}

void Ends::add_row(float* row, float* to) {
  const std::size_t n = spec_.block.row_width();
  float root = std::sqrt(static_cast<float>(spec_.block.per_layer));
  arithmetic_.round(&root, 1);
  arithmetic_.scale(row, root, n);
  arithmetic_.add(to, row, n);
  arithmetic_.scale(to, std::sqrt(0.5F), n);
}

namespace {

// The mean of x's squares, each rounded as `arithmetic` does.
float mean_square(Arithmetic& arithmetic, const float* x, std::size_t n, std::vector<float>& squares) {
  squares.resize(n);
  for (std::size_t i = 0; i < n; ++i) squares[i] = x[i] * x[i];
  arithmetic.round(squares.data(), n);
  double sum = 0.0;
  for (const float square : squares) sum += square;
  auto mean = static_cast<float>(sum / static_cast<double>(n));
  arithmetic.round(&mean, 1);
  return mean;
}

}  // namespace

// Of each token's x a product, which becomes as long as what it is `like`.
void Ends::project_as_long(const RowMatrix& weights, const float* x, const float* like, std::size_t count,
                           bool many, float* to) {
  constexpr float kLeast = 1e-5F;  // of the mean of a product's squares
  const std::size_t width = spec_.block.d_model;
  arithmetic_.project(weights, x, count, many, to);
  std::vector<float> squares;
  for (std::size_t t = 0; t < count; ++t) {
    float* row = to + t * width;
    float length = std::sqrt(mean_square(arithmetic_, like + t * width, width, squares));
    float own = std::sqrt(std::max(kLeast, mean_square(arithmetic_, row, width, squares)));
    arithmetic_.round(&length, 1);
    arithmetic_.round(&own, 1);
    arithmetic_.scale(row, length, width);
    for (std::size_t j = 0; j < width; ++j) row[j] /= own;
    arithmetic_.round(row, width);
  }
}

void Ends::spread(float* states, std::size_t count, bool many) {
  const std::size_t n = count * spec_.block.d_model;
  std::copy_n(states, n, states + n);
  for (std::size_t s = 0; s < weights_.stream_in.size(); ++s)
    project_as_long(weights_.stream_in[s], states, states, count, many, states + (2 + s) * n);
}

void Ends::gather(float* states, std::size_t count, bool many) {
  const std::size_t n = count * spec_.block.d_model;
  std::vector<float> made(n), sum(states, states + n);
  for (std::size_t s = 0; s < weights_.stream_out.size(); ++s) {
    project_as_long(weights_.stream_out[s], states + (1 + s) * n, states, count, many, made.data());
    for (std::size_t i = 0; i < n; ++i) sum[i] += made[i];
  }
  std::copy_n(sum.data(), n, states);
  arithmetic_.scale(states, 1.0F / static_cast<float>(spec_.block.streams), n);
}

void Ends::head(float* states, std::size_t count, bool many, float* logits) {
  if (weights_.final_norm.width != 0) arithmetic_.normalize(weights_.final_norm, count, states, states);
  std::vector<float> projected;
  if (weights_.project_out.data != nullptr) {
    projected.resize(count * spec_.embed_dim);
    arithmetic_.project(weights_.project_out, states, count, many, projected.data());
    states = projected.data();
  }
  arithmetic_.project(weights_.head, states, count, many, logits, spec_.rounded_logits);
  const std::size_t n = count * spec_.vocab;
  if (spec_.logit_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) logits[i] *= spec_.logit_scale;
    if (spec_.rounded_logits) arithmetic_.round(logits, n);
  }
  if (spec_.logit_softcap != 0.0F) {
    for (std::size_t i = 0; i < n; ++i)
      logits[i] = spec_.logit_softcap * std::tanh(logits[i] / spec_.logit_softcap);
    if (spec_.rounded_logits) arithmetic_.round(logits, n);
  }
}

}  // namespace flashllm
