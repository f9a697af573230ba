#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kShortPass = 16;  // tokens of a sparse pass that nobody needs to end
constexpr std::size_t kTokenGrain = 4;  // tokens a thread takes at a time, of what is done token by token
constexpr std::size_t kValueGrain = 1 << 15;  // values, of what is done value by value

unsigned exponent_is_full(float value) {  // of infinities, and of what is no number
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<unsigned>((bits & kExponent) == kExponent);
}

void require(bool condition, const char* message) {
  if (!condition) throw CoreError(ErrorKind::usage, message);
}

const float* part_of(const float* bias, std::size_t first) {
  return bias == nullptr ? nullptr : bias + first;
}

bool fits(const RowMatrix& weights, const BlockSpec& spec, std::size_t rows, std::size_t columns) {
  return weights.data != nullptr && (is_coded(weights.codec) || weights.codec == codec_of(spec.dtype)) &&
         weights.rows == rows && weights.columns == columns;
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

void check_block(const BlockSpec& spec, const BlockWeights& weights) {
  const std::size_t attended = spec.heads * spec.head_dim, cached = spec.kv_heads * spec.head_dim;
  const auto wide = [&](const Norm& norm, bool wanted) { return !wanted || norm.width == spec.d_model; };
  const bool input = spec.norms != NormPlace::output, output = norms_output(spec.norms);
  require(wide(weights.attention_norm, input) && wide(weights.ffn_norm, input && !spec.shared_norm) &&
              wide(weights.attention_output_norm, output) && wide(weights.ffn_output_norm, output),
          "a block's norms do not fit the model");
  const bool together = spec.head_norm == HeadNorm::projection;
  require(spec.head_norm == HeadNorm::none ||
              (weights.query_norm.width == (together ? attended : spec.head_dim) &&
               weights.key_norm.width == (together ? cached : spec.head_dim)),
          "a block's norms of queries and keys do not fit the model");
  require(
      fits(weights.query, spec, attended, spec.d_model) && fits(weights.key, spec, cached, spec.d_model) &&
          fits(weights.value, spec, cached, spec.d_model) && fits(weights.out, spec, spec.d_model, attended),
      "a block's projections do not fit the model");
  require(weights.ffn == nullptr || weights.ffn->width() == spec.d_model,
          "a block's FFN does not fit the model");
  require(!spec.rounded_inputs || (spec.norms == NormPlace::input && !spec.parallel),
          "inputs are rounded where a block's norms are, before attention and FFN");
  require(weights.mixed_norm.width == 0 || weights.mixed_norm.width == attended,
          "the norm before a block's output projection does not fit the model");
}

}  // namespace

