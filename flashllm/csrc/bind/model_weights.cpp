#include "bind/model_weights.h"

#include <nanobind/stl/string.h>

namespace flashllm {

ModelWeights read_ends(ResidentTensors& tensors, const PySpec& read, const SpecReader& reader, bool in_part) {
  const ModelSpec& spec = read.spec;
  const std::size_t d_model = spec.block.d_model;
  const auto is_there = [&](const char* name) { return !in_part || tensors.contains(name); };
  const auto linear = [&](const char* name, std::size_t rows, std::size_t columns) {
    return is_there((std::string(name) + ".weight").c_str()) ? tensors.linear(name, rows, columns)
                                                             : RowMatrix{};
  };
  ModelWeights weights;
  weights.embedding = linear("embedding", spec.vocab, spec.embed_dim);
  if (reader.get<bool>("learned_positions") && is_there("positions.weight"))
    weights.positions =
        tensors.matrix("positions", read.context + spec.position_offset, d_model, codec_of(spec.block.dtype));
  if (spec.embed_dim != d_model) {
    weights.project_in = linear("project_in", d_model, spec.embed_dim);
    weights.project_out = linear("project_out", spec.embed_dim, d_model);
  }
  if (reader.get<bool>("embedding_norm"))
    weights.embedding_norm = tensors.norm("embedding_norm", read.norms, d_model);
  if (reader.get<bool>("final_norm")) weights.final_norm = tensors.norm("final_norm", read.norms, d_model);
  weights.head =
      reader.get<bool>("tied_head") ? weights.embedding : linear("head", spec.vocab, spec.embed_dim);
  weights.head.bias = tensors.floats("head.bias", spec.vocab);
  return weights;
}

BlockWeights read_block(ResidentTensors& tensors, const std::string& layer, const PySpec& read,
                        const SpecReader& reader, std::size_t index) {
  const BlockSpec& model = read.spec.block;
  const LayerSpec& spec = read.layers.at(index);
  const AttentionSpec& attention = spec.attention;
  const NormStyle& style = read.norms;
  const std::size_t d_model = model.d_model, attended = attention.query_dim(), cached = attention.kv_dim();
  BlockWeights weights;
  weights.spec = spec;
  if (spec.norms != NormPlace::output) {
    weights.attention_norm = tensors.norm(layer + "attention_norm", style, d_model);
    if (!spec.shared_norm) weights.ffn_norm = tensors.norm(layer + "ffn_norm", style, d_model);
  }
  if (norms_output(spec.norms)) {
    weights.attention_output_norm = tensors.norm(layer + "attention_output_norm", style, d_model);
    weights.ffn_output_norm = tensors.norm(layer + "ffn_output_norm", style, d_model);
  }
  if (attention.head_norm != HeadNorm::none) {
    const bool together = attention.head_norm == HeadNorm::projection,
               own = attention.head_norm == HeadNorm::heads;
    const auto norm = [&](const char* name, std::size_t all) {
      return tensors.norm(layer + name, style, together ? all : attention.head_dim,
                          together || own ? all : attention.head_dim);
    };
    weights.query_norm = norm("query_norm", attended);
    weights.key_norm = norm("key_norm", cached);
  }
  if (reader.get<bool>("sub_norms")) {
    weights.mixed_norm = tensors.norm(layer + "attention_sub_norm", style, attended);
    weights.neuron_norm = {tensors.floats(layer + "ffn_sub_norm.weight", spec.neurons), spec.neurons,
                           style.epsilon, model.rounded_inputs};
    require(static_cast<bool>(weights.neuron_norm), layer + "ffn_sub_norm.weight is missing");
  }
  weights.query = tensors.linear(layer + "query", attended, d_model);
  weights.key = tensors.linear(layer + "key", cached, d_model);
  weights.value = tensors.linear(layer + "value", cached, d_model);
  weights.out = tensors.linear(layer + "out", d_model, attended);
  weights.sinks = tensors.floats(layer + "sinks", attention.heads);
  return weights;
}

std::unique_ptr<Router> read_router(ResidentTensors& tensors, const std::string& layer,
                                    const SpecReader& of_layer, std::size_t d_model) {
  const nb::object of_experts = of_layer.get<nb::object>("experts");
  if (of_experts.is_none()) return nullptr;
  const SpecReader experts(of_experts);
  ExpertsSpec spec;
  spec.count = experts.get<std::size_t>("count");
  spec.chosen = experts.get<std::size_t>("chosen");
  spec.size = experts.get<std::size_t>("size");
  spec.shared = experts.get<std::size_t>("shared");
  spec.softmax_of_all = experts.get<std::string>("softmax_of") == "all";
  spec.normalized = experts.get<bool>("normalized");
  const Dtype dtype = tensors.dtype();
  const auto matrix = [&](const char* name, std::size_t rows) {
    return tensors.matrix(layer + name, rows, d_model, codec_of(dtype));
  };
  auto made = std::make_unique<Router>(
      spec, matrix("router", spec.count),
      tensors.contains(layer + "shared_gate.weight") ? matrix("shared_gate", 1) : RowMatrix{}, dtype,
      tensors.level());
  made->set_down_bias(tensors.floats(layer + "ffn.expert_down_bias", spec.count * d_model));
  return made;
}

}  // namespace flashllm
