#include "model/model.h"

#include <algorithm>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kShortPass = 16;  // tokens of a sparse pass that nobody needs to end

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
      ends_(spec_, weights_, arithmetic_),
      memory_(pool, level),
      ffn_(spec_, weights_.blocks, rows, activation, stream, counters, watch_, arithmetic_),
      layer_(spec_.block, spec_.rotary, arithmetic_, memory_, ffn_) {
  check_fits(spec_, weights_, rows);
}

void Model::step(const std::vector<Token>& tokens, Pass pass, const std::vector<std::size_t>& wanted,
                 float* logits, Tap* tap, std::size_t drafted, std::size_t stretches) {
  watch_.restart();
  const bool is_prompt = pass == Pass::prompt;
  require(tap == nullptr || is_prompt, "only a prompt's pass can be observed");
  const std::size_t most = std::max<std::size_t>(1, spec_.block_tokens), width = spec_.block.d_model;
  require(drafted == 0 ||
              (!is_prompt && drafted < tokens.size() && tokens.size() <= std::min(most, FfnTokens::kMost)),
          "a pass cannot have so many drafted tokens");
  // 1. Many tokens go in parts of about equal length, a prompt's in stretches of about as many parts. Who
  // observes sees a part at a time.
  const std::size_t parts = (tokens.size() + most - 1) / most;
  if (stretches == 0 || !is_prompt || tap != nullptr) stretches = parts;
  stretches = std::min(stretches, parts);
  progress_ = {0, parts * num_layers()};
  auto next_wanted = wanted.begin();
  try {
    for (std::size_t i = 0; i < stretches; ++i) {
      std::vector<Part> stretch;
      const std::size_t first = tokens.size() * (parts * i / stretches) / parts;
      for (std::size_t p = parts * i / stretches; p < parts * (i + 1) / stretches; ++p) {
        const std::size_t begin = tokens.size() * p / parts, end = tokens.size() * (p + 1) / parts;
        const bool fills = is_prompt && spec_.fill_tokens != 0 && p + 1 == parts;
        stretch.push_back({tokens.data() + begin, end - begin, pass, fills, i + 1 == stretches, false, tap, 0,
                           drafted, stretch.size(), begin - first});
      }
      run(stretch);
      // 2. Logits of those that are wanted, a part at a time.
      for (const Part& part : stretch) {
        const std::size_t end = first + part.first + part.count;
        std::vector<float> states;
        for (; next_wanted != wanted.end() && *next_wanted < end; ++next_wanted) {
          const float* row = hidden_.data() + (*next_wanted - first) * width;
          states.insert(states.end(), row, row + width);
        }
        const std::size_t rows = states.size() / width;
        if (rows != 0) ends_.head(states.data(), rows, is_prompt, logits);
        logits += rows * spec_.vocab;
      }
    }
  } catch (...) {
    interrupt();
    for (const Token& token : tokens) token.sequence->keep(token.sequence->length());
    release_states(most);
    throw;
  }
  // 3. Nothing can fail any more: the sequences get their tokens.
  for_each_sequence(tokens.data(), tokens.size(),
                    [](const Token&, const Token& last) { last.sequence->commit(last.position + 1); });
  release_states(most);
  watch_.charge(counters_.compute_ns);
}

// What a stretch took and a part has no use for.
void Model::release_states(std::size_t part_tokens) noexcept {
  for (std::vector<float>* states : {&hidden_, &attended_})
    if (states->size() > part_tokens * spec_.block.d_model) std::vector<float>().swap(*states);
}

// The parts of a stretch, from their tokens to their last states.
void Model::run(std::vector<Part>& stretch) {
  const std::size_t width = spec_.block.d_model;
  Part whole = stretch[0];
  whole.count = stretch.back().first + stretch.back().count;
  for_each_sequence(whole.tokens, whole.count, [](const Token& first, const Token& last) {
    first.sequence->reserve(last.position + 1, first.position);
  });
  hidden_.resize(whole.count * width);
  for (const Part& part : stretch) ends_.embed(part.tokens, part.count, hidden_.data() + part.first * width);
  layer_.set_positions(whole);
  for (std::size_t layer = 0; layer < num_layers(); ++layer) {
    for (Part& part : stretch) part.kv_layer = layer;
    if (whole.is_prompt()) {
      run_layer(layer, stretch);
      continue;
    }
    layer_.run(layer, weights_.blocks[layer], stretch[0], hidden_.data());
    ++progress_.done;
    if (whole.pass != Pass::sparse || whole.count > kShortPass) look();
  }
}

// All parts of a prompt's stretch go through the attention; then the FFN's rows pass by, once for all of
// them.
void Model::run_layer(std::size_t layer, const std::vector<Part>& stretch) {
  const BlockWeights& weights = weights_.blocks[layer];
  if (weights.spec.parallel) attended_.resize(hidden_.size());
  const auto of_part = [&](std::vector<float>& values, const Part& part) {
    return values.empty() ? nullptr : values.data() + part.first * spec_.block.d_model;
  };
  for (const Part& part : stretch) {
    float* states = of_part(hidden_, part);
    const float* x = layer_.attend(layer, weights, part, states, of_part(attended_, part));
    ffn_.take({layer, part, x, states, nullptr});
    look();
  }
  ffn_.stream(layer, stretch.back(), [this] { look(); });
  for (const Part& part : stretch) {
    float* states = of_part(hidden_, part);
    ffn_.give({layer, part, nullptr, states, layer_.outputs()});
    layer_.add_ffn(layer, weights, part, states, of_part(attended_, part));
    ++progress_.done;
  }
}

void Model::run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens,
                      float* states, Tap* tap) {
  require(layer < num_layers(), "a layer beyond those there are");
  const AttentionSpec& attention = weights_.blocks[layer].spec.attention;
  for (const Token& token : tokens) {
    const LayerKv& kept = token.sequence->shape().layer(kv_layer);
    require(kept.kv_heads == attention.kv_heads && kept.head_dim == attention.head_dim,
            "a sequence must have room for this layer's keys and values");
  }
  watch_.restart();
  const Part part{tokens.data(), tokens.size(), Pass::prompt, false, true, true, tap, kv_layer, 0};
  layer_.set_positions(part);
  for (const Token& token : tokens) token.sequence->reserve(token.position + 1);
  try {
    layer_.run(layer, weights_.blocks[layer], part, states);
  } catch (...) {
    interrupt();
    throw;
  }
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

}  // namespace flashllm
