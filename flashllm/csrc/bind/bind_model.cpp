// Streams of rows, sequences, and the model that runs tokens.
#include <nanobind/stl/list.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "io/row_stream.h"
#include "io/xxh3.h"
#include "model/model.h"

namespace flashllm {

namespace {

using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using States = Exact<nb::ndarray<float, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;
using RowsView = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<2>>;

// A stream with all it refers to.
class PyRowStream {
 public:
  // layers: (offset of row 0, checksums [rows]) of each
  PyRowStream(std::shared_ptr<Reader> reader, std::shared_ptr<DirectFile> file,
              const std::vector<std::tuple<std::uint64_t, ChecksumArray>>& layers, std::size_t stride,
              std::size_t block_rows, std::size_t ahead)
      : reader_(std::move(reader)), file_(std::move(file)) {
    std::vector<StreamedLayer> streamed;
    for (const auto& [offset, checksums] : layers) {
      streamed.push_back({offset, checksums.shape(0), checksums.data()});
      checksums_.push_back(checksums);
    }
    stream_ = std::make_unique<RowStream>(*reader_, *file_, std::move(streamed), stride, block_rows, ahead);
  }

  void begin(int layer, std::optional<int> then) {
    const auto known = [this](int index) {
      return index >= 0 && static_cast<std::size_t>(index) < stream_->num_layers();
    };
    require(known(layer) && (!then || known(*then)), "a layer beyond those there are");
    stream_->begin(layer, then.value_or(RowStream::kNoLayer));
  }

  // (first row, rows [count, stride], valid until the next call), or None after the last block
  nb::object next() {
    RowBlock block;
    bool more = false;
    {
      const nb::gil_scoped_release unlocked;
      more = stream_->next(block);
    }
    if (!more) return nb::none();
    const auto* rows = reinterpret_cast<const std::uint8_t*>(block.rows);
    return nb::make_tuple(block.first_row, RowsView(rows, {block.count, stream_->stride()}, nb::find(this)));
  }

  // Whole rows of `memory`, from allocate(), keep the layer's first ones.
  void keep(std::size_t layer, const ByteArray& memory) {
    require(layer < stream_->num_layers(), "a layer beyond those there are");
    require(reinterpret_cast<std::uintptr_t>(memory.data()) % kHashedMultiple == 0,
            "memory that keeps rows must come from allocate()");
    stream_->keep(layer, reinterpret_cast<std::byte*>(memory.data()), memory.nbytes() / stream_->stride());
    kept_.push_back(memory);
  }

  RowStream& stream() { return *stream_; }

 private:
  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  std::vector<ChecksumArray> checksums_;
  std::vector<ByteArray> kept_;
  std::unique_ptr<RowStream> stream_;
};

// Attributes of a BlockSpec (flashllm/arch/spec.py).
class SpecReader {
 public:
  explicit SpecReader(nb::object spec) : spec_(std::move(spec)) {}
  template <typename T>
  T get(const char* name) const {
    return nb::cast<T>(spec_.attr(name));
  }
  // `missing` for None
  template <typename T>
  T get_or(const char* name, T missing) const {
    const nb::object value = spec_.attr(name);
    return value.is_none() ? missing : nb::cast<T>(value);
  }
  // 0 for None
  float number(const char* name) const { return get_or(name, 0.0F); }
  nb::object call(const char* method, std::size_t argument) const { return spec_.attr(method)(argument); }

