#include "model/model.h"

#include <algorithm>
#include <utility>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kShortPass = 16;  // tokens of a sparse pass that nobody needs to end

}  // namespace

Model::Model(const ModelSpec& spec, const ModelWeights& weights, RowStream& stream, TokenTable* table,
             ThreadPool& pool, FfnCounters& counters, SimdLevel level)
    : spec_(spec),
      weights_(weights),
      table_(table),
      counters_(counters),
      arithmetic_(spec.block.dtype, pool, level),
      ends_(spec_, weights_, arithmetic_),
      memory_(pool, level),
      ffn_(spec_, weights_.blocks, stream, counters, watch_, arithmetic_),
      layer_(spec_.block, spec_.rotary, arithmetic_, memory_, ffn_) {
  require(spec_.part_tokens != 0, "a prompt's parts need a token");
  for (const BlockWeights& each : weights_.blocks) {
    require(each.format.d_model == spec_.block.d_model, "rows are as wide as the model");
    require(!each.neuron_norm.cuts_gates ||
                (each.ffn == nullptr && each.up_bias == nullptr && each.gate_bias == nullptr),
            "a layer's gates are cut where it runs dense, without biases");
  }
  const bool reads = reads_embedding();
  require((table != nullptr ? table->columns() : 0) == (reads ? spec_.embed_dim : spec_.block.row_width()),
          "the table of rows by token does not fit the model");
  require(reads == (weights_.embedding.data == nullptr) &&
              (!reads || spec_.embed_dim == spec_.block.state_width()),
          "a model has its embedding, or a table of states in its place");
}

void Model::embed(const Token* tokens, std::size_t count, float* states) {
  for (std::size_t t = 0; t < count; ++t)
    require(tokens[t].id >= 0 && static_cast<std::size_t>(tokens[t].id) < spec_.vocab,
            "a token id beyond the vocabulary");
  if (!reads_embedding()) return ends_.embed(tokens, count, states);
  const std::size_t width = spec_.embed_dim;
  try {
    table_->request(tokens, count);
    watch_.charge(counters_.compute_ns);
    table_->take([&](std::size_t token, float* row) { std::copy_n(row, width, states + token * width); },
                 counters_);
  } catch (...) {
    interrupt();
    throw;
  }
  watch_.charge(counters_.io_ns);
  ends_.embed_rows(states, tokens, count, states);
}

void Model::run_block(std::size_t layer, const std::vector<Token>& tokens, float* states, Tap* tap) {
  require(layer < num_layers(), "a layer beyond those there are");
  const LayerSpec& spec = weights_.blocks[layer].spec;
  for (const Token& token : tokens) {
    const LayerKv& kept = token.sequence->shape().layer(0);
    require(spec.attention.heads != 0 && spec.state.value_heads == 0 && spec.attention.shared < 0 &&
                kept.kv_heads == spec.attention.kv_heads && kept.head_dim == spec.attention.head_dim &&
                kept.keys_alone == spec.attention.is_latent() && spec_.block.streams == 0,
            "a sequence must have room for this layer's keys and values");
  }
  watch_.restart();
  const Part part{tokens.data(), tokens.size(), Pass::prompt, tap};
  layer_.set_positions(part);
  for (const Token& token : tokens) token.sequence->reserve(token.position + 1);
  try {
    layer_.run(layer, weights_.blocks[layer], part, states);
  } catch (...) {
    interrupt();
    throw;
  }
  layer_.expanded() = {};
  watch_.charge(counters_.compute_ns);
}

// Many tokens go in parts of about equal length, a prompt's in stretches of about as many parts. Who observes
// sees a part at a time.
RunningPass::RunningPass(Model& model, std::vector<Token> tokens, Pass pass, std::vector<std::size_t> wanted,
                         float* logits, std::function<void()> check, Tap* tap, std::size_t drafted,
                         std::size_t stretches, std::size_t expanded)
    : model_(model),
      tokens_(std::move(tokens)),
      pass_(pass),
      wanted_(std::move(wanted)),
      logits_(logits),
      check_(std::move(check)),
      tap_(tap),
      drafted_(drafted),
      expanded_heads_(expanded) {
  const bool is_prompt = pass == Pass::prompt;
  require(tap == nullptr || is_prompt, "only a prompt's pass can be observed");
  const std::size_t most = std::max<std::size_t>(1, model.spec_.part_tokens);
  require(drafted == 0 ||
              (!is_prompt && drafted < tokens_.size() && tokens_.size() <= std::min(most, FfnTokens::kMost)),
          "a pass cannot have so many drafted tokens");
  parts_ = (tokens_.size() + most - 1) / most;
  stretches_ = stretches == 0 || !is_prompt || tap != nullptr ? parts_ : std::min(stretches, parts_);
  progress_ = {0, parts_ * model.num_layers()};
  if (is_prompt) ffn_.emplace(model.ffn_.new_stretch());
}