Model::Model(const ModelSpec& spec, const ModelWeights& weights, const RowFormat& rows, Activation activation,
             RowStream& stream, ThreadPool& pool, FfnCounters& counters, SimdLevel level,
             std::function<void()> check)
    : spec_(spec),
      weights_(weights),
      rows_(rows),
      activation_(activation),
      stream_(stream),
      pool_(pool),
      counters_(counters),
      level_(level),
      level_of_many_(level_of_all(weights, level)),
      kernels_(kernel_table(level, spec.block.dtype)),
      check_(std::move(check)),
      dense_(rows, spec.block.dtype, pool, level),
      few_(rows, pool, level),
      experts_(rows, spec.block.dtype, pool, level),
      rotary_(spec.rotary.begin(), spec.rotary.end()) {
  const BlockSpec& block = spec_.block;
  require(block.d_model != 0 && block.head_dim != 0 && spec_.vocab != 0 && spec_.block_tokens != 0,
          "a model's sizes must not be zero");
  require(block.kv_heads != 0 && block.heads % block.kv_heads == 0, "heads must be a multiple of kv_heads");
  require(fits(weights_.embedding, block, spec_.vocab, spec_.embed_dim) &&
              fits(weights_.head, block, spec_.vocab, spec_.embed_dim),
          "the embedding or the head does not fit the model");
  const bool projected = spec_.embed_dim != block.d_model;
  require(!projected || (fits(weights_.project_in, block, block.d_model, spec_.embed_dim) &&
                         fits(weights_.project_out, block, spec_.embed_dim, block.d_model)),
          "the embedding's projections do not fit the model");
  require(weights_.positions.data == nullptr || weights_.positions.columns == block.d_model,
          "the position embedding does not fit the model");
  for (const Norm* each : {&weights_.embedding_norm, &weights_.final_norm})
    require(each->width == 0 || each->width == block.d_model,
            "the norm of the embedding, or the final norm, does not fit the model");
  require(spec_.d_ff != 0 && rows_.d_model == block.d_model, "the rows do not fit the model");
  require(weights_.blocks.size() == stream_.num_layers(), "every block needs rows to stream");
  for (const BlockWeights& each : weights_.blocks) {
    check_block(block, each);
    require(each.rotary < static_cast<int>(rotary_.size()),
            "a block wants a rotary embedding beyond those there are");
    require(!each.neuron_norm || each.neuron_norm.neurons == spec_.d_ff,
            "the norm before a block's down columns does not fit the model");
  }
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
    for (const Token& token : tokens) token.sequence->reserve(token.position + 1);
    for (std::size_t i = 0; i < parts; ++i) {
      const std::size_t end = tokens.size() * (i + 1) / parts;
      Part part{tokens.data() + begin, end - begin, pass, false, i + 1 == parts, false, tap, 0, drafted};
      part.fills = is_prompt && spec_.fill_tokens != 0 && part.is_last;
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
    for (const Token& token : tokens) token.sequence->truncate(token.sequence->length());
    throw;
  }
  // 3. Nothing can fail any more: the sequences get their tokens.
  for (const Token& token : tokens) token.sequence->commit(token.position + 1);
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
    widen_row(weights_.embedding, static_cast<std::size_t>(tokens[t].id), to + t * spec_.embed_dim, level_);
  }
  if (spec_.embedding_scale != 1.0F) {
    for (std::size_t i = 0; i < count * spec_.embed_dim; ++i) to[i] *= spec_.embedding_scale;
    round(to, count * spec_.embed_dim);
  }
  if (projected) {
    // Once a token, few at a time: the kernel of one token, whose bits depend on nothing else.
    linear(weights_.project_in, embedded.data(), count, states, pool_, level_);
    round(states, count * width);
  }
  if (weights_.embedding_norm.width != 0) normalize(weights_.embedding_norm, count, states, states);
  if (weights_.positions.data == nullptr) return;
  std::vector<float> position(width);
  for (std::size_t t = 0; t < count; ++t) {
    const std::size_t row = tokens[t].position + spec_.position_offset;
    require(row < weights_.positions.rows, "a position beyond the model's position embedding");
    widen_row(weights_.positions, row, position.data(), level_);
    for (std::size_t j = 0; j < width; ++j) states[t * width + j] += position[j];
  }
  round(states, count * width);
}

void Model::set_positions(const Part& part) {
  if (rotary_.empty()) return;
  std::vector<std::size_t> positions;
  for (std::size_t t = 0; t < part.count; ++t) positions.push_back(part.tokens[t].position);
  for (RotaryTable& rotary : rotary_) rotary.set_positions(positions.data(), positions.size());
}

void Model::run_part(const Part& part) {
  set_positions(part);
  for (std::size_t layer = 0; layer < num_layers(); ++layer) {
    Part here = part;
    here.kv_layer = layer;
    block(layer, here);
    check_finite(layer, hidden_.data(), part.count);
    if (part.pass != Pass::sparse || part.count > kShortPass) look();
  }
}

