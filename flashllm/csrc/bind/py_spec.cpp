// A BlockSpec of flashllm/arch: the names of its attributes, and what they mean here.
#include <algorithm>

#include "bind/bindings.h"

namespace flashllm {

namespace {

constexpr Named<NormPlace> kNormPlaces[] = {NAMED(NormPlace, input), NAMED(NormPlace, sum),
                                            NAMED(NormPlace, output), NAMED(NormPlace, both)};
constexpr Named<HeadNorm> kHeadNorms[] = {NAMED(HeadNorm, none), NAMED(HeadNorm, head),
                                          NAMED(HeadNorm, heads), NAMED(HeadNorm, projection),
                                          NAMED(HeadNorm, turned_head)};
constexpr Named<Norm::Kind> kNorms[] = {NAMED(Norm::Kind, layer), NAMED(Norm::Kind, rms)};
constexpr Named<Rotary::Style> kStyles[] = {NAMED(Rotary::Style, half), NAMED(Rotary::Style, interleaved)};
constexpr Named<Gate> kGates[] = {NAMED(Gate, none), NAMED(Gate, sigmoid), NAMED(Gate, softplus),
                                  NAMED(Gate, head_softplus)};
constexpr Named<RouterSpec::Score> kScores[] = {
    NAMED(RouterSpec::Score, softmax), NAMED(RouterSpec::Score, softmax_of_chosen),
    NAMED(RouterSpec::Score, sigmoid), NAMED(RouterSpec::Score, sparse_mixer)};
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

// The attribute of a member's name.
#define TAKE(name) from(#name, to.name)

void read(const Attributes& from, Alibi& to) { TAKE(slopes), TAKE(scale), TAKE(rounded); }

// Which of the model's rotary embeddings it is.
void read(const Attributes& from, int& index, std::vector<Rotary>& all) {
  Rotary to;
  TAKE(inverse_frequency), TAKE(scaling);
  from("style", to.style, kStyles);
  const auto same = std::find(all.begin(), all.end(), to);
  index = static_cast<int>(same - all.begin());
  if (same == all.end()) all.push_back(std::move(to));
}

void read(const Attributes& from, RouterSpec& to) {
  from("score", to.score, kScores);
  TAKE(groups), TAKE(chosen_groups);
  from("groups_by", to.groups_by_two, kGroupScores);
  TAKE(softcap), TAKE(normalized), TAKE(epsilon), TAKE(least_sum), TAKE(factor), TAKE(norm_epsilon),
      TAKE(jitter);
}

void read(const Attributes& from, ExpertsSpec& to) {
  TAKE(count), TAKE(chosen), TAKE(size), TAKE(shared);
  from("router", to.router, &read);
}

void read(const Attributes& from, Growth& to) { TAKE(rate), TAKE(step); }

void read(const Attributes& from, LatentSpec& to) {
  TAKE(rank), TAKE(plain_dim), TAKE(value_dim), TAKE(query_rank), TAKE(norm_epsilon);
}

void read_attention(const Attributes& from, LayerSpec& layer, ModelSpec& model) {
  AttentionSpec& to = layer.attention;
  TAKE(heads), TAKE(kv_heads), TAKE(head_dim), TAKE(query_scale);
  from("growth", to.growth, &read);
  from("query_key_norm", to.head_norm, kHeadNorms);
  from("rotary", to.rotary, &read, model.rotary);
  TAKE(window), TAKE(softcap);
  from("alibi", to.alibi, &read);
  TAKE(value_dim), TAKE(value_scale);
  from("latent", to.latent, &read);
  from("gate", to.gate, kGates);
  TAKE(out_scale), TAKE(value_norm), TAKE(key_is_value), TAKE(shared);
}

void read_state(const Attributes& from, StateSpec& to) {
  TAKE(key_heads), TAKE(value_heads), TAKE(key_dim), TAKE(value_dim), TAKE(kernel);
}

void read_delta_rule(const Attributes& from, LayerSpec& layer, ModelSpec&) {
  StateSpec& to = layer.state;
  read_state(from, to);
  TAKE(tiled), TAKE(channel_rank), TAKE(beta_scale), TAKE(norm_epsilon);
  to.by_delta_rule = true;
}

void read_state_space(const Attributes& from, LayerSpec& layer, ModelSpec&) {
  StateSpec& to = layer.state;
  read_state(from, to);
  TAKE(gate_first), TAKE(gate_scale), TAKE(query_scale), TAKE(key_scale), TAKE(value_scale),
      TAKE(decay_scale), TAKE(out_scale);
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
  TAKE(parallel), TAKE(shared_norm), TAKE(neurons);
  from("experts", to.experts, &read);
  TAKE(beside), TAKE(beside_norms);
  from("activation_threshold", to.activation.threshold);
  from("activation_cut", to.activation.cut);
  from("activation_scale", to.activation.scale);
  TAKE(ffn_scale), TAKE(gate_deviations);
}

void read_per_layer(const Attributes& from, std::size_t& width) { from("dim", width); }

void read(const Attributes& from, BlockSpec& to) {
  TAKE(d_model), TAKE(residual_scale), TAKE(rounded_inputs), TAKE(streams), TAKE(laurel);
  from("per_layer", to.per_layer, &read_per_layer);
}

void read(const Attributes& from, ModelSpec& to) {
  read(from, to.block);
  from("vocab_size", to.vocab);
  TAKE(embed_dim), TAKE(position_offset), TAKE(embedding_scale), TAKE(logit_scale), TAKE(logit_softcap);
}

void read(const Attributes& from, Architecture& to) {
  read(from, to.model);
  from("norm", to.norms.kind, kNorms);
  from("norm_epsilon", to.norms.epsilon);
  from("norm_shift", to.norms.shift);
  TAKE(context), TAKE(gated), TAKE(sub_norms), TAKE(embedding_norm), TAKE(final_norm),
      TAKE(learned_positions), TAKE(tied_head);
  const Activation activation = parse_activation(nb::cast<std::string>(from.object("activation")));
  for (const nb::handle layer : from.object("layers")) {
    to.layers.emplace_back().activation = activation;
    read(Attributes(layer), to.layers.back(), to.model);
  }
  to.model.block.layers = to.layers.size();
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