// Others may have passed since: what they share with this pass is put back.
void RunningPass::resume() {
  require(!is_over_, "the pass is over");
  model_.watch_.restart();
  if (phase_ == Phase::start) return;
  model_.layer_.positions() = std::move(positions_);
  model_.layer_.expanded() = std::move(expanded_);
  if (phase_ == Phase::rows) model_.ffn_.resume_rows(*ffn_, layer_, stretch_.back());
}

void RunningPass::suspend() {
  if (phase_ != Phase::start) positions_ = model_.layer_.positions();
  expanded_ = std::exchange(model_.layer_.expanded(), {});
  if (ffn_) ffn_->rest();
  model_.watch_.charge(model_.counters_.compute_ns);
}

// Nothing can fail any more: the sequences get their tokens.
void RunningPass::end() {
  is_over_ = true;
  ffn_.reset();
  model_.layer_.expanded() = {};
  for_each_sequence(tokens_.data(), tokens_.size(), [&](const Token&, const Token& last) {
    last.sequence->commit(last.position + 1, pass_ == Pass::prompt);
  });
  model_.watch_.charge(model_.counters_.compute_ns);
}

void RunningPass::close() noexcept {
  if (is_over_) return;
  is_over_ = true;
  model_.interrupt();
  for_each_sequence(tokens_.data(), tokens_.size(),
                    [](const Token& first, const Token&) { first.sequence->keep(first.sequence->length()); });
}

void RunningPass::look() {
  try {
    check_();
  } catch (...) {
    model_.ffn_.interrupt();
    throw;
  }
}

bool RunningPass::step() {
  switch (phase_) {
    case Phase::start:
      start_stretch();
      break;
    case Phase::layer:
      run_layer();
      break;
    case Phase::attend:
      attend_part();
      break;
    case Phase::rows:
      if (!model_.ffn_.next_rows(*ffn_, layer_, stretch_.back(), [this] { look(); })) phase_ = Phase::add;
      break;
    case Phase::add:
      add_part();
      break;
    case Phase::head:
      make_logits();
      break;
  }
  return number_ < stretches_;
}

// From the tokens to the states that enter the first layer.
void RunningPass::start_stretch() {
  const std::size_t count = tokens_.size(), begins = parts_ * number_ / stretches_,
                    ends = parts_ * (number_ + 1) / stretches_;
  stretch_.clear();
  first_ = count * begins / parts_;
  for (std::size_t p = begins; p < ends; ++p) {
    const std::size_t begin = count * p / parts_, end = count * (p + 1) / parts_;
    const bool fills = pass_ == Pass::prompt && model_.spec_.fill_tokens != 0 && p + 1 == parts_;
    stretch_.push_back({tokens_.data() + begin, end - begin, pass_, tap_, fills, number_ + 1 == stretches_,
                        false, drafted_, p - begins, begin - first_, 0, expanded_heads_});
  }
  Part whole = stretch_[0];
  whole.count = stretch_tokens();
  for_each_sequence(whole.tokens, whole.count, [](const Token& first, const Token& last) {
    first.sequence->reserve(last.position + 1, first.position);
  });
  const bool has_rows = model_.spec_.block.row_width() != 0;
  if (has_rows) model_.table_->request(whole.tokens, whole.count);
  hidden_.resize(whole.count * model_.spec_.block.state_width());
  if (model_.reads_embedding())
    model_.embed(whole.tokens, whole.count, hidden_.data());
  else
    for (const Part& part : stretch_) model_.embed(part.tokens, part.count, of_part(hidden_, part));
  if (has_rows) take_rows();
  for (const Part& part : stretch_)
    if (model_.spec_.block.streams != 0)
      model_.ends_.spread(of_part(hidden_, part), part.count, part.is_prompt());
  model_.layer_.set_positions(whole);
  layer_ = 0;
  phase_ = ffn_ ? Phase::attend : Phase::layer;
}