 private:
  nb::object spec_;
};

NormPlace parse_norm_place(const std::string& name) {
  if (name == "input") return NormPlace::input;
  if (name == "sum") return NormPlace::sum;
  if (name == "output") return NormPlace::output;
  require(name == "both", "norms are at input, sum, output or both, not " + name);
  return NormPlace::both;
}

HeadNorm parse_head_norm(const std::string& name) {
  if (name == "none") return HeadNorm::none;
  if (name == "head") return HeadNorm::head;
  if (name == "heads") return HeadNorm::heads;
  require(name == "projection", "query_key_norm is none, head, heads or projection, not " + name);
  return HeadNorm::projection;
}

Pass parse_pass(const std::string& name) {
  if (name == "sparse") return Pass::sparse;
  if (name == "oracle") return Pass::oracle;
  if (name == "dense") return Pass::dense;
  require(name == "prompt", "a pass is sparse, oracle, dense or prompt, not " + name);
  return Pass::prompt;
}

// What a Python object sees of a dense pass: `input(layer, x [tokens, d_model])`, then for each block of
// neurons `activations(layer, first, h [neurons, tokens])`, fp32; both arrays are valid during the call. What
// it writes into h counts.
class PyTap final : public Tap {
 public:
  PyTap(nb::object observer, std::size_t d_model) : observer_(std::move(observer)), d_model_(d_model) {}
  ~PyTap() override {
    const nb::gil_scoped_acquire locked;
    observer_.reset();
  }
  void input(std::size_t layer, const float* x, std::size_t tokens) override {
    const nb::gil_scoped_acquire locked;
    tokens_ = tokens;
    observer_.attr("input")(layer, View(x, {tokens, d_model_}, nb::none()));
  }
  void activations(std::size_t layer, std::size_t first, std::size_t count, float* h,
                   std::size_t stride) override {
    const nb::gil_scoped_acquire locked;
    const auto row = static_cast<std::int64_t>(stride);
    observer_.attr("activations")(layer, first, Activations(h, {count, tokens_}, nb::none(), {row, 1}));
  }

