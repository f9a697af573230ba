#include "model/weights.h"

#include "io/error.h"

namespace flashllm {

ModelWeights read_ends(NamedTensors& tensors, const Architecture& of, bool in_part) {
  const ModelSpec& spec = of.model;
  const std::size_t d_model = spec.block.d_model;
  const auto is_there = [&](const std::string& name) {
    return !in_part || tensors.contains(name + ".weight");
  };
  const auto linear = [&](const char* name, std::size_t rows, std::size_t columns) {
    return is_there(name) ? tensors.linear(name, rows, columns) : RowMatrix{};
  };
  ModelWeights weights;
  if (of.tied_head || tensors.contains("embedding.weight"))  // else its rows are read by the token's id
    weights.embedding = linear("embedding", spec.vocab, spec.embed_dim);
  if (of.learned_positions && is_there("positions"))
    weights.positions =
        tensors.matrix("positions", of.context + spec.position_offset, d_model, codec_of(spec.block.dtype));
  if (spec.embed_dim != d_model) {
    weights.project_in = linear("project_in", d_model, spec.embed_dim);
    weights.project_out = linear("project_out", spec.embed_dim, d_model);
  }
  if (spec.block.per_layer != 0) {
    weights.per_layer_projection = linear("per_layer_projection", spec.block.row_width(), d_model);
    weights.per_layer_norm = tensors.norm("per_layer_projection_norm", of.norms, spec.block.per_layer);
  }
  for (std::size_t s = 1; s < spec.block.streams; ++s) {
    const std::string name = "streams." + std::to_string(s - 1);
    weights.stream_in.push_back(linear((name + ".enter").c_str(), d_model, d_model));
    weights.stream_out.push_back(linear((name + ".leave").c_str(), d_model, d_model));
  }
  if (of.embedding_norm) weights.embedding_norm = tensors.norm("embedding_norm", of.norms, d_model);
  if (of.final_norm) weights.final_norm = tensors.norm("final_norm", of.norms, d_model);
  weights.head = of.tied_head ? weights.embedding : linear("head", spec.vocab, spec.embed_dim);
  weights.head.bias = tensors.floats("head.bias", spec.vocab);
  return weights;
}

namespace {

// Of a layer's state, out of tensors whose names begin with `name`.
StateWeights read_state(NamedTensors& tensors, const std::string& name, const Architecture& of,
                        const StateSpec& spec) {
  const std::size_t d_model = of.model.block.d_model;
  const auto small = [&](const char* part) {
    RowMatrix matrix = tensors.matrix(name + part, spec.value_heads, d_model, codec_of(tensors.dtype()));
    matrix.bias = tensors.floats(name + part + ".bias", spec.value_heads);
    return matrix;
  };
  StateWeights weights;
  weights.query = tensors.linear(name + "query", spec.key_rows(), d_model);
  weights.key = tensors.linear(name + "key", spec.key_rows(), d_model);
  weights.value = tensors.linear(name + "value", spec.values(), d_model);
  weights.out = tensors.linear(name + "out", d_model, spec.values());
  const std::size_t keys = spec.keys(), values = spec.values();
  const auto taps = [&](const char* part, std::size_t channels) {
    tensors.need(name + part);
    return tensors.floats(name + part, channels * spec.kernel);
  };
  if (tensors.contains(name + "conv_query.weight")) {
    weights.convolution = {taps("conv_query.weight", keys), taps("conv_key.weight", keys),
                           taps("conv_value.weight", values)};
  } else {
    const float* all = taps("conv.weight", spec.channels());
    const std::size_t outer = spec.by_delta_rule ? keys : values;
    weights.convolution = {all, all + outer * spec.kernel, all + (outer + keys) * spec.kernel};
  }
  weights.convolution_bias = tensors.floats(name + "conv.bias", spec.channels());
  if (spec.convolves_alone()) return weights;
  weights.out_gate = tensors.linear(name + "out_gate", spec.values(), spec.gate_inputs(d_model));
  if (spec.by_delta_rule) weights.beta = small("beta");
  if (const std::size_t rank = spec.channel_rank; rank != 0) {
    const RowCodec codec = codec_of(tensors.dtype());
    weights.decay = tensors.matrix(name + "decay", spec.decays(), rank, codec);
    weights.decay_down = tensors.matrix(name + "decay_down", rank, d_model, codec);
    weights.gate_down = tensors.matrix(name + "gate_down", rank, d_model, codec);
  } else {
    weights.decay = small("decay");
  }
  for (const char* part : {"decay_log", "decay_bias"}) tensors.need(name + part);
  weights.decay_log = tensors.wide_floats(name + "decay_log", spec.value_heads);
  weights.decay_bias = tensors.wide_floats(name + "decay_bias", spec.decays());
  weights.skip = tensors.wide_floats(name + "skip", spec.value_heads);
  NormStyle style = of.norms;
  style.shift = 0.0F;
  if (spec.norm_epsilon != 0.0F) style.epsilon = spec.norm_epsilon;
  if (spec.by_delta_rule)
    weights.mixed_norm = tensors.norm(name + "mixed_norm", style, spec.value_dim);
  else if (tensors.contains(name + "mixed_norm.weight"))
    weights.mixed_norm = tensors.norm(name + "mixed_norm", style, spec.norm_width(), spec.values());
  return weights;
}

}  // namespace

BlockWeights read_block(NamedTensors& tensors, const std::string& layer, const Architecture& of,
                        std::size_t index) {
  const BlockSpec& model = of.model.block;
  const LayerSpec& spec = of.layers.at(index);
  const AttentionSpec& attention = spec.attention;
  const NormStyle& style = of.norms;
  const std::size_t d_model = model.d_model, attended = attention.query_dim(), cached = attention.kv_dim();
  const auto linear = [&](const char* name, std::size_t rows, std::size_t columns) {
    return tensors.linear(layer + name, rows, columns);
  };
  const auto norm = [&](const char* name) { return tensors.norm(layer + name, style, d_model); };
  BlockWeights weights;
  weights.spec = spec;
  const bool mixes = spec.mixes(), computes = spec.neurons != 0;
  if (spec.norms != NormPlace::output) {
    if (mixes) weights.attention_norm = norm("attention_norm");
    if (computes && !spec.shared_norm) weights.ffn_norm = norm("ffn_norm");
  }
  if (norms_output(spec.norms)) {
    weights.attention_output_norm = norm("attention_output_norm");
    weights.ffn_output_norm = norm("ffn_output_norm");
  }
  if (attention.head_norm != HeadNorm::none) {
    const bool together = attention.head_norm == HeadNorm::projection,
               own = attention.head_norm == HeadNorm::heads;
    const auto head_norm = [&](const char* name, std::size_t all) {
      return tensors.norm(layer + name, style, together ? all : attention.head_dim,
                          together || own ? all : attention.head_dim);
    };
    weights.query_norm = head_norm("query_norm", attended);
    if (attention.shared < 0) weights.key_norm = head_norm("key_norm", cached);
    if (attention.value_norm) weights.value_norm = {style.kind, attention.head_dim, style.epsilon};
  }
  if (const float* scale = tensors.floats(layer + "scale", 1)) weights.scale = *scale;
  if (spec.beside != 0) {
    weights.beside_up = linear("beside_up", spec.beside, d_model);
    if (of.gated) weights.beside_gate = linear("beside_gate", spec.beside, d_model);
    weights.beside_down = linear("beside_down", d_model, spec.beside);
    if (tensors.contains(layer + "shared_gate.weight"))
      weights.shared_gate = tensors.matrix(layer + "shared_gate", 1, d_model, codec_of(tensors.dtype()));
  }
  if (spec.beside_norms) {
    weights.beside_norm = norm("ffn_beside_norm");
    weights.beside_output_norm = norm("ffn_beside_output_norm");
    weights.experts_output_norm = norm("ffn_experts_output_norm");
  }
  if (model.per_layer != 0) {
    weights.per_layer_gate = linear("per_layer_gate", model.per_layer, d_model);
    weights.per_layer_out = linear("per_layer_out", d_model, model.per_layer);
    weights.per_layer_norm = norm("per_layer_norm");
  }
  if (const std::size_t streams = model.streams; streams != 0) {
    weights.stream_router_norm = norm("stream_router_norm");
    weights.stream_router =
        tensors.matrix(layer + "stream_router", streams, d_model, codec_of(tensors.dtype()));
    for (const char* part : {"stream_predict", "stream_correct", "stream_scale"}) tensors.need(layer + part);
    weights.stream_predict = tensors.floats(layer + "stream_predict", streams * streams * streams);
    weights.stream_correct = tensors.floats(layer + "stream_correct", streams * streams);
    weights.stream_scale = tensors.floats(layer + "stream_scale", d_model);
  }
  if (model.laurel != 0) {
    weights.laurel_in = linear("laurel_in", model.laurel, d_model);
    weights.laurel_out = linear("laurel_out", d_model, model.laurel);
    weights.laurel_norm = norm("laurel_norm");
  }
  if (spec.gate_deviations) {
    weights.neuron_norm.neurons = spec.neurons;
    weights.neuron_norm.cuts_gates = true;
    weights.neuron_norm.deviations = *spec.gate_deviations;
  }
  if (of.sub_norms) {
    weights.mixed_norm = tensors.norm(layer + "attention_sub_norm", style, attended);
    tensors.need(layer + "ffn_sub_norm.weight");
    weights.neuron_norm = {tensors.floats(layer + "ffn_sub_norm.weight", spec.neurons), spec.neurons,
                           style.epsilon, model.rounded_inputs};
  }
  if (spec.state.value_heads != 0)
    weights.state = read_state(tensors, spec.state.by_delta_rule ? layer : layer + "state.", of, spec.state);
  if (attention.heads == 0) return weights;
  if (attention.is_latent()) {
    const LatentSpec& latent = attention.latent;
    const auto latent_norm = [&](const char* name, std::size_t width) {
      return tensors.norm(layer + name, {Norm::Kind::rms, latent.norm_epsilon, style.shift}, width);
    };
    if (latent.query_rank != 0) {
      weights.query_down = linear("query_down", latent.query_rank, d_model);
      weights.query_norm = latent_norm("query_norm", latent.query_rank);
    }
    weights.key_norm = latent_norm("key_norm", latent.rank);
    weights.key_up = linear("key_up", attention.heads * latent.rank, latent.plain_dim);
  }
  weights.query =
      linear("query", attention.heads * attention.projected_dim(), attention.query_inputs(d_model));
  if (attention.gate != Gate::none) weights.out_gate = linear("out_gate", attention.gates(), d_model);
  if (attention.shared < 0) weights.key = linear("key", cached, d_model);
  if (attention.is_latent())
    weights.value = linear("value", attention.mixed_dim(), attention.latent.rank);
  else if (attention.shared < 0 && !attention.key_is_value)
    weights.value = linear("value", attention.kv_heads * attention.value_width(), d_model);
  weights.out = linear("out", d_model, attention.mixed_dim());
  weights.sinks = tensors.floats(layer + "sinks", attention.heads);
  return weights;
}

std::unique_ptr<Router> read_router(NamedTensors& tensors, const std::string& layer, const ExpertsSpec& spec,
                                    std::size_t d_model) {
  if (spec.count == 0) return nullptr;
  // A router of fp32 has a name of its own.
  const bool is_wide = tensors.contains(layer + "wide_router.weight");
  const Dtype dtype = is_wide ? Dtype::f32 : tensors.dtype();
  const auto matrix = [&](const char* name, std::size_t rows, Dtype of) {
    return tensors.matrix(layer + name, rows, d_model, codec_of(of));
  };
  auto made = std::make_unique<Router>(spec, matrix(is_wide ? "wide_router" : "router", spec.count, dtype),
                                       tensors.contains(layer + "shared_gate.weight")
                                           ? matrix("shared_gate", 1, tensors.dtype())
                                           : RowMatrix{},
                                       dtype, tensors.level());
  made->set_choice_bias(tensors.wide_floats(layer + "choice.bias", spec.count));
  made->set_scales(tensors.floats(layer + "router_scale", d_model),
                   tensors.floats(layer + "expert_scale", spec.count));
  if (made->reads_stream()) tensors.need(layer + "router_scale");
  made->set_down_bias(tensors.floats(layer + "ffn.expert_down_bias", spec.count * d_model));
  return made;
}

FfnLayerOptions read_ffn(NamedTensors& tensors, const RowFormat& rows, std::size_t layer, std::size_t neurons,
                         Activation activation) {
  const std::string name = "layers." + std::to_string(layer) + ".";
  FfnLayerOptions options;
  options.format = rows;
  options.layer = static_cast<std::int32_t>(layer);
  options.num_neurons = static_cast<std::int32_t>(neurons);
  options.activation = activation;
  options.simd = tensors.level();
  options.up_bias = tensors.floats(name + "ffn.up_bias", neurons);
  options.gate_bias = tensors.floats(name + "ffn.gate_bias", neurons);
  options.down_bias = tensors.floats(name + "ffn.down_bias", rows.d_model);
  if (tensors.contains(name + "gate.weight")) {
    require(!rows.gated(), "a resident gate is of rows that hold none");
    options.gate = tensors.matrix(name + "gate", neurons, rows.d_model, rows.codec).data;
  }
  if (has_plane(rows.down_codec) && neurons > 0)
    options.plane = tensors.plane(name + "down.", neurons, rows.d_model);
  require(rows.gated() || options.gate != nullptr || options.gate_bias == nullptr,
          "an FFN without a gate has no gate bias");
  return options;
}

}  // namespace flashllm