// Of per-layer embeddings: what the states give, while the tokens' rows are read, and these.
void RunningPass::take_rows() {
  const std::size_t width = model_.table_->columns();
  rows_.resize(stretch_tokens() * width);
  for (Part& part : stretch_) {
    float* to = rows_.data() + part.first * width;
    model_.ends_.project_rows(of_part(hidden_, part), part.count, part.is_prompt(), to);
    part.per_layer = to;
  }
  model_.watch_.charge(model_.counters_.compute_ns);
  model_.table_->take(
      [&](std::size_t token, float* row) { model_.ends_.add_row(row, rows_.data() + token * width); },
      model_.counters_);
  model_.watch_.charge(model_.counters_.io_ns);
}

float* RunningPass::of_part(std::vector<float>& values, const Part& part) const {
  return values.empty() ? nullptr : values.data() + part.first * model_.spec_.block.state_width();
}

// A pass of few tokens at a layer.
void RunningPass::run_layer() {
  Part& part = stretch_[0];
  part.kv_layer = layer_;
  model_.layer_.run(layer_, model_.weights_.blocks[layer_], part, hidden_.data());
  ++progress_.done;
  if (pass_ != Pass::sparse || part.count > kShortPass) look();
  next_layer();
}

// A prompt at a layer: all parts of a stretch go through the attention; then the FFN's rows pass by, once for
// all of them; then each part gets its sums.
void RunningPass::attend_part() {
  Part& part = stretch_[part_];
  part.kv_layer = layer_;
  const BlockWeights& weights = model_.weights_.blocks[layer_];
  if (weights.spec.parallel) attended_.resize(hidden_.size());
  float* states = of_part(hidden_, part);
  const float* x = model_.layer_.attend(layer_, weights, part, states, of_part(attended_, part));
  if (x != nullptr) model_.ffn_.take(*ffn_, {layer_, part, x, states, nullptr});
  look();
  if (x == nullptr) ++progress_.done;
  if (++part_ != stretch_.size()) return;
  part_ = 0;
  if (x == nullptr) return next_layer();
  model_.ffn_.begin_rows(*ffn_, layer_, stretch_.back());
  phase_ = Phase::rows;
}

void RunningPass::add_part() {
  const Part& part = stretch_[part_];
  float* states = of_part(hidden_, part);
  model_.ffn_.give(*ffn_, {layer_, part, nullptr, states, model_.layer_.outputs()});
  model_.layer_.add_ffn(layer_, model_.weights_.blocks[layer_], part, states, of_part(attended_, part));
  ++progress_.done;
  if (++part_ != stretch_.size()) return;
  part_ = 0;
  phase_ = Phase::attend;
  next_layer();
}

void RunningPass::next_layer() {
  if (++layer_ == model_.num_layers()) phase_ = Phase::head;
}

// Of the stretch's tokens that are wanted, a part at a time.
void RunningPass::make_logits() {
  const std::size_t width = model_.spec_.block.d_model, streams = model_.spec_.block.streams;
  std::vector<std::size_t> of;  // a part's tokens
  for (const Part& part : stretch_) {
    const std::size_t begin = first_ + part.first, end = begin + part.count;
    for (of.clear(); next_wanted_ != wanted_.size() && wanted_[next_wanted_] < end; ++next_wanted_)
      of.push_back(wanted_[next_wanted_] - begin);
    std::vector<float> states;
    for (std::size_t s = streams == 0 ? 0 : 1; s <= streams; ++s)
      for (const std::size_t token : of) {
        const float* row = of_part(hidden_, part) + (s * part.count + token) * width;
        states.insert(states.end(), row, row + width);
      }
    const std::size_t rows = of.size();
    if (rows != 0 && streams != 0) model_.ends_.gather(states.data(), rows, ffn_.has_value());
    if (rows != 0) model_.ends_.head(states.data(), rows, ffn_.has_value(), logits_);
    logits_ += rows * model_.spec_.vocab;
  }
  ++number_;
  phase_ = Phase::start;
}

}  // namespace flashllm
