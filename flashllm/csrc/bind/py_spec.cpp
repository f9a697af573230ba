#include "bind/py_spec.h"

#include <algorithm>

namespace flashllm {

namespace {

constexpr Named<NormPlace> kNormPlaces[] = {{"input", NormPlace::input},
                                            {"sum", NormPlace::sum},
                                            {"output", NormPlace::output},
                                            {"both", NormPlace::both}};
constexpr Named<HeadNorm> kHeadNorms[] = {{"none", HeadNorm::none},
                                          {"head", HeadNorm::head},
                                          {"heads", HeadNorm::heads},
                                          {"projection", HeadNorm::projection},
                                          {"turned_head", HeadNorm::turned_head}};
constexpr Named<Norm::Kind> kNorms[] = {{"layer", Norm::Kind::layer}, {"rms", Norm::Kind::rms}};
constexpr Named<Rotary::Style> kStyles[] = {{"half", Rotary::Style::half},
                                            {"interleaved", Rotary::Style::interleaved}};
constexpr Named<Gate> kGates[] = {{"none", Gate::none},
                                  {"sigmoid", Gate::sigmoid},
                                  {"softplus", Gate::softplus},
                                  {"head_softplus", Gate::head_softplus}};
constexpr Named<RouterSpec::Score> kScores[] = {{"softmax", RouterSpec::Score::softmax},
                                                {"softmax_of_chosen", RouterSpec::Score::softmax_of_chosen},
                                                {"sigmoid", RouterSpec::Score::sigmoid},
                                                {"sparse_mixer", RouterSpec::Score::sparse_mixer}};
constexpr Named<bool> kGroupScores[] = {{"one", false}, {"two", true}};

// Attributes of a Python object, each read into what it is here. One that is None leaves what is there.
class Attributes {
 public:
  explicit Attributes(nb::handle object) : object_(nb::borrow(object)) {}

  template <typename T>
  void operator()(const char* name, T& to) const {
    const nb::object value = object_.attr(name);
    if (!value.is_none()) to = nb::cast<T>(value);
  }
  // One of these names.
  template <typename T, std::size_t kCount>
  void operator()(const char* name, T& to, const Named<T> (&names)[kCount]) const {
    to = by_name(name, nb::cast<std::string>(object_.attr(name)), names);
  }
  // An object of its own: `read(its attributes, what it is here, ...)`.
  template <typename T, typename... More>
  void operator()(const char* name, T& to, void (*read)(const Attributes&, T&, More&...),
                  More&... more) const {
    const nb::object value = object_.attr(name);
    if (!value.is_none()) read(Attributes(value), to, more...);
  }
  nb::object object(const char* name) const { return object_.attr(name); }

