#include "offload/batch_model.h"

#include <algorithm>

#include "ffn/token_ffn.h"

namespace flashllm {

namespace {

constexpr std::size_t kValueGrain = 1 << 14;  // values a thread takes

// As a model of this engine rounds: logits are compared as they are summed.
ModelSpec unrounded(ModelSpec spec) {
  spec.rounded_logits = false;
  return spec;
}

}  // namespace

LentLayer read_lent(NamedTensors& tensors, const Architecture& of, std::size_t number, bool down_by_inputs) {
  LentLayer weights;
  weights.number = number;
  weights.block = read_block(tensors, "", of, number);
  const std::size_t count = weights.block.spec.neurons, width = of.model.block.d_model;
  LentNeurons& neurons = weights.neurons;
  if (count == 0) return weights;
  neurons.up = tensors.linear("up", count, width);
  neurons.up.bias = tensors.floats("ffn.up_bias", count);
  if (of.gated) {
    neurons.gate = tensors.linear("gate", count, width);
    neurons.gate.bias = tensors.floats("ffn.gate_bias", count);
  }
  neurons.down_by_inputs = down_by_inputs;
  neurons.down = down_by_inputs ? tensors.linear("down", count, width) : tensors.linear("down", width, count);
  neurons.down.bias = tensors.floats("ffn.down_bias", width);
  if (has_plane(neurons.down.codec)) neurons.plane = tensors.plane("down.", count, width);
  weights.router = read_router(tensors, "", weights.block.spec.experts, width);
  require(down_by_inputs || !has_plane(neurons.down.codec), "columns with scales apart are an input's each");
  require(weights.router == nullptr || down_by_inputs || !is_coded(neurons.down.codec),
          "the columns of an expert cannot be taken out of rows of codes");
  return weights;
}

LentNeurons LentNeurons::run(std::size_t first, std::size_t count) const {
  LentNeurons part = *this;
  part.first += static_cast<std::ptrdiff_t>(first);
  const auto take_rows = [&](RowMatrix& matrix) {
    if (matrix.data == nullptr) return;
    matrix.data += first * matrix.stride;
    matrix.rows = count;
    if (matrix.bias != nullptr) matrix.bias += first;
  };
  take_rows(part.up);
  take_rows(part.gate);
  part.down.bias = nullptr;
  if (down_by_inputs) {
    take_rows(part.down);
  } else {
    part.down.data += vector_nbytes(down.codec, first);
    part.down.columns = count;
  }
  return part;
}

void LentFfn::run(const FfnTurn& turn) {
  if (weights_->router != nullptr) return run_experts(turn);
  compute(weights_->neurons, turn.x, turn.part.count, turn.part.is_prompt(), turn.y);
}

void LentFfn::compute(const LentNeurons& of, const float* x, std::size_t count, bool many, float* y) {
  const std::size_t neurons = of.up.rows;
  const bool gated = of.gate.data != nullptr;
  up_.resize(count * neurons);
  arithmetic_.take_inputs(x, count, of.up.columns, many, of.first);
  arithmetic_.project(of.up, count, up_.data());
  if (gated) {
    gate_.resize(count * neurons);
    arithmetic_.project(of.gate, count, gate_.data());
  }
  activate(count * neurons, gated);
  if (const NeuronNorm& norm = weights_->block.neuron_norm)
    arithmetic_.pool().parallel_for(count, Arithmetic::kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = begin; t < end; ++t) apply(norm, nullptr, neurons, up_.data() + t * neurons);
    });
  arithmetic_.round(up_.data(), count * neurons);
  arithmetic_.take_inputs(up_.data(), count, neurons, many, of.first);
  if (of.plane.is_there()) return add_columns_of(of, count, y);
  of.down_by_inputs ? arithmetic_.project_by_columns(of.down, count, y)
                    : arithmetic_.project(of.down, count, y);
}

// y = the bias and what the neurons' columns are worth, whose scales lie apart, times up_
void LentFfn::add_columns_of(const LentNeurons& of, std::size_t count, float* y) {
  RowMatrix down = of.down;
  down.inputs = of.up.inputs;
  for (std::size_t t = 0; t < count; ++t)
    down.bias == nullptr ? std::fill_n(y + t * down.columns, down.columns, 0.0F)
                         : std::copy_n(down.bias, down.columns, y + t * down.columns);
  add_columns(down, static_cast<std::int32_t>(of.first), &of.plane, {up_.data(), down.rows, 1}, count, y,
              arithmetic_.pool(), arithmetic_.level());
  arithmetic_.round(y, count * down.columns);
}

// up_ = activation(up_), or activation(gate_) * up_, where the activation is rounded before the product.
void LentFfn::activate(std::size_t n, bool gated) {
  const Activation& activation = weights_->block.spec.activation;
  float *up = up_.data(), *driver = gated ? gate_.data() : up;
  arithmetic_.pool().parallel_for(n, kValueGrain, [&](std::size_t begin, std::size_t end) {
    flashllm::activate(activation, 0.0F, driver + begin, end - begin, arithmetic_.level());
    if (gated) flashllm::activate(activation.of_up(), 0.0F, up + begin, end - begin, arithmetic_.level());
  });
  if (!gated) return;
  arithmetic_.round(driver, n);
  arithmetic_.pool().parallel_for(n, kValueGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) up[i] *= driver[i];
  });
}

