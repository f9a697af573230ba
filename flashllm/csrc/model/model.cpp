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
      ends_.embed(part.tokens, part.count, hidden_.data());
      run_part(part);
      // 2. Logits of those that are wanted.
      const std::size_t width = spec_.block.d_model;
      std::vector<float> states;
      for (; next_wanted != wanted.end() && *next_wanted < end; ++next_wanted) {
        const float* row = hidden_.data() + (*next_wanted - begin) * width;
        states.insert(states.end(), row, row + width);
      }
      const std::size_t rows = states.size() / width;
      if (rows != 0) ends_.head(states.data(), rows, is_prompt, logits);
      logits += rows * spec_.vocab;
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

void Model::run_part(const Part& part) {
  layer_.set_positions(part);
  for (std::size_t layer = 0; layer < num_layers(); ++layer) {
    Part here = part;
    here.kv_layer = layer;
    layer_.run(layer, weights_.blocks[layer], here, hidden_.data());
    if (part.pass != Pass::sparse || part.count > kShortPass) look();
  }
}

void Model::run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens,
                      float* states, Tap* tap) {
  require(layer < num_layers(), "a layer beyond those there are");
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