void Model::look() {
  try {
    check_();
  } catch (...) {
    stream_.interrupt();
    for (const BlockWeights& each : weights_.blocks)
      if (each.ffn != nullptr) each.ffn->interrupt();
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

void Model::run_block(std::size_t layer, std::size_t kv_layer, const std::vector<Token>& tokens,
                      float* states, Tap* tap) {
  require(layer < num_layers(), "a layer beyond those there are");
  watch_.restart();
  const std::size_t width = spec_.block.d_model;
  const Part part{tokens.data(), tokens.size(), Pass::prompt, false, true, true, tap, kv_layer, 0};
  set_positions(part);
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

void Model::accept(std::size_t count) {
  for (const BlockWeights& each : weights_.blocks)
    if (each.ffn != nullptr) each.ffn->accept(count);
}

void Model::interrupt() noexcept {
  stream_.drain();
  for (const BlockWeights& each : weights_.blocks) {
    if (each.ffn == nullptr) continue;
    each.ffn->abandon();
    each.ffn->abandon_fill();
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
  if (before) normalize(weights.attention_norm, count, hidden_.data(), normed_.data());
  if (spec.rounded_inputs) round_inputs(count, spec.d_model, normed_.data());
  take_inputs(before ? normed_.data() : hidden_.data(), count, spec.d_model, part.pass);
  attend(layer, part);
  if (behind) normalize(weights.attention_output_norm, count, projected_.data(), projected_.data());
  if (spec.parallel) {
    attended_.assign(projected_.begin(), projected_.begin() + static_cast<std::ptrdiff_t>(n));
  } else {
    add_projected(count);
    if (spec.norms == NormPlace::sum)
      normalize(weights.attention_norm, count, hidden_.data(), hidden_.data());
  }
  // 2. The FFN.
  if (before && !spec.shared_norm) normalize(weights.ffn_norm, count, hidden_.data(), normed_.data());
  if (spec.rounded_inputs) round_inputs(count, spec.d_model, normed_.data());
  const float* input = before ? normed_.data() : hidden_.data();
  check_finite(layer, input, count);  // a predictor names no neurons for it, and nothing would show
  feed_forward(layer, part, input);
  if (behind) {
    round(projected_.data(), n);
    normalize(weights.ffn_output_norm, count, projected_.data(), projected_.data());
  }
  if (spec.parallel) {
    round(projected_.data(), n);
    for (std::size_t i = 0; i < n; ++i) projected_[i] += attended_[i];
  }
  add_projected(count);
  if (spec.norms == NormPlace::sum) normalize(weights.ffn_norm, count, hidden_.data(), hidden_.data());
}

// The inputs taken -> projected_, the attention's output.
void Model::attend(std::size_t layer, const Part& part) {
  const BlockSpec& spec = spec_.block;
  const BlockWeights& weights = weights_.blocks[layer];
  const std::size_t count = part.count, attended = spec.heads * spec.head_dim,
                    cached = spec.kv_heads * spec.head_dim;
  query_.resize(count * attended);
  keys_.resize(count * cached);
  values_.resize(count * cached);
  mixed_.resize(count * attended);
  project(weights.query, count, query_.data());
  project(weights.key, count, keys_.data());
  project(weights.value, count, values_.data());
  prepare_heads(weights, count);
  for (std::size_t t = 0; t < count; ++t)
    part.tokens[t].sequence->append(part.kv_layer, part.tokens[t].position, keys_.data() + t * cached,
                                    values_.data() + t * cached);
  attend_to_cache(weights, part);
  round(mixed_.data(), count * attended);
  if (weights.mixed_norm.width != 0) normalize(weights.mixed_norm, count, mixed_.data(), mixed_.data());
  if (spec.rounded_inputs) round_inputs(count, attended, mixed_.data());
  take_inputs(mixed_.data(), count, attended, part.pass);
  project(weights.out, count, projected_.data());
}

// query_ and keys_: their norms, their rotation, the scale of the queries.
void Model::prepare_heads(const BlockWeights& weights, std::size_t count) {
  const BlockSpec& spec = spec_.block;
  const std::size_t attended = spec.heads * spec.head_dim, cached = spec.kv_heads * spec.head_dim;
  if (spec.head_norm != HeadNorm::none) {
    const bool together = spec.head_norm == HeadNorm::projection, own = spec.head_norm == HeadNorm::heads;
    pool_.parallel_for(count, kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) {
        normalize_heads(weights.query_norm, together ? 1 : spec.heads, own, query_.data() + t * attended);
        normalize_heads(weights.key_norm, together ? 1 : spec.kv_heads, own, keys_.data() + t * cached);
      }
    });
    round(query_.data(), count * attended);
    round(keys_.data(), count * cached);
  }
  const RotaryTable* rotary =
      weights.rotary >= 0 ? &rotary_[static_cast<std::size_t>(weights.rotary)] : nullptr;
  if (rotary == nullptr && spec.query_scale == 1.0F) return;
  pool_.parallel_for(count, kTokenGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) {
      float* query = query_.data() + t * attended;
      if (rotary != nullptr) {
        rotary->apply(t, query, spec.heads, spec.head_dim);
        rotary->apply(t, keys_.data() + t * cached, spec.kv_heads, spec.head_dim);
      }
      if (spec.query_scale != 1.0F)
        for (std::size_t i = 0; i < attended; ++i) query[i] *= spec.query_scale;
    }
  });
  if (rotary != nullptr) round(keys_.data(), count * cached);
  round(query_.data(), count * attended);
}