 private:
  using View = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;
  using Activations = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
  nb::object observer_;
  const std::size_t d_model_;
  std::size_t tokens_ = 0;
};

// New ids of a sequence.
using Entry = std::tuple<KvSequence*, std::vector<std::int32_t>>;

using PyRowFormat =
    std::tuple<std::string, std::uint32_t, std::uint32_t, std::int32_t, std::uint32_t, std::string>;

class PyModel {
 public:
  // tensors: the resident weights by canonical name (flashllm/arch/spec.py), of the dtype (bf16 as uint16),
  // but matrices of `resident_encoding`, or by name of `other_encodings`. row_format: encoding of up and
  // gate, stride, first byte of up, of gate or -1, of down, encoding of down.
  PyModel(nb::object block, const std::string& dtype, std::size_t num_layers, std::size_t d_ff,
          nb::dict tensors, const PyRowFormat& row_format, const std::string& resident_encoding,
          std::map<std::string, std::string> other_encodings, const std::string& inputs,
          std::shared_ptr<PyRowStream> stream, nb::list ffns, std::shared_ptr<ThreadPool> pool,
          std::shared_ptr<FfnCounters> counters, std::size_t block_tokens, std::size_t fill_tokens,
          bool prefetch, const std::string& simd)
      : tensors_(std::move(tensors)),
        stream_(std::move(stream)),
        ffns_(std::move(ffns)),
        pool_(std::move(pool)),
        counters_(std::move(counters)),
        other_encodings_(std::move(other_encodings)),
        inputs_(inputs) {
    const SpecReader reader(std::move(block));
    const SimdLevel level = parse_simd(simd);
    ModelSpec spec;
    spec.block.dtype = parse_dtype(dtype);
    spec.block.d_model = reader.get<std::size_t>("d_model");
    spec.block.heads = reader.get<std::size_t>("heads");
    spec.block.kv_heads = reader.get<std::size_t>("kv_heads");
    spec.block.head_dim = reader.get<std::size_t>("head_dim");
    spec.block.norms = parse_norm_place(reader.get<std::string>("norms"));
    spec.block.parallel = reader.get<bool>("parallel");
    spec.block.shared_norm = reader.get<bool>("shared_norm");
    spec.block.head_norm = parse_head_norm(reader.get<std::string>("query_key_norm"));
    spec.block.query_scale = reader.get<float>("query_scale");
    spec.block.attention_softcap = reader.number("attention_softcap");
    spec.block.residual_scale = reader.get<float>("residual_scale");
    spec.block.rounded_inputs = reader.get<bool>("rounded_inputs");
    read_rotary(reader, spec);
    read_alibi(reader.get<nb::object>("alibi"), spec.block);
    spec.vocab = reader.get<std::size_t>("vocab_size");
    spec.embed_dim = reader.get<std::size_t>("embed_dim");
    spec.d_ff = d_ff;
    spec.position_offset = reader.get<std::size_t>("position_offset");
    spec.logit_scale = reader.get<float>("logit_scale");
    spec.logit_softcap = reader.number("logit_softcap");
    spec.block_tokens = block_tokens;
    spec.fill_tokens = fill_tokens;
    spec.prefetch = prefetch;
    context_ = reader.get<std::size_t>("context");
    dtype_ = spec.block.dtype;
    resident_codec_ = parse_codec(resident_encoding);
    kernels_ = &kernel_table(level, dtype_);
    d_model_ = spec.block.d_model;
    spec.embedding_scale = rounded(reader.get<float>("embedding_scale"));

    ModelWeights weights;
    weights.embedding = linear("embedding", spec.vocab, spec.embed_dim);
    if (reader.get<std::string>("positions") == "learned")
      weights.positions = matrix("positions", context_ + spec.position_offset, d_model_, codec_of(dtype_));
    if (spec.embed_dim != d_model_) {
      weights.project_in = linear("project_in", d_model_, spec.embed_dim);
      weights.project_out = linear("project_out", spec.embed_dim, d_model_);
    }
    if (reader.get<bool>("embedding_norm")) weights.embedding_norm = norm("embedding_norm", d_model_, reader);
    if (reader.get<bool>("final_norm")) weights.final_norm = norm("final_norm", d_model_, reader);
    weights.head =
        reader.get<bool>("tied_head") ? weights.embedding : linear("head", spec.vocab, spec.embed_dim);
    weights.head.bias = floats("head.bias", spec.vocab);
    const std::size_t attended = spec.block.heads * spec.block.head_dim;
    const std::size_t cached = spec.block.kv_heads * spec.block.head_dim;
    require(nb::len(ffns_) == num_layers, "every layer needs an FFN, or None");
    for (std::size_t i = 0; i < num_layers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      BlockWeights block_weights;
      if (spec.block.norms != NormPlace::output) {
        block_weights.attention_norm = norm(layer + "attention_norm", d_model_, reader);
        if (!spec.block.shared_norm) block_weights.ffn_norm = norm(layer + "ffn_norm", d_model_, reader);
      }
      if (norms_output(spec.block.norms)) {
        block_weights.attention_output_norm = norm(layer + "attention_output_norm", d_model_, reader);
        block_weights.ffn_output_norm = norm(layer + "ffn_output_norm", d_model_, reader);
      }
      if (spec.block.head_norm != HeadNorm::none) {
        const bool together = spec.block.head_norm == HeadNorm::projection;
        const std::size_t width = spec.block.head_dim;
        block_weights.query_norm = norm(layer + "query_norm", together ? attended : width, reader, attended);
        block_weights.key_norm = norm(layer + "key_norm", together ? cached : width, reader, cached);
      }
      if (reader.get<bool>("sub_norms")) {
        block_weights.mixed_norm = norm(layer + "attention_sub_norm", attended, reader);
        block_weights.neuron_norm = {floats(layer + "ffn_sub_norm.weight", d_ff), d_ff,
                                     reader.get<float>("norm_epsilon"), spec.block.rounded_inputs};
        require(static_cast<bool>(block_weights.neuron_norm), layer + "ffn_sub_norm.weight is missing");
      }
      const SpecReader of_layer(reader.call("layer", i));
      block_weights.rotary = of_layer.get_or("rotary", -1);
      block_weights.activation_threshold = of_layer.get<float>("activation_threshold");
      block_weights.activation_cut = of_layer.get<float>("activation_cut");
      block_weights.attention_window = of_layer.get_or<std::size_t>("window", 0);
      block_weights.query = linear(layer + "query", attended, d_model_);
      block_weights.key = linear(layer + "key", cached, d_model_);
      block_weights.value = linear(layer + "value", cached, d_model_);
      block_weights.out = linear(layer + "out", d_model_, attended);
      block_weights.sinks = floats(layer + "sinks", spec.block.heads);
      block_weights.up_bias = floats(layer + "ffn.up_bias", d_ff);
      block_weights.gate_bias = floats(layer + "ffn.gate_bias", d_ff);
      block_weights.down_bias = floats(layer + "ffn.down_bias", d_model_);
      if (tensors_.contains((layer + "gate.weight").c_str()))
        block_weights.gate =
            matrix(layer + "gate", d_ff, d_model_, parse_codec(std::get<0>(row_format))).data;
      if (has_plane(parse_codec(std::get<5>(row_format)))) block_weights.plane = plane(layer + "down.", d_ff);
      const nb::handle ffn = ffns_[i];
      if (!ffn.is_none()) block_weights.ffn = &ffn_layer_of(ffn);
      weights.blocks.push_back(block_weights);
    }
    const auto [encoding, stride, up, gate, down, down_encoding] = row_format;
    RowFormat rows;
    rows.codec = parse_codec(encoding);
    rows.down_codec = parse_codec(down_encoding);
    rows.stride = stride;
    rows.d_model = static_cast<std::uint32_t>(d_model_);
    rows.up = up;
    rows.gate = gate;
    rows.down = down;
    rows.inputs = parse_inputs(inputs, rows.codec);
    rows.check();
    shape_ = {num_layers, spec.block.kv_heads, spec.block.head_dim, context_, dtype_};
    const Activation activation = parse_activation(reader.get<std::string>("activation"));
    model_ = std::make_unique<Model>(spec, weights, rows, activation, stream_->stream(), *pool_, *counters_,
                                     level, [this] { check(); });
  }

