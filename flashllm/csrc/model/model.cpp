#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kShortPass = 16;  // tokens of a sparse pass that nobody needs to end

unsigned exponent_is_full(float value) {  // of infinities, and of what is no number
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<unsigned>((bits & kExponent) == kExponent);
}

// Products of the same inputs with matrices of several codecs: the level that suits all of them.
SimdLevel level_of_all(const ModelWeights& weights, SimdLevel level) {
  for (const RowMatrix* each : {&weights.project_out, &weights.head})
    level = level_of_many(each->codec, level);
  for (const BlockWeights& block : weights.blocks)
    for (const RowMatrix* each : {&block.query, &block.key, &block.value, &block.out})
      level = level_of_many(each->codec, level);
  return level;
}

}  // namespace

Model::Model(const ModelSpec& spec, const ModelWeights& weights, const RowFormat& rows, Activation activation,
             RowStream& stream, ThreadPool& pool, FfnCounters& counters, SimdLevel level,
             std::function<void()> check)
    : spec_(spec),
      weights_(weights),
      counters_(counters),
      check_(std::move(check)),
      arithmetic_(spec.block.dtype, pool, level, level_of_all(weights, level)),
      attention_(spec_.block, spec_.rotary, arithmetic_),
      ffn_(spec_, weights_.blocks, rows, activation, stream, counters, arithmetic_) {
  check_fits(spec_, weights_, rows);
}

void Model::step(const std::vector<Token>& tokens, Pass pass, const std::vector<std::size_t>& wanted,
                 float* logits, Tap* tap, std::size_t drafted) {
  watch_.restart();
  const bool is_prompt = pass == Pass::prompt;
  require(tap == nullptr || is_prompt, "only a prompt's pass can be observed");
  const std::size_t most = std::max<std::size_t>(1, spec_.block_tokens);
  require(drafted == 0 ||
              (!is_prompt && drafted < tokens.size() && tokens.size() <= std::min(most, FfnTokens::kMost)),
          "a pass cannot have so many drafted tokens");
  // 1. A long prompt goes through the model in parts of about equal length.
  const std::size_t parts = (tokens.size() + most - 1) / most;
  std::size_t begin = 0;
  auto next_wanted = wanted.begin();
  try {
    for (std::size_t i = 0; i < parts; ++i) {
      const std::size_t end = tokens.size() * (i + 1) / parts;
      Part part{tokens.data() + begin, end - begin, pass, false, i + 1 == parts, false, tap, 0, drafted};
      part.fills = is_prompt && spec_.fill_tokens != 0 && part.is_last;
      for_each_sequence(part.tokens, part.count, [](const Token& first, const Token& last) {
        first.sequence->reserve(last.position + 1, first.position);
      });
      hidden_.resize(part.count * spec_.block.d_model);
      embed(part.tokens, part.count, hidden_.data());
      run_part(part);
      // 2. Logits of those that are wanted.
      std::vector<std::size_t> rows;
      for (; next_wanted != wanted.end() && *next_wanted < end; ++next_wanted)
        rows.push_back(*next_wanted - begin);
      head(part, rows, logits);
      logits += rows.size() * spec_.vocab;
      begin = end;
    }
  } catch (...) {
    interrupt();
    for (const Token& token : tokens) token.sequence->keep(token.sequence->length());
    throw;
  }
  // 3. Nothing can fail any more: the sequences get their tokens.
  for_each_sequence(tokens.data(), tokens.size(),
                    [](const Token&, const Token& last) { last.sequence->commit(last.position + 1); });
  watch_.charge(counters_.compute_ns);
}