// query_ -> mixed_, over the keys and values that each token's sequence has up to it.
void Model::attend_to_cache(const BlockWeights& weights, const Part& part) {
  const BlockSpec& spec = spec_.block;
  const std::size_t attended = spec.heads * spec.head_dim;
  AttentionShape shape;
  shape.heads = spec.heads;
  shape.kv_heads = spec.kv_heads;
  shape.head_dim = spec.head_dim;
  shape.dtype = spec.dtype;
  shape.softcap = spec.attention_softcap;
  shape.window = weights.attention_window;
  shape.sinks = weights.sinks;
  shape.alibi = spec.alibi;
  if (part.pass != Pass::prompt) {
    std::vector<AttendingToken> attending;
    for (std::size_t t = 0; t < part.count; ++t)
      attending.push_back({query_.data() + t * attended, part.tokens[t].sequence->view(part.kv_layer),
                           part.tokens[t].position + 1, mixed_.data() + t * attended});
    attend_each(shape, attending.data(), attending.size(), pool_, level_);
    return;
  }
  for (std::size_t begin = 0; begin < part.count;) {
    KvSequence* sequence = part.tokens[begin].sequence;
    std::size_t end = begin + 1;
    while (end < part.count && part.tokens[end].sequence == sequence) ++end;
    attend_many(shape, query_.data() + begin * attended, end - begin, part.tokens[begin].position,
                sequence->view(part.kv_layer), mixed_.data() + begin * attended, pool_, level_);
    begin = end;
  }
}

// x -> projected_
void Model::feed_forward(std::size_t layer, const Part& part, const float* x) {
  const FfnLayer* ffn = weights_.blocks[layer].ffn;
  const bool routed = ffn != nullptr && ffn->router() != nullptr;
  switch (part.pass) {
    case Pass::sparse:
      return feed_sparse(layer, part, x);
    case Pass::oracle:
      return feed_oracle(layer, part, x);
    case Pass::dense:
      return routed ? feed_sparse(layer, part, x) : feed_every(layer, part, x);
    case Pass::prompt:
      return routed ? feed_experts(layer, part, x) : feed_prompt(layer, part, x);
  }
}

// Each token with its own active set. Only a lone token's next layer is known soon enough to prefetch for it.
void Model::feed_sparse(std::size_t layer, const Part& part, const float* x) {
  const std::size_t width = spec_.block.d_model;
  FfnLayer& ffn = *weights_.blocks[layer].ffn;
  FfnLayer* next = layer + 1 < num_layers() ? weights_.blocks[layer + 1].ffn : nullptr;
  const bool prefetches = spec_.prefetch && part.count == 1 && next != nullptr && next->can_prefetch();
  watch_.charge(counters_.compute_ns);
  active_.resize(std::max(active_.size(), part.count));
  for (std::size_t t = 0; t < part.count; ++t) active_[t] = ffn.predict(seen(ffn, x) + t * width, t);
  for (std::size_t t = 0; t < part.count; t += FfnTokens::kMost) {
    ffn.begin(together(part, x, t, true));
    if (prefetches) next->prefetch(x, t);
    ffn.finish(projected_.data() + t * width);
  }
  watch_.restart();  // the layer has counted its own time
}

// Tokens of a part from the `first` on, over the neurons in active_; `predicted`: by the layer itself.
FfnTokens Model::together(const Part& part, const float* x, std::size_t first, bool predicted) const {
  const std::size_t count = std::min(part.count - first, FfnTokens::kMost);
  return {x + first * spec_.block.d_model, active_.data() + first, count, first, part.drafted, predicted};
}

