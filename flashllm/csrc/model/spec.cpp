#include "model/spec.h"

#include "io/error.h"

namespace flashllm {

namespace {

bool fits(const RowMatrix& weights, const BlockSpec& spec, std::size_t rows, std::size_t columns) {
  return weights.data != nullptr && (is_coded(weights.codec) || weights.codec == codec_of(spec.dtype)) &&
         weights.rows == rows && weights.columns == columns;
}

void check_state(const BlockSpec& spec, const StateSpec& state, const StateWeights& weights) {
  require(state.value_dim != 0 && state.kernel != 0, "the sizes of a mixer with a state must not be zero");
  require(fits(weights.query, spec, state.key_rows(), spec.d_model) &&
              fits(weights.key, spec, state.key_rows(), spec.d_model) &&
              fits(weights.value, spec, state.values(), spec.d_model) &&
              fits(weights.out, spec, spec.d_model, state.values()) && weights.convolution[0] != nullptr &&
              weights.convolution[1] != nullptr && weights.convolution[2] != nullptr && !spec.rounded_inputs,
          "the weights of a mixer with a state do not fit the model");
  if (state.convolves_alone()) return;
  require(state.key_dim != 0 && state.value_heads % state.key_heads == 0,
          "the heads of a mixer with a state must be a multiple of key_heads");
  require(state.channel_rank == 0 || (state.by_delta_rule && state.value_heads == state.key_heads &&
                                      fits(weights.decay_down, spec, state.channel_rank, spec.d_model) &&
                                      fits(weights.gate_down, spec, state.channel_rank, spec.d_model)),
          "decays of channels belong to a delta rule with as many key heads as value heads");
  require(fits(weights.out_gate, spec, state.values(), state.gate_inputs(spec.d_model)) &&
              (!state.by_delta_rule || fits(weights.beta, spec, state.value_heads, spec.d_model)) &&
              fits(weights.decay, spec, state.decays(), state.gate_inputs(spec.d_model)) &&
              weights.decay_log != nullptr && weights.decay_bias != nullptr &&
              (weights.mixed_norm.width == 0 || weights.mixed_norm.width == state.norm_width()),
          "the weights of a mixer whose heads keep a state do not fit the model");
}

// What latent attention has besides.
void check_latent(const BlockSpec& spec, const BlockWeights& weights) {
  const AttentionSpec& attention = weights.spec.attention;
  const LatentSpec& latent = attention.latent;
  require(attention.kv_heads == 1 && attention.head_norm == HeadNorm::none &&
              latent.rank <= attention.head_dim && latent.plain_dim != 0 && latent.value_dim != 0,
          "latent attention has one key for all heads, of its rank and what is rotated");
  require(fits(weights.key_up, spec, attention.heads * latent.rank, latent.plain_dim) &&
              fits(weights.value, spec, attention.mixed_dim(), latent.rank) &&
              weights.key_norm.width == latent.rank && weights.query_norm.width == latent.query_rank &&
              (latent.query_rank == 0 || fits(weights.query_down, spec, latent.query_rank, spec.d_model)),
          "a block's latent projections do not fit the model");
}

void check_attention(const ModelSpec& model, const BlockWeights& weights) {
  const BlockSpec& spec = model.block;
  const AttentionSpec& attention = weights.spec.attention;
  require(attention.head_dim != 0 && attention.kv_heads != 0 && attention.heads != 0 &&
              attention.heads % attention.kv_heads == 0,
          "a layer's sizes must not be zero, and its heads a multiple of kv_heads");
  const std::size_t attended = attention.query_dim(), cached = attention.kv_dim();
  const bool together = attention.head_norm == HeadNorm::projection;
  require(attention.is_latent() || attention.head_norm == HeadNorm::none ||
              (weights.query_norm.width == (together ? attended : attention.head_dim) &&
               (attention.shared >= 0 || weights.key_norm.width == (together ? cached : attention.head_dim))),
          "a block's norms of queries and keys do not fit the model");
  const bool is_latent = attention.is_latent();
  const std::size_t mixed = attention.mixed_dim();
  const bool own = attention.shared < 0;
  const std::size_t values = attention.kv_heads * attention.value_width();
  require(
      fits(weights.query, spec, attention.heads * attention.projected_dim(),
           attention.query_inputs(spec.d_model)) &&
          (!own || fits(weights.key, spec, cached, spec.d_model)) && values <= cached &&
          (is_latent || !own || attention.key_is_value || fits(weights.value, spec, values, spec.d_model)) &&
          fits(weights.out, spec, spec.d_model, mixed) &&
          (attention.gate == Gate::none || fits(weights.out_gate, spec, attention.gates(), spec.d_model)),
      "a block's projections do not fit the model");
  if (is_latent) check_latent(spec, weights);
  require(weights.mixed_norm.width == 0 || weights.mixed_norm.width == mixed,
          "the norm before a block's output projection does not fit the model");
  require(attention.rotary < 0 ||
              (attention.rotary < static_cast<int>(model.rotary.size()) &&
               model.rotary[static_cast<std::size_t>(attention.rotary)].dims() <= attention.head_dim),
          "a block's rotary embedding is beyond those there are, or wider than its heads");
  require(!is_latent || (own && !attention.key_is_value && !attention.value_norm),
          "latent attention has keys of its own, whose first elements are values");
  require(!attention.value_norm || weights.value_norm.width != 0,
          "values are normalized where queries and keys are");
  require(attention.alibi.slopes.empty() || attention.alibi.slopes.size() == attention.heads,
          "every head needs a slope");
}

}  // namespace

void check_block(const ModelSpec& model, const BlockWeights& weights) {
  const BlockSpec& spec = model.block;
  const LayerSpec& layer = weights.spec;
  require(layer.mixes() || layer.neurons != 0, "a block must have a mixer or an FFN");
  if (layer.state.value_heads != 0) check_state(spec, layer.state, weights.state);
  if (layer.attention.heads != 0) check_attention(model, weights);
  const auto wide = [&](const Norm& norm, bool wanted) { return !wanted || norm.width == spec.d_model; };
  const bool input = layer.norms != NormPlace::output, output = norms_output(layer.norms);
  const bool mixes = layer.mixes(), computes = layer.neurons != 0;
  require(wide(weights.attention_norm, input && mixes) &&
              wide(weights.ffn_norm, input && computes && !layer.shared_norm) &&
              wide(weights.attention_output_norm, output && mixes) &&
              wide(weights.ffn_output_norm, output && computes),
          "a block's norms do not fit the model");
  require(weights.ffn == nullptr || weights.ffn->width() == spec.d_model,
          "a block's FFN does not fit the model");
  require(!spec.rounded_inputs || (layer.norms == NormPlace::input && !layer.parallel),
          "inputs are rounded where a block's norms are, before attention and FFN");
  require((mixes && computes) || (layer.norms == NormPlace::input && !layer.parallel && !spec.rounded_inputs),
          "a block without a mixer, or without an FFN, has its norm before what it has");
  require(layer.beside == 0 || (fits(weights.beside_up, spec, layer.beside, spec.d_model) &&
                                fits(weights.beside_gate, spec, layer.beside, spec.d_model) &&
                                fits(weights.beside_down, spec, spec.d_model, layer.beside) && output &&
                                wide(weights.beside_norm, true) && wide(weights.beside_output_norm, true) &&
                                wide(weights.experts_output_norm, true)),
          "a block's dense part beside its experts does not fit the model");
  require(spec.per_layer == 0 || (fits(weights.per_layer_gate, spec, spec.per_layer, spec.d_model) &&
                                  fits(weights.per_layer_out, spec, spec.d_model, spec.per_layer) &&
                                  weights.per_layer_norm.width == spec.d_model),
          "a block's per-layer embedding does not fit the model");
  require(spec.streams == 0 || (fits(weights.stream_router, spec, spec.streams, spec.d_model) &&
                                weights.stream_router_norm.width == spec.d_model &&
                                weights.stream_predict != nullptr && weights.stream_correct != nullptr &&
                                weights.stream_scale != nullptr && !layer.parallel && mixes && computes),
          "a block's streams do not fit the model");
  require(spec.laurel == 0 || (fits(weights.laurel_in, spec, spec.laurel, spec.d_model) &&
                               fits(weights.laurel_out, spec, spec.d_model, spec.laurel) &&
                               weights.laurel_norm.width == spec.d_model),
          "the map around a block's mixer does not fit the model");
  require(!weights.neuron_norm.cuts_gates || (weights.ffn == nullptr && weights.up_bias == nullptr &&
                                              weights.gate_bias == nullptr && layer.experts.count == 0),
          "a block's gates are cut where it runs dense, without biases");
  require(!weights.neuron_norm || weights.neuron_norm.neurons == layer.neurons,
          "the norm before a block's down columns does not fit the model");
}

void check_fits(const ModelSpec& spec, const ModelWeights& weights, const RowFormat& rows) {
  const BlockSpec& block = spec.block;
  require(block.d_model != 0 && spec.vocab != 0 && spec.block_tokens != 0,
          "a model's sizes must not be zero");
  require((weights.embedding.data == nullptr || fits(weights.embedding, block, spec.vocab, spec.embed_dim)) &&
              fits(weights.head, block, spec.vocab, spec.embed_dim),
          "the embedding or the head does not fit the model");
  const bool projected = spec.embed_dim != block.d_model;
  require(!projected || (fits(weights.project_in, block, block.d_model, spec.embed_dim) &&
                         fits(weights.project_out, block, spec.embed_dim, block.d_model)),
          "the embedding's projections do not fit the model");
  require(weights.positions.data == nullptr || weights.positions.columns == block.d_model,
          "the position embedding does not fit the model");
  for (const Norm* each : {&weights.embedding_norm, &weights.final_norm})
    require(each->width == 0 || each->width == block.d_model,
            "the norm of the embedding, or the final norm, does not fit the model");
  require(block.per_layer == 0 ||
              (fits(weights.per_layer_projection, block, block.row_width(), block.d_model) &&
               weights.per_layer_norm.width == block.per_layer && weights.blocks.size() == block.layers),
          "the per-layer embeddings do not fit the model");
  const std::size_t more = block.streams == 0 ? 0 : block.streams - 1;
  require(block.streams != 1 && weights.stream_in.size() == more && weights.stream_out.size() == more,
          "the streams do not fit the model");
  for (const auto* each : {&weights.stream_in, &weights.stream_out})
    for (const RowMatrix& matrix : *each)
      require(fits(matrix, block, block.d_model, block.d_model), "the streams do not fit the model");
  require(rows.d_model == block.d_model, "the rows do not fit the model");
  for (const BlockWeights& each : weights.blocks) check_block(spec, each);
}

}  // namespace flashllm