  // Room for a sequence of `context` tokens in `layers` layers; None: the model's.
  KvSequence* new_sequence(std::optional<std::size_t> context, std::optional<std::size_t> layers) const {
    KvShape shape = shape_;
    shape.context = context.value_or(shape.context);
    shape.layers = layers.value_or(shape.layers);
    return new KvSequence(shape);
  }

  // Logits [entries, vocab] after each entry's last token, or [tokens, vocab] after every token.
  Logits step(const std::vector<Entry>& entries, const std::string& pass, bool all_logits,
              nb::object observer, std::size_t drafted) {
    std::vector<Token> tokens = tokens_of(entries);
    std::vector<std::size_t> wanted;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (all_logits || i + 1 == tokens.size() || tokens[i + 1].sequence != tokens[i].sequence)
        wanted.push_back(i);
    const std::size_t vocab = model_->spec().vocab;
    auto logits = std::make_unique<float[]>(wanted.size() * vocab);
    const Pass kind = parse_pass(pass);
    PyTap tap(observer, d_model_);
    Tap* asked = observer.is_none() ? nullptr : &tap;
    {
      const nb::gil_scoped_release unlocked;
      model_->step(tokens, kind, wanted, logits.get(), asked, drafted);
    }
    float* data = logits.release();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Logits(data, {wanted.size(), vocab}, owner);
  }

  // states [tokens, d_model] that enter the first block
  void embed(const std::vector<Entry>& entries, const States& states) {
    const std::vector<Token> tokens = tokens_of(entries);
    require(states.shape(0) == tokens.size() && states.shape(1) == d_model_,
            "states must be [tokens, d_model]");
    const nb::gil_scoped_release unlocked;
    model_->embed(tokens.data(), tokens.size(), states.data());
  }