// The neurons that really fire, computed as the sparse pass does. A resident gate names them; without one
// every row is read to find them.
void Model::feed_oracle(std::size_t layer, const Part& part, const float* x) {
  const std::size_t width = spec_.block.d_model;
  const BlockWeights& weights = weights_.blocks[layer];
  if (weights.gate != nullptr) return feed_sparse(layer, part, x);
  FfnLayer& ffn = *weights.ffn;
  const float* driver_bias = rows_.gated() ? weights.gate_bias : weights.up_bias;
  active_.resize(std::max(active_.size(), part.count));
  for (std::size_t t = 0; t < part.count; ++t) active_[t].clear();
  std::vector<const void*> rows;
  std::vector<std::int32_t> ids;
  std::vector<float> values;
  RowBlock block;
  stream_.begin(static_cast<int>(layer), layer_after(layer, part));
  watch_.charge(counters_.compute_ns);
  while (stream_.next(block)) {
    charge_stream();
    const std::size_t count = std::min(block.count, spec_.d_ff - block.first_row);
    rows.clear();
    ids.clear();
    values.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      rows.push_back(block.rows + i * rows_.stride + rows_.driver());
      ids.push_back(static_cast<std::int32_t>(block.first_row + i));
    }
    const ScatteredRows scattered{rows.data(), count, width, rows_.codec, rows_.inputs};
    for (std::size_t t = 0; t < part.count; ++t) {
      dot_scattered(scattered, x + t * width, ids.data(), driver_bias, activation(layer), values.data(),
                    pool_, level_);
      for (std::size_t i = 0; i < count; ++i)
        if (values[i] != 0.0F) active_[t].push_back(ids[i]);
    }
    watch_.charge(counters_.compute_ns);
  }
  for (std::size_t t = 0; t < part.count; t += FfnTokens::kMost) {
    ffn.begin(together(part, x, t, false));
    ffn.finish(projected_.data() + t * width);
  }
  watch_.restart();
}

// Every row of a layer, block by block. `then`: as RowStream::begin.
template <typename Body>
void Model::each_block(std::size_t layer, int then, const Body& body) {
  stream_.begin(static_cast<int>(layer), then);
  watch_.charge(counters_.compute_ns);
  RowBlock block;
  while (stream_.next(block)) {
    charge_stream();
    body(block, std::min(block.count, spec_.d_ff - block.first_row));
    watch_.charge(counters_.compute_ns);
  }
}

const std::byte* Model::gate_rows(const BlockWeights& weights, std::size_t first) const {
  if (weights.gate == nullptr) return nullptr;
  return weights.gate + first * vector_nbytes(rows_.codec, spec_.block.d_model);
}

// Every neuron, block by block, token by token. Where a norm lies before the down columns, these wait for all
// values, and the rows pass a second time.
void Model::feed_every(std::size_t layer, const Part& part, const float* x) {
  const BlockWeights& weights = weights_.blocks[layer];
  const std::size_t width = spec_.block.d_model;
  const bool waits = static_cast<bool>(weights.neuron_norm);
  few_.begin(x, part.count, activation(layer), projected_.data(), plane(weights));
  if (waits) few_.keep_values(weights.neuron_norm);
  each_block(layer, waits ? static_cast<int>(layer) : layer_after(layer, part),
             [&](const RowBlock& block, std::size_t count) {
               few_.multiply(block.rows, count, part_of(weights.up_bias, block.first_row),
                             part_of(weights.gate_bias, block.first_row),
                             gate_rows(weights, block.first_row));
               if (!waits) few_.add(block.rows, count);
             });
  if (waits) {
    few_.apply();
    each_block(layer, layer_after(layer, part),
               [&](const RowBlock& block, std::size_t count) { few_.add(block.rows, count); });
  }
  if (weights.down_bias == nullptr) return;
  for (std::size_t t = 0; t < part.count; ++t)
    for (std::size_t j = 0; j < width; ++j) projected_[t * width + j] += weights.down_bias[j];
}