void LentFfn::run_experts(const FfnTurn& turn) {
  const std::size_t width = weights_->neurons.up.columns;
  Router& router = *weights_->router;
  experts_.begin(router);
  experts_.add(router, router.reads_stream() ? turn.states : turn.x, turn.part.count, arithmetic_.pool());
  std::fill_n(turn.y, turn.part.count * width, 0.0F);
  for (const ExpertTokens::Run& run : experts_.end()) {
    const std::size_t count = run.tokens.size();
    gathered_.resize(count * width);
    made_.resize(count * width);
    for (std::size_t m = 0; m < count; ++m)
      std::copy_n(turn.x + static_cast<std::size_t>(run.tokens[m]) * width, width,
                  gathered_.data() + m * width);
    compute(weights_->neurons.run(run.first, run.count), gathered_.data(), count, turn.part.is_prompt(),
            made_.data());
    for (std::size_t m = 0; m < count; ++m) {
      float* to = turn.y + static_cast<std::size_t>(run.tokens[m]) * width;
      const float* from = made_.data() + m * width;
      for (std::size_t j = 0; j < width; ++j) to[j] += run.factors[m] * from[j];
      if (run.bias == nullptr) continue;
      for (std::size_t j = 0; j < width; ++j) to[j] += run.factors[m] * run.bias[j];
    }
  }
}

BatchModel::BatchModel(const ModelSpec& spec, std::size_t rows_together, AttentionMemory& memory,
                       ThreadPool& pool, SimdLevel level)
    : spec_(unrounded(spec)),
      rows_together_(rows_together),
      arithmetic_(spec.block.dtype, pool, level, true),
      ffn_(arithmetic_),
      layer_(spec_.block, spec_.rotary, arithmetic_, memory, ffn_) {}

template <typename Body>
void BatchModel::each_part(const std::int64_t* positions, const std::vector<float*>& recurrent,
                           std::size_t count, Pass pass, const Body& body) {
  std::vector<Token> tokens(std::min(count, rows_together_));
  for (std::size_t begin = 0; begin < count; begin += rows_together_) {
    const std::size_t n = std::min(rows_together_, count - begin);
    for (std::size_t t = 0; t < n; ++t) {
      tokens[t].position = static_cast<std::size_t>(positions[begin + t]);
      if (!recurrent.empty()) tokens[t].state = recurrent[begin + t];
    }
    body(Part{tokens.data(), n, pass}, begin);
  }
}

void BatchModel::embed(const ModelWeights& weights, const std::byte* rows, const std::int64_t* positions,
                       std::size_t count, std::byte* states) {
  Ends ends(spec_, weights, arithmetic_);
  const std::size_t width = spec_.block.d_model, item = dtype_nbytes(spec_.block.dtype);
  std::vector<float> wide;
  each_part(positions, {}, count, Pass::prompt, [&](const Part& part, std::size_t begin) {
    wide.resize(part.count * spec_.embed_dim);
    states_.resize(part.count * width);
    arithmetic_.widen(rows + begin * spec_.embed_dim * item, wide.size(), wide.data());
    ends.embed_rows(wide.data(), part.tokens, part.count, states_.data());
    arithmetic_.narrow(states_.data(), states_.size(), states + begin * width * item);
  });
}

std::vector<float*> LentStates::of_tokens(const std::int64_t* positions, std::size_t tokens,
                                          bool decoding) const {
  std::vector<float*> found(tokens);
  std::size_t sequences = 0;
  float* state = nullptr;
  for (std::size_t t = 0; t < tokens; ++t) {
    if (decoding || positions[t] == 0) {
      require(sequences < count, "every sequence needs a recurrent state");
      const auto slot = static_cast<std::size_t>(of_sequences[sequences++]);
      require(slot < slots, "a recurrent state beyond those there are");
      state = data + slot * floats;
    }
    require(state != nullptr, "a prompt begins at position 0");
    if (positions[t] == 0) std::fill_n(state, floats, 0.0F);
    found[t] = state;
  }
  require(sequences == count, "there are more recurrent states than sequences");
  return found;
}

void BatchModel::run(const LentLayer& weights, const LentStates& recurrent, const std::int64_t* positions,
                     std::size_t count, bool decoding, std::byte* states) {
  const std::size_t width = spec_.block.d_model, item = dtype_nbytes(spec_.block.dtype);
  ffn_.use(weights);
  require(recurrent.floats == weights.block.spec.state.state_floats(),
          "the layer keeps another recurrent state");
  std::vector<float*> kept;
  if (recurrent.floats != 0) kept = recurrent.of_tokens(positions, count, decoding);
  each_part(positions, kept, count, decoding ? Pass::dense : Pass::prompt,
            [&](const Part& part, std::size_t begin) {
              std::byte* at = states + begin * width * item;
              states_.resize(part.count * width);
              arithmetic_.widen(at, states_.size(), states_.data());
              layer_.set_positions(part);
              layer_.run(weights.number, weights.block, part, states_.data());
              arithmetic_.narrow(states_.data(), states_.size(), at);
            });
}

void BatchModel::head(const ModelWeights& weights, const std::byte* states, std::size_t count,
                      float* logits) {
  std::vector<float> wide(count * spec_.block.d_model);
  arithmetic_.widen(states, wide.size(), wide.data());
  Ends(spec_, weights, arithmetic_).head(wide.data(), count, false, logits);
}

}  // namespace flashllm