  // The states after block `layer`, in the place of those before; the sequences hold one layer's keys and
  // values.
  void run_block(std::size_t layer, const std::vector<std::tuple<KvSequence*, std::size_t>>& entries,
                 const States& states, nb::object observer) {
    std::vector<Token> tokens;
    for (const auto& [sequence, count] : entries)
      for (std::size_t i = 0; i < count; ++i) tokens.push_back({sequence, i, 0});
    require(states.shape(0) == tokens.size() && states.shape(1) == d_model_,
            "states must be [tokens, d_model]");
    PyTap tap(observer, d_model_);
    Tap* asked = observer.is_none() ? nullptr : &tap;
    const nb::gil_scoped_release unlocked;
    model_->run_block(layer, 0, tokens, states.data(), asked);
  }

  void accept(std::size_t count) { model_->accept(count); }

  void interrupt() { model_->interrupt(); }

  // From any thread: until it is taken back, a prompt's pass ends between two blocks.
  void cancel(bool on) { cancelled_.store(on, std::memory_order_relaxed); }

 private:
  void check() {
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!cancelled_.load(std::memory_order_relaxed)) return;
    const nb::object type = nb::module_::import_("flashllm.errors").attr("Cancelled");
    PyErr_SetString(type.ptr(), "the computation was ended by another thread");
    throw nb::python_error();
  }

  static std::vector<Token> tokens_of(const std::vector<Entry>& entries) {
    std::vector<Token> tokens;
    for (const auto& [sequence, ids] : entries) {
      require(sequence != nullptr && !ids.empty(), "every sequence of a pass needs a new token");
      for (const Token& other : tokens) require(other.sequence != sequence, "a sequence is twice in a pass");
      for (std::size_t i = 0; i < ids.size(); ++i)
        tokens.push_back({sequence, sequence->length() + i, ids[i]});
    }
    require(!tokens.empty(), "a pass needs a token");
    return tokens;
  }

  void read_rotary(const SpecReader& reader, ModelSpec& spec) {
    const bool is_half = reader.get<std::string>("rotary_style") == "half";
    for (const nb::handle each : reader.get<nb::tuple>("rotary")) {
      const SpecReader one(nb::borrow(each));
      frequencies_.push_back(one.get<std::vector<float>>("inverse_frequency"));
      Rotary rotary;
      rotary.inverse_frequency = frequencies_.back().data();
      rotary.dims = 2 * frequencies_.back().size();
      rotary.style = is_half ? Rotary::Style::half : Rotary::Style::interleaved;
      rotary.scaling = one.get<float>("scaling");
      require(rotary.dims <= spec.block.head_dim, "rotary dimensions beyond the head's");
      spec.rotary.push_back(rotary);
    }
  }

  void read_alibi(const nb::object& alibi, BlockSpec& spec) {
    if (alibi.is_none()) return;
    const SpecReader reader(alibi);
    slopes_ = reader.get<std::vector<float>>("slopes");
    require(slopes_.size() == spec.heads, "every head needs a slope");
    spec.alibi = {slopes_.data(), reader.get<float>("scale"), reader.get<bool>("rounded")};
  }

  float rounded(float value) const {
    std::byte bits[sizeof(float)];
    kernels_->from_f32(&value, 1, bits);
    kernels_->to_f32(bits, 1, &value);
    return value;
  }

  // The tensor [rows, columns] of a canonical name, where it lies.
  const std::byte* tensor(const std::string& name, std::size_t elements) {
    const auto array = nb::cast<AnyArray>(tensors_[name.c_str()]);
    require(array.size() == elements && array.itemsize() == dtype_nbytes(dtype_),
            name + " does not fit the model");
    return static_cast<const std::byte*>(array.data());
  }

  // Rows of a grouped codec, one after the other.
  const std::byte* coded(const std::string& name, std::size_t nbytes) {
    const auto array = nb::cast<ByteArray>(tensors_[name.c_str()]);
    require(array.nbytes() == nbytes, name + " does not fit the model");
    return reinterpret_cast<const std::byte*>(array.data());
  }