// The same of a prompt, in products of many tokens; its last ones fill the neuron cache as the rows pass by.
void Model::feed_prompt(std::size_t layer, const Part& part, const float* x) {
  const std::size_t width = spec_.block.d_model;
  const BlockWeights& weights = weights_.blocks[layer];
  const bool fills = part.fills && weights.ffn != nullptr, waits = static_cast<bool>(weights.neuron_norm);
  if (part.tap != nullptr) part.tap->input(layer, x, part.count);
  watch_.charge(counters_.compute_ns);
  if (fills) {
    const std::size_t recent = std::min(part.count, spec_.fill_tokens);
    weights.ffn->begin_fill(seen(*weights.ffn, x) + (part.count - recent) * width, recent);
    watch_.restart();
  }
  narrow_.resize(part.count * width * dtype_nbytes(spec_.block.dtype));
  narrow(x, part.count * width, narrow_.data());
  dense_.begin(narrow_.data(), part.count, activation(layer), plane(weights));
  if (waits) dense_.keep_values(weights.neuron_norm);
  const int then = waits ? static_cast<int>(layer) : layer_after(layer, part);
  each_block(layer, then, [&](const RowBlock& block, std::size_t count) {
    if (fills) {
      weights.ffn->fill_from(block.rows, static_cast<std::int32_t>(block.first_row),
                             static_cast<std::int32_t>(count));
      watch_.restart();
    }
    float* h =
        dense_.activations(block.rows, count, part_of(weights.up_bias, block.first_row),
                           part_of(weights.gate_bias, block.first_row), gate_rows(weights, block.first_row));
    if (part.tap != nullptr) part.tap->activations(layer, block.first_row, count, h, dense_.padded());
    if (!waits) dense_.add(block.rows, count);
  });
  if (waits) {
    dense_.apply();
    each_block(layer, layer_after(layer, part),
               [&](const RowBlock& block, std::size_t count) { dense_.add(block.rows, count); });
  }
  dense_.finish(weights.down_bias, narrow_.data());
  widen(narrow_.data(), part.count * width, projected_.data());
}

// Every expert that a token of the part goes to, once.
void Model::feed_experts(std::size_t layer, const Part& part, const float* x) {
  const std::size_t width = spec_.block.d_model;
  const BlockWeights& weights = weights_.blocks[layer];
  require(part.tap == nullptr, "what the experts of a mixture see and compute cannot be observed");
  stream_.begin(static_cast<int>(layer),
                experts_.begin(*weights.ffn->router(), x, part.count, activation(layer)));
  watch_.charge(counters_.compute_ns);
  if (part.fills) {
    const std::size_t recent = std::min(part.count, spec_.fill_tokens);
    weights.ffn->begin_fill(x + (part.count - recent) * width, recent);
    watch_.restart();
  }
  std::fill_n(projected_.begin(), part.count * width, 0.0F);
  RowBlock block;
  while (stream_.next(block)) {
    charge_stream();
    if (part.fills) {
      weights.ffn->fill_from(block.rows, static_cast<std::int32_t>(block.first_row),
                             static_cast<std::int32_t>(block.count));
      watch_.restart();
    }
    experts_.add(block, weights.up_bias, weights.gate_bias, projected_.data());
    watch_.charge(counters_.compute_ns);
  }
}

// What the layer's predictor is given of tokens whose FFN input is x. The states before the norm stay as they
// are until the FFN is done.
const float* Model::seen(const FfnLayer& ffn, const float* x) const {
  return ffn.predicts_by_stream() ? hidden_.data() : x;
}

const ScalePlane* Model::plane(const BlockWeights& weights) const {
  return has_plane(rows_.down_codec) ? &weights.plane : nullptr;
}

Activation Model::activation(std::size_t layer) const {
  const BlockWeights& weights = weights_.blocks[layer];
  return {activation_.kind, weights.activation_threshold, weights.activation_cut};
}

// The rows that a dense pass wants after this layer's; none where the next pass is not known.
int Model::layer_after(std::size_t layer, const Part& part) const {
  if (part.is_one_block) return RowStream::kNoLayer;
  if (layer + 1 < num_layers()) return static_cast<int>(layer) + 1;
  return part.is_last ? RowStream::kNoLayer : 0;
}

void Model::charge_stream() {
  const StreamTimes times = stream_.take();
  counters_.io_ns += times.wait_ns;
  counters_.io_busy_ns += times.busy_ns;
  counters_.bytes_read += times.bytes;
  counters_.requests += times.requests;
  counters_.retries += times.retries;
  watch_.restart();
}

