#include "bind/py_spec.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "kernels/kernels.h"

namespace flashllm {

namespace {

constexpr Named<NormPlace> kNormPlaces[] = {{"input", NormPlace::input},
                                            {"sum", NormPlace::sum},
                                            {"output", NormPlace::output},
                                            {"both", NormPlace::both}};
constexpr Named<HeadNorm> kHeadNorms[] = {{"none", HeadNorm::none},
                                          {"head", HeadNorm::head},
                                          {"heads", HeadNorm::heads},
                                          {"projection", HeadNorm::projection}};

void read_rotary(const SpecReader& reader, PySpec& read) {
  const bool is_half = reader.get<std::string>("rotary_style") == "half";
  for (const nb::handle each : reader.get<nb::tuple>("rotary")) {
    const SpecReader one(nb::borrow(each));
    read.frequencies.push_back(one.get<std::vector<float>>("inverse_frequency"));
    Rotary rotary;
    rotary.inverse_frequency = read.frequencies.back().data();
    rotary.dims = 2 * read.frequencies.back().size();
    rotary.style = is_half ? Rotary::Style::half : Rotary::Style::interleaved;
    rotary.scaling = one.get<float>("scaling");
    require(rotary.dims <= read.spec.block.head_dim, "rotary dimensions beyond the head's");
    read.spec.rotary.push_back(rotary);
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

Alibi read_alibi(const nb::object& alibi, std::size_t heads, std::vector<float>& slopes) {
  if (alibi.is_none()) return {};
  const SpecReader reader(alibi);
  slopes = reader.get<std::vector<float>>("slopes");
  require(slopes.size() == heads, "every head needs a slope");
  return {slopes.data(), reader.get<float>("scale"), reader.get<bool>("rounded")};
}

PySpec read_spec(const SpecReader& reader, Dtype dtype, SimdLevel level) {
  PySpec read;
  ModelSpec& spec = read.spec;
  spec.block.dtype = dtype;
  spec.block.d_model = reader.get<std::size_t>("d_model");
  spec.block.heads = reader.get<std::size_t>("heads");
  spec.block.kv_heads = reader.get<std::size_t>("kv_heads");
  spec.block.head_dim = reader.get<std::size_t>("head_dim");
  spec.block.norms = by_name("norms", reader.get<std::string>("norms"), kNormPlaces);
  spec.block.parallel = reader.get<bool>("parallel");
  spec.block.shared_norm = reader.get<bool>("shared_norm");
  spec.block.head_norm = by_name("query_key_norm", reader.get<std::string>("query_key_norm"), kHeadNorms);
  spec.block.query_scale = reader.get<float>("query_scale");
  spec.block.attention_softcap = reader.number("attention_softcap");
  spec.block.residual_scale = reader.get<float>("residual_scale");
  spec.block.rounded_inputs = reader.get<bool>("rounded_inputs");
  read_rotary(reader, read);
  spec.block.alibi = read_alibi(reader.get<nb::object>("alibi"), spec.block.heads, read.slopes);
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
