#include "bind/py_spec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "kernels/kernels.h"

namespace flashllm {

Alibi read_alibi(const nb::object& alibi, std::size_t heads, std::vector<float>& slopes) {
  if (alibi.is_none()) return {};
  const SpecReader reader(alibi);
  slopes = reader.get<std::vector<float>>("slopes");
  require(slopes.size() == heads, "every head needs a slope");
  return {slopes.data(), reader.get<float>("scale"), reader.get<bool>("rounded")};
}

namespace {

constexpr Named<NormPlace> kNormPlaces[] = {{"input", NormPlace::input},
                                            {"sum", NormPlace::sum},
                                            {"output", NormPlace::output},
                                            {"both", NormPlace::both}};
constexpr Named<HeadNorm> kHeadNorms[] = {{"none", HeadNorm::none},
                                          {"head", HeadNorm::head},
                                          {"heads", HeadNorm::heads},
                                          {"projection", HeadNorm::projection}};

// Which of the model's rotary embeddings this one is, `seen` having those before it; -1 for None.
int read_rotary(const nb::object& rotary, std::vector<nb::object>& seen, PySpec& read) {
  if (rotary.is_none()) return -1;
  const auto same = std::find_if(seen.begin(), seen.end(), [&](const nb::object& each) {
    return each.is(rotary) || each.equal(rotary);
  });
  const auto index = static_cast<int>(same - seen.begin());
  if (same != seen.end()) return index;
  seen.push_back(rotary);
  const SpecReader reader(rotary);
  read.frequencies.push_back(reader.get<std::vector<float>>("inverse_frequency"));
  Rotary made;
  made.inverse_frequency = read.frequencies.back().data();
  made.dims = 2 * read.frequencies.back().size();
  made.style = reader.get<std::string>("style") == "half" ? Rotary::Style::half : Rotary::Style::interleaved;
  made.scaling = reader.get<float>("scaling");
  read.spec.rotary.push_back(made);
  return index;
}

AttentionSpec read_attention(const SpecReader& reader, std::vector<nb::object>& rotaries, PySpec& read) {
  AttentionSpec spec;
  spec.heads = reader.get<std::size_t>("heads");
  spec.kv_heads = reader.get<std::size_t>("kv_heads");
  spec.head_dim = reader.get<std::size_t>("head_dim");
  spec.head_norm = by_name("query_key_norm", reader.get<std::string>("query_key_norm"), kHeadNorms);
  spec.query_scale = reader.get<float>("query_scale");
  spec.rotary = read_rotary(reader.get<nb::object>("rotary"), rotaries, read);
  spec.window = reader.get_or<std::size_t>("window", 0);
  spec.softcap = reader.number("softcap");
  read.slopes.emplace_back();
  spec.alibi = read_alibi(reader.get<nb::object>("alibi"), spec.heads, read.slopes.back());
  return spec;
}

void read_layers(const SpecReader& reader, PySpec& read) {
  std::vector<nb::object> rotaries;
  for (const nb::handle each : reader.get<nb::tuple>("layers")) {
    const SpecReader layer(nb::borrow(each));
    const SpecReader mixer(layer.get<nb::object>("mixer"));
    const auto kind = mixer.get<std::string>("kind");
    require(kind == "attention", "a mixer is attention, not " + kind);
    LayerSpec spec;
    spec.attention = read_attention(mixer, rotaries, read);
    spec.norms = by_name("norms", layer.get<std::string>("norms"), kNormPlaces);
    spec.parallel = layer.get<bool>("parallel");
    spec.shared_norm = layer.get<bool>("shared_norm");
    spec.neurons = layer.get<std::size_t>("neurons");
    spec.activation_threshold = layer.get<float>("activation_threshold");
    spec.activation_cut = layer.get<float>("activation_cut");
    read.layers.push_back(spec);
  }
}

float rounded(float value, Dtype dtype, SimdLevel level) {
  const KernelTable& kernels = kernel_table(level, dtype);
  std::byte bits[sizeof(float)];
  kernels.from_f32(&value, 1, bits);
  kernels.to_f32(bits, 1, &value);
  return value;
}

}  // namespace

PySpec read_spec(const SpecReader& reader, Dtype dtype, SimdLevel level) {
  PySpec read;
  ModelSpec& spec = read.spec;
  spec.block.dtype = dtype;
  spec.block.d_model = reader.get<std::size_t>("d_model");
  spec.block.residual_scale = reader.get<float>("residual_scale");
  spec.block.rounded_inputs = reader.get<bool>("rounded_inputs");
  read_layers(reader, read);
  spec.vocab = reader.get<std::size_t>("vocab_size");
  spec.embed_dim = reader.get<std::size_t>("embed_dim");
  spec.position_offset = reader.get<std::size_t>("position_offset");
  spec.logit_scale = reader.get<float>("logit_scale");
  spec.logit_softcap = reader.number("logit_softcap");
  spec.embedding_scale = rounded(reader.get<float>("embedding_scale"), dtype, level);
  read.context = reader.get<std::size_t>("context");
  read.norms.kind = reader.get<std::string>("norm") == "rms" ? Norm::Kind::rms : Norm::Kind::layer;
  read.norms.epsilon = reader.get<float>("norm_epsilon");
  read.norms.shift = reader.get<float>("norm_shift");
  return read;
}

}  // namespace flashllm