void Model::head(const Part& part, const std::vector<std::size_t>& rows, float* logits) {
  if (rows.empty()) return;
  const std::size_t width = spec_.block.d_model, count = rows.size();
  std::vector<float> states(count * width);
  for (std::size_t i = 0; i < count; ++i)
    std::copy_n(hidden_.data() + rows[i] * width, width, states.data() + i * width);
  if (weights_.final_norm.width != 0) normalize(weights_.final_norm, count, states.data(), states.data());
  if (weights_.project_out.data != nullptr) {
    std::vector<float> projected(count * spec_.embed_dim);
    take_inputs(states.data(), count, width, part.pass);
    project(weights_.project_out, count, projected.data());
    states.swap(projected);
  }
  take_inputs(states.data(), count, spec_.embed_dim, part.pass);
  project(weights_.head, count, logits);
  const std::size_t n = count * spec_.vocab;
  if (spec_.logit_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) logits[i] *= spec_.logit_scale;
    round(logits, n);
  }
  if (spec_.logit_softcap != 0.0F) {
    for (std::size_t i = 0; i < n; ++i)
      logits[i] = spec_.logit_softcap * std::tanh(logits[i] / spec_.logit_softcap);
    round(logits, n);
  }
}

void Model::normalize(const Norm& norm, std::size_t count, const float* x, float* y) {
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

// To 8 bits, token by token.
void Model::round_inputs(std::size_t count, std::size_t width, float* x) {
  for (std::size_t t = 0; t < count; ++t) round_to_8_bits(x + t * width, width);
  round(x, count * width);
}

// The inputs [count, width] of the products that follow: `x` must stay as it is until the last of them.
void Model::take_inputs(const float* x, std::size_t count, std::size_t width, Pass pass) {
  inputs_ = x;
  packed_.reset();
  if (pass != Pass::prompt) return;
  narrow_.resize(count * width * dtype_nbytes(spec_.block.dtype));
  narrow(x, count * width, narrow_.data());
  packed_ =
      std::make_unique<PackedTokens>(narrow_.data(), count, width, spec_.block.dtype, pool_, level_of_many_);
}

// out [count, rows], rounded: the inputs taken times the weights.
void Model::project(const RowMatrix& weights, std::size_t count, float* out) {
  const std::size_t n = count * weights.rows;
  if (packed_ == nullptr) {
    linear(weights, inputs_, count, out, pool_, level_);
    round(out, n);
    return;
  }
  products_.resize(n * dtype_nbytes(spec_.block.dtype));
  linear_many(weights, *packed_, spec_.block.dtype, products_.data(), pool_, level_of_many_);
  widen(products_.data(), n, out);
}

// hidden_ += projected_
void Model::add_projected(std::size_t count) {
  const std::size_t n = count * spec_.block.d_model;
  round(projected_.data(), n);
  if (spec_.block.residual_scale != 1.0F) {
    for (std::size_t i = 0; i < n; ++i) projected_[i] *= spec_.block.residual_scale;
    round(projected_.data(), n);
  }
  for (std::size_t i = 0; i < n; ++i) hidden_[i] += projected_[i];
  round(hidden_.data(), n);
}

// A token's values are handled at once, a prompt's by all threads.
template <typename Body>
void Model::each_share(std::size_t n, const Body& body) {
  if (n <= kValueGrain) {
    body(0, n);
  } else {
    pool_.parallel_for(n, kValueGrain, body);
  }
}

void Model::round(float* values, std::size_t n) {
  if (spec_.block.dtype == Dtype::f32) return;
  const std::size_t item = dtype_nbytes(spec_.block.dtype);
  rounded_.resize(std::max(rounded_.size(), n * item));
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.from_f32(values + begin, end - begin, rounded_.data() + begin * item);
    kernels_.to_f32(rounded_.data() + begin * item, end - begin, values + begin);
  });
}

void Model::widen(const std::byte* from, std::size_t n, float* to) {
  const std::size_t item = dtype_nbytes(spec_.block.dtype);
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.to_f32(from + begin * item, end - begin, to + begin);
  });
}

void Model::narrow(const float* from, std::size_t n, std::byte* to) {
  const std::size_t item = dtype_nbytes(spec_.block.dtype);
  each_share(n, [&](std::size_t begin, std::size_t end) {
    kernels_.from_f32(from + begin, end - begin, to + begin * item);
  });
}

}  // namespace flashllm