 private:
  nb::object object_;
};

void read(const Attributes& from, Alibi& to) {
  from("slopes", to.slopes);
  from("scale", to.scale);
  from("rounded", to.rounded);
}

// Which of the model's rotary embeddings it is.
void read(const Attributes& from, int& index, std::vector<Rotary>& all) {
  Rotary to;
  from("inverse_frequency", to.inverse_frequency);
  from("scaling", to.scaling);
  from("style", to.style, kStyles);
  const auto same = std::find(all.begin(), all.end(), to);
  index = static_cast<int>(same - all.begin());
  if (same == all.end()) all.push_back(std::move(to));
}

void read(const Attributes& from, RouterSpec& to) {
  from("score", to.score, kScores);
  from("groups", to.groups);
  from("chosen_groups", to.chosen_groups);
  from("groups_by", to.groups_by_two, kGroupScores);
  from("normalized", to.normalized);
  from("epsilon", to.epsilon);
  from("least_sum", to.least_sum);
  from("factor", to.factor);
  from("norm_epsilon", to.norm_epsilon);
  from("jitter", to.jitter);
}

void read(const Attributes& from, ExpertsSpec& to) {
  from("count", to.count);
  from("chosen", to.chosen);
  from("size", to.size);
  from("shared", to.shared);
  from("router", to.router, &read);
}

void read(const Attributes& from, Growth& to) {
  from("rate", to.rate);
  from("step", to.step);
}

void read(const Attributes& from, LatentSpec& to) {
  from("rank", to.rank);
  from("plain_dim", to.plain_dim);
  from("value_dim", to.value_dim);
  from("query_rank", to.query_rank);
  from("norm_epsilon", to.norm_epsilon);
}

void read_attention(const Attributes& from, LayerSpec& layer, ModelSpec& model) {
  AttentionSpec& to = layer.attention;
  from("heads", to.heads);
  from("kv_heads", to.kv_heads);
  from("head_dim", to.head_dim);
  from("query_scale", to.query_scale);
  from("growth", to.growth, &read);
  from("query_key_norm", to.head_norm, kHeadNorms);
  from("rotary", to.rotary, &read, model.rotary);
  from("window", to.window);
  from("softcap", to.softcap);
  from("alibi", to.alibi, &read);
  from("value_dim", to.value_dim);
  from("value_scale", to.value_scale);
  from("latent", to.latent, &read);
  from("gate", to.gate, kGates);
  from("out_scale", to.out_scale);
  from("value_norm", to.value_norm);
  from("key_is_value", to.key_is_value);
  from("shared", to.shared);
}

void read_state(const Attributes& from, StateSpec& to) {
  from("key_heads", to.key_heads);
  from("value_heads", to.value_heads);
  from("key_dim", to.key_dim);
  from("value_dim", to.value_dim);
  from("kernel", to.kernel);
}

void read_delta_rule(const Attributes& from, LayerSpec& layer, ModelSpec&) {
  read_state(from, layer.state);
  from("tiled", layer.state.tiled);
  from("channel_rank", layer.state.channel_rank);
  from("beta_scale", layer.state.beta_scale);
  from("norm_epsilon", layer.state.norm_epsilon);
  layer.state.by_delta_rule = true;
}

void read_state_space(const Attributes& from, LayerSpec& layer, ModelSpec&) {
  StateSpec& to = layer.state;
  read_state(from, to);
  from("gate_first", to.gate_first);
  from("gate_scale", to.gate_scale);
  from("query_scale", to.query_scale);
  from("key_scale", to.key_scale);
  from("value_scale", to.value_scale);
  from("decay_scale", to.decay_scale);
  from("out_scale", to.out_scale);
}

void read_convolution(const Attributes& from, LayerSpec& layer, ModelSpec&) {
  layer.state.value_heads = 1;
  from("width", layer.state.value_dim);
  from("kernel", layer.state.kernel);
}

// By their `kind`.
constexpr Named<void (*)(const Attributes&, LayerSpec&, ModelSpec&)> kMixers[] = {
    {"attention", &read_attention},
    {"delta_rule", &read_delta_rule},
    {"state_space", &read_state_space},
    {"short_convolution", &read_convolution}};

void read(const Attributes& from, LayerSpec& to, ModelSpec& model) {
  for (const char* name : {"mixer", "second"}) {
    const nb::object object = from.object(name);
    if (object.is_none()) continue;
    const Attributes mixer(object);
    by_name("a mixer", nb::cast<std::string>(mixer.object("kind")), kMixers)(mixer, to, model);
  }
  from("norms", to.norms, kNormPlaces);
  from("parallel", to.parallel);
  from("shared_norm", to.shared_norm);
  from("neurons", to.neurons);
  from("experts", to.experts, &read);
  from("beside", to.beside);
  from("activation_threshold", to.activation.threshold);
  from("activation_cut", to.activation.cut);
  from("activation_scale", to.activation.scale);
  from("ffn_scale", to.ffn_scale);
  from("gate_deviations", to.gate_deviations);
}

void read_per_layer(const Attributes& from, std::size_t& width) { from("dim", width); }

void read(const Attributes& from, Architecture& to) {
  ModelSpec& model = to.model;
  from("d_model", model.block.d_model);
  from("residual_scale", model.block.residual_scale);
  from("rounded_inputs", model.block.rounded_inputs);
  from("streams", model.block.streams);
  from("laurel", model.block.laurel);
  from("vocab_size", model.vocab);
  from("embed_dim", model.embed_dim);
  from("position_offset", model.position_offset);
  from("embedding_scale", model.embedding_scale);
  from("logit_scale", model.logit_scale);
  from("logit_softcap", model.logit_softcap);
  from("norm", to.norms.kind, kNorms);
  from("norm_epsilon", to.norms.epsilon);
  from("norm_shift", to.norms.shift);
  from("context", to.context);
  from("gated", to.gated);
  from("sub_norms", to.sub_norms);
  from("embedding_norm", to.embedding_norm);
  from("final_norm", to.final_norm);
  from("learned_positions", to.learned_positions);
  from("tied_head", to.tied_head);
  const Activation activation = parse_activation(nb::cast<std::string>(from.object("activation")));
  for (const nb::handle layer : from.object("layers")) {
    to.layers.emplace_back().activation = activation;
    read(Attributes(layer), to.layers.back(), model);
  }
  from("per_layer", model.block.per_layer, &read_per_layer);
  model.block.layers = to.layers.size();
}

}  // namespace

Architecture read_architecture(nb::handle block, Dtype dtype) {
  Architecture result;
  result.model.block.dtype = dtype;
  read(Attributes(block), result);
  return result;
}

AttentionSpec read_mixer(nb::handle mixer) {
  LayerSpec layer;
  ModelSpec model;
  read_attention(Attributes(mixer), layer, model);
  return layer.attention;
}

}  // namespace flashllm
