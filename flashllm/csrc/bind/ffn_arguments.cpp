#include "bind/ffn_arguments.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace flashllm {

namespace {

bool is_permutation(const IdArray& rows) {
  std::vector<bool> taken(rows.shape(0), false);
  for (std::size_t i = 0; i < rows.shape(0); ++i) {
    const std::int32_t row = rows.data()[i];
    if (row < 0 || static_cast<std::size_t>(row) >= rows.shape(0) || taken[static_cast<std::size_t>(row)])
      return false;
    taken[static_cast<std::size_t>(row)] = true;
  }
  return true;
}

}  // namespace

FfnLayerOptions FfnArguments::options(const std::string& dtype) {
  FfnLayerOptions options;
  const auto encoding = get_or("encoding", dtype);
  options.format = {parse_codec(encoding),        parse_codec(get_or("down_encoding", encoding)),
                    get<std::uint32_t>("stride"), get<std::uint32_t>("d_model"),
                    get<std::uint32_t>("up"),     get<std::uint32_t>("down"),
                    get<std::int32_t>("gate")};
  options.format.inputs = parse_inputs(get_or<std::string>("inputs", "float32"), options.format.codec);
  options.format.check();
  options.layer = get<std::int32_t>("layer");
  options.num_neurons = get<std::int32_t>("num_neurons");
  options.unit_rows = get_or<std::int32_t>("unit_rows", 1);
  options.checksum_rows = get_or<std::int32_t>("checksum_rows", 1);
  options.activation = parse_activation(get<std::string>("activation"), get_or("activation_threshold", 0.0F),
                                        get_or("activation_cut", 0.0F));
  options.cache_policy = get<std::string>("cache_policy");
  options.window = get<std::int32_t>("window");
  options.file_offset = get<std::uint64_t>("file_offset");
  options.simd = parse_simd(get_or<std::string>("simd", "auto"));
  options.wait_first = get_or("wait_first", false);
  options.split_rows = get_or("split_rows", false);
  require(options.num_neurons > 0 && options.unit_rows > 0 && options.checksum_rows > 0,
          "an FFN layer needs neurons, in units that have some");
  const auto neurons = static_cast<std::size_t>(options.num_neurons);
  options.up_bias = get_floats("up_bias", neurons);
  options.gate_bias = get_floats("gate_bias", neurons);
  options.down_bias = get_floats("down_bias", options.format.d_model);
  options.norm = {get_floats("sub_norm", neurons), neurons, get_or("norm_epsilon", 0.0F),
                  get_or("rounded_inputs", false)};
  options.popularity = get_floats("popularity", static_cast<std::size_t>(options.units().count()));
  if (const auto gate = get_or<std::optional<AnyArray>>("gate_matrix", std::nullopt)) {
    const std::size_t row_nbytes = vector_nbytes(options.format.codec, options.format.d_model);
    require(!options.format.gated() && gate->nbytes() == neurons * row_nbytes,
            "a resident gate must be [num_neurons, d_model] in the rows' codec, of rows that hold none");
    options.gate = static_cast<const std::byte*>(gate->data());
  }
  if (const auto scales = get_or<std::optional<AnyArray>>("down_scales", std::nullopt)) {
    const auto part = [this](const char* name) {
      return get_or<std::optional<AnyArray>>(name, std::nullopt);
    };
    options.plane = plane_of(*scales, part("down_minimums"), part("down_factors"),
                             part("down_minimum_factors"), neurons, options.format.d_model);
  }
  require(has_plane(options.format.down_codec) == options.plane.is_there(),
          "a layer has its scales apart where its down columns are codes alone, and nowhere else");
  require(options.format.gated() || options.gate != nullptr || options.gate_bias == nullptr,
          "an FFN without a gate has no gate bias");
  const auto checksums = get<ChecksumArray>("checksums");
  require(checksums.shape(0) * static_cast<std::size_t>(options.checksum_rows) >= neurons,
          "too few checksums");
  options.checksums = checksums.data();
  if (const auto row_of = get_or<std::optional<IdArray>>("row_of", std::nullopt)) {
    require(row_of->shape(0) == neurons && is_permutation(*row_of),
            "row_of must give every neuron a row of its own");
    options.row_of = row_of->data();
  }
  return options;
}

// [length]; nullptr for None.
const float* FfnArguments::get_floats(const char* name, std::size_t length) {
  const auto values = get<std::optional<FloatArray>>(name);
  if (!values) return nullptr;
  std::string words = name;
  std::replace(words.begin(), words.end(), '_', ' ');
  require(values->shape(0) == length, words + " has the wrong length");
  return values->data();
}

}  // namespace flashllm