void Model::embed(const Token* tokens, std::size_t count, float* states) {
  const std::size_t width = spec_.block.d_model;
  const bool projected = spec_.embed_dim != width;
  std::vector<float> embedded(projected ? count * spec_.embed_dim : 0);
  float* to = projected ? embedded.data() : states;
  for (std::size_t t = 0; t < count; ++t) {
    require(tokens[t].id >= 0 && static_cast<std::size_t>(tokens[t].id) < spec_.vocab,
            "a token id beyond the vocabulary");
    widen_row(weights_.embedding, static_cast<std::size_t>(tokens[t].id), to + t * spec_.embed_dim,
              arithmetic_.level());
  }
  if (spec_.embedding_scale != 1.0F) {
    for (std::size_t i = 0; i < count * spec_.embed_dim; ++i) to[i] *= spec_.embedding_scale;
    arithmetic_.round(to, count * spec_.embed_dim);
  }
  if (projected) {
    // Once a token, few at a time: the kernel of one token, whose bits depend on nothing else.
    linear(weights_.project_in, embedded.data(), count, states, arithmetic_.pool(), arithmetic_.level());
    arithmetic_.round(states, count * width);
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

void Model::run_part(const Part& part) {
  attention_.set_positions(part);
  for (std::size_t layer = 0; layer < num_layers(); ++layer) {
    Part here = part;
    here.kv_layer = layer;
    block(layer, here);
    check_finite(layer, hidden_.data(), part.count);
    if (part.pass != Pass::sparse || part.count > kShortPass) look();
  }
}

// hidden_ -> hidden_
void Model::block(std::size_t layer, const Part& part) {
  const BlockSpec& spec = spec_.block;
  const BlockWeights& weights = weights_.blocks[layer];
  const std::size_t count = part.count, n = count * spec.d_model;
  const bool before = norms_input(spec.norms), behind = norms_output(spec.norms);
  normed_.resize(n);
  projected_.resize(n);
  // 1. Attention.
  if (before) arithmetic_.normalize(weights.attention_norm, count, hidden_.data(), normed_.data());
  if (spec.rounded_inputs) arithmetic_.round_inputs(count, spec.d_model, normed_.data());
  arithmetic_.take_inputs(before ? normed_.data() : hidden_.data(), count, spec.d_model, part.is_prompt());
  attention_.attend(weights, part, projected_.data());
  if (behind)
    arithmetic_.normalize(weights.attention_output_norm, count, projected_.data(), projected_.data());
  if (spec.parallel) {
    attended_.assign(projected_.begin(), projected_.begin() + static_cast<std::ptrdiff_t>(n));
  } else {
    add_projected(count);
    if (spec.norms == NormPlace::sum)
      arithmetic_.normalize(weights.attention_norm, count, hidden_.data(), hidden_.data());
  }
  // 2. The FFN.
  if (before && !spec.shared_norm)
    arithmetic_.normalize(weights.ffn_norm, count, hidden_.data(), normed_.data());
  if (spec.rounded_inputs) arithmetic_.round_inputs(count, spec.d_model, normed_.data());
  const float* input = before ? normed_.data() : hidden_.data();
  check_finite(layer, input, count);  // a predictor names no neurons for it, and nothing would show
  watch_.charge(counters_.compute_ns);
  ffn_.run({layer, part, input, hidden_.data(), projected_.data()});
  watch_.restart();  // the FFN has counted its own time
  if (behind) {
    arithmetic_.round(projected_.data(), n);
    arithmetic_.normalize(weights.ffn_output_norm, count, projected_.data(), projected_.data());
  }
  if (spec.parallel) {
    arithmetic_.round(projected_.data(), n);
    for (std::size_t i = 0; i < n; ++i) projected_[i] += attended_[i];
  }
  add_projected(count);
  if (spec.norms == NormPlace::sum)
    arithmetic_.normalize(weights.ffn_norm, count, hidden_.data(), hidden_.data());
}

// hidden_ += projected_
void Model::add_projected(std::size_t count) {
  const std::size_t n = count * spec_.block.d_model;
  arithmetic_.round(projected_.data(), n);
  if (spec_.block.residual_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) projected_[i] *= spec_.block.residual_scale;
    arithmetic_.round(projected_.data(), n);
  }
  for (std::size_t i = 0; i < n; ++i) hidden_[i] += projected_[i];
  arithmetic_.round(hidden_.data(), n);
}

void Model::head(const Part& part, const std::vector<std::size_t>& rows, float* logits) {
  if (rows.empty()) return;
  const std::size_t width = spec_.block.d_model, count = rows.size();
  std::vector<float> states(count * width);
  for (std::size_t i = 0; i < count; ++i)
    std::copy_n(hidden_.data() + rows[i] * width, width, states.data() + i * width);
  if (weights_.final_norm.width != 0)
    arithmetic_.normalize(weights_.final_norm, count, states.data(), states.data());
  if (weights_.project_out.data != nullptr) {
    std::vector<float> projected(count * spec_.embed_dim);
    arithmetic_.take_inputs(states.data(), count, width, part.is_prompt());
    arithmetic_.project(weights_.project_out, count, projected.data());
    states.swap(projected);
  }
  arithmetic_.take_inputs(states.data(), count, spec_.embed_dim, part.is_prompt());
  arithmetic_.project(weights_.head, count, logits);
  const std::size_t n = count * spec_.vocab;
  if (spec_.logit_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) logits[i] *= spec_.logit_scale;
    arithmetic_.round(logits, n);
  }
  if (spec_.logit_softcap != 0.0F) {
    for (std::size_t i = 0; i < n; ++i)
      logits[i] = spec_.logit_softcap * std::tanh(logits[i] / spec_.logit_softcap);
    arithmetic_.round(logits, n);
  }
}

void Model::run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens,
                      float* states, Tap* tap) {
  require(layer < num_layers(), "a layer beyond those there are");
  watch_.restart();
  const std::size_t width = spec_.block.d_model;
  const Part part{tokens.data(), tokens.size(), Pass::prompt, false, true, true, tap, kv_layer, 0};
  attention_.set_positions(part);
  for (const Token& token : tokens) token.sequence->reserve(token.position + 1);
  hidden_.assign(states, states + tokens.size() * width);
  try {
    block(layer, part);
  } catch (...) {
    interrupt();
    throw;
  }
  std::copy(hidden_.begin(), hidden_.end(), states);
  watch_.charge(counters_.compute_ns);
}

void Model::look() {
  try {
    check_();
  } catch (...) {
    ffn_.interrupt();
    throw;
  }
}

// Of `count` tokens' states: whatever followed would be nonsense without a sign of it.
void Model::check_finite(std::size_t layer, const float* values, std::size_t count) const {
  const std::size_t n = count * spec_.block.d_model;
  unsigned others = 0;
  for (std::size_t i = 0; i < n; ++i) others |= exponent_is_full(values[i]);
  if (others == 0) return;
  throw CoreError(ErrorKind::numbers,
                  "layer " + std::to_string(layer) +
                      " computed a number that is not finite: an overflow, or damaged weights; check the "
                      "model with `flashllm verify`, or convert it with --dtype float32");
}

}  // namespace flashllm