  // Of the layer's down columns, whose tensors are called `prefix` and a part's name.
  ScalePlane plane(const std::string& prefix, std::size_t neurons) {
    const auto part = [&](const char* name) {
      const std::string key = prefix + name;
      return tensors_.contains(key.c_str()) ? std::optional(nb::cast<AnyArray>(tensors_[key.c_str()]))
                                            : std::nullopt;
    };
    const auto scales = part("scales");
    require(scales.has_value(), prefix + "scales is missing");
    return plane_of(*scales, part("minimums"), part("factors"), part("minimum_factors"), neurons, d_model_);
  }

  RowMatrix linear(const std::string& name, std::size_t rows, std::size_t columns) {
    const auto other = other_encodings_.find(name + ".weight");
    const bool differs = other != other_encodings_.end();
    return matrix(name, rows, columns, differs ? parse_codec(other->second) : resident_codec_);
  }

  RowMatrix matrix(const std::string& name, std::size_t rows, std::size_t columns, RowCodec codec) {
    RowMatrix weights;
    weights.rows = rows;
    weights.columns = columns;
    weights.stride = vector_nbytes(codec, columns);
    weights.codec = codec;
    weights.inputs = parse_inputs(inputs_, codec);
    weights.data = is_coded(codec) ? coded(name + ".weight", rows * weights.stride)
                                   : tensor(name + ".weight", rows * columns);
    weights.bias = floats(name + ".bias", rows);
    return weights;
  }

  // A norm over `width` values; its weights may be those of several, `most` in all.
  Norm norm(const std::string& name, std::size_t width, const SpecReader& reader, std::size_t most = 0) {
    Norm norm;
    norm.kind = reader.get<std::string>("norm") == "rms" ? Norm::Kind::rms : Norm::Kind::layer;
    norm.width = width;
    norm.epsilon = reader.get<float>("norm_epsilon");
    const bool several = most != 0 && reader.get<std::string>("query_key_norm") == "heads";
    norm.weight = floats(name + ".weight", several ? most : width, reader.get<float>("norm_shift"));
    norm.bias = floats(name + ".bias", several ? most : width);
    return norm;
  }

  // A vector widened to fp32, plus `shift`, which the model keeps; nullptr where there is none.
  const float* floats(const std::string& name, std::size_t n, float shift = 0.0F) {
    if (!tensors_.contains(name.c_str())) return nullptr;
    auto values = std::make_unique<float[]>(n);
    kernels_->to_f32(tensor(name, n), n, values.get());
    if (shift != 0.0F)
      for (std::size_t i = 0; i < n; ++i) values[i] += shift;
    floats_.push_back(std::move(values));
    return floats_.back().get();
  }

  nb::dict tensors_;
  std::shared_ptr<PyRowStream> stream_;
  nb::list ffns_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  std::list<std::vector<float>> frequencies_;
  std::vector<float> slopes_;
  std::vector<std::unique_ptr<float[]>> floats_;
  RowCodec resident_codec_ = RowCodec::f32;
  std::map<std::string, std::string> other_encodings_;
  std::string inputs_;
  Dtype dtype_ = Dtype::f32;
  const KernelTable* kernels_ = nullptr;
  std::size_t d_model_ = 0, context_ = 0;
  KvShape shape_;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<Model> model_;
};

}  // namespace

void init_model(nb::module_& m) {
  nb::class_<PyRowStream>(m, "RowStream")
      .def(nb::init<std::shared_ptr<Reader>, std::shared_ptr<DirectFile>,
                    const std::vector<std::tuple<std::uint64_t, ChecksumArray>>&, std::size_t, std::size_t,
                    std::size_t>(),
           nb::arg("reader"), nb::arg("file"), nb::arg("layers"), nb::kw_only(), nb::arg("stride"),
           nb::arg("block_rows"), nb::arg("ahead"))
      .def("begin", &PyRowStream::begin, nb::arg("layer"), nb::arg("then").none() = nb::none())
      .def("next", &PyRowStream::next)
      .def("drain", [](PyRowStream& self) { self.stream().drain(); })
      .def("keep", &PyRowStream::keep, nb::arg("layer"), nb::arg("memory"))
      .def(
          "set_kept",
          [](PyRowStream& self, std::size_t layer, std::size_t rows) { self.stream().set_kept(layer, rows); },
          nb::arg("layer"), nb::arg("rows"))
      .def(
          "kept", [](PyRowStream& self, std::size_t layer) { return self.stream().kept(layer); },
          nb::arg("layer"))
      .def("take", [](PyRowStream& self) {
        const StreamTimes times = self.stream().take();
        nb::dict result;
        result["wait_ns"] = times.wait_ns;
        result["busy_ns"] = times.busy_ns;
        result["bytes"] = times.bytes;
        result["requests"] = times.requests;
        result["retries"] = times.retries;
        return result;
      });

  nb::class_<KvSequence>(m, "KvSequence")
      .def_prop_ro("length", &KvSequence::length)
      .def_prop_ro("blocks", &KvSequence::blocks)
      .def_prop_ro("nbytes", &KvSequence::nbytes)
      .def_prop_ro("context", [](const KvSequence& self) { return self.shape().context; })
      .def("blocks_to_add", &KvSequence::blocks_to_add, nb::arg("length"))
      .def("truncate", &KvSequence::truncate, nb::arg("length"))
      .def("reserve", &KvSequence::reserve, nb::arg("length"))
      .def("commit", &KvSequence::commit, nb::arg("length"))
      .def(
          "memory",
          [](KvSequence& self) {
            using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;
            return Bytes(reinterpret_cast<std::uint8_t*>(self.memory()), {self.nbytes()}, nb::handle());
          },
          nb::rv_policy::reference_internal)
      .def("copy_from", &KvSequence::copy_from, nb::arg("other"));

  nb::class_<PyModel>(m, "Model")
      .def(nb::init<nb::object, const std::string&, std::size_t, std::size_t, nb::dict, const PyRowFormat&,
                    const std::string&, std::map<std::string, std::string>, const std::string&,
                    std::shared_ptr<PyRowStream>, nb::list, std::shared_ptr<ThreadPool>,
                    std::shared_ptr<FfnCounters>, std::size_t, std::size_t, bool, const std::string&>(),
           nb::kw_only(), nb::arg("block"), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("d_ff"),
           nb::arg("tensors"), nb::arg("row_format"), nb::arg("resident_encoding"),
           nb::arg("other_encodings"), nb::arg("inputs"), nb::arg("stream"), nb::arg("ffns"), nb::arg("pool"),
           nb::arg("counters"), nb::arg("block_tokens"), nb::arg("fill_tokens"), nb::arg("prefetch"),
           nb::arg("simd") = "auto")
      .def("new_sequence", &PyModel::new_sequence, nb::arg("context").none() = nb::none(),
           nb::arg("layers").none() = nb::none(), nb::rv_policy::take_ownership)
      .def("step", &PyModel::step, nb::arg("entries"), nb::arg("pass_"), nb::arg("all_logits") = false,
           nb::arg("observer").none() = nb::none(), nb::arg("drafted") = 0)
      .def("accept", &PyModel::accept, nb::arg("count"), nb::call_guard<nb::gil_scoped_release>())
      .def("embed", &PyModel::embed, nb::arg("entries"), nb::arg("states"))
      .def("run_block", &PyModel::run_block, nb::arg("layer"), nb::arg("entries"), nb::arg("states"),
           nb::arg("observer").none() = nb::none())
      .def("interrupt", &PyModel::interrupt)
      .def("cancel", &PyModel::cancel, nb::arg("on"));
}

}  // namespace flashllm
