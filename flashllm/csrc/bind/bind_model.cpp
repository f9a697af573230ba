// The model that runs tokens.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "bind/py_row_stream.h"
#include "bind/py_spec.h"
#include "bind/resident_tensors.h"
#include "model/model.h"

namespace flashllm {

namespace {

using Logits = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using States = Exact<nb::ndarray<float, nb::ndim<2>, nb::device::cpu, nb::c_contig>>;

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
using Entry = std::tuple<SequenceState*, std::vector<std::int32_t>>;

class PyModel {
 public:
  // caches: of each layer whose neurons `source` reads; None: every token computes every neuron of it.
  PyModel(nb::object block, std::shared_ptr<ResidentTensors> tensors, const RowFormat& rows,
          std::shared_ptr<PyRowStream> stream, std::shared_ptr<NeuronSource> source,
          const std::vector<std::optional<LayerRows>>& caches, std::shared_ptr<ThreadPool> pool,
          std::shared_ptr<FfnCounters> counters, std::size_t block_tokens, std::size_t fill_tokens,
          bool prefetch)
      : tensors_(std::move(tensors)),
        stream_(std::move(stream)),
        source_(std::move(source)),
        pool_(std::move(pool)),
        counters_(std::move(counters)) {
    const SpecReader reader(std::move(block));
    const SimdLevel level = tensors_->level();
    read_ = read_spec(reader, tensors_->dtype(), level);
    ModelSpec& spec = read_.spec;
    spec.block_tokens = block_tokens;
    spec.fill_tokens = fill_tokens;
    spec.prefetch = prefetch;
    d_model_ = spec.block.d_model;
    require(rows.d_model == d_model_, "rows are as wide as the model");
    const std::size_t num_layers = nb::len(reader.get<nb::tuple>("layers"));
    require(caches.size() == num_layers, "every layer needs a cache, or None");
    ModelWeights weights = weights_around(reader);
    for (std::size_t i = 0; i < num_layers; ++i)
      weights.blocks.push_back(block_weights(i, reader, rows, caches[i]));
    const Activation activation = parse_activation(reader.get<std::string>("activation"));
    model_ = std::make_unique<Model>(spec, weights, rows, activation, stream_->stream(), *pool_, *counters_,
                                     level, [this] { check(); });
  }

  const std::vector<std::shared_ptr<PyFfnLayer>>& ffns() const { return ffns_; }

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
  void run_block(std::size_t layer, const std::vector<std::tuple<SequenceState*, std::size_t>>& entries,
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

  // What lies before and behind the blocks.
  ModelWeights weights_around(const SpecReader& reader) {
    const ModelSpec& spec = read_.spec;
    ModelWeights weights;
    weights.embedding = tensors_->linear("embedding", spec.vocab, spec.embed_dim);
    if (reader.get<std::string>("positions") == "learned")
      weights.positions = tensors_->matrix("positions", read_.context + spec.position_offset, d_model_,
                                           codec_of(spec.block.dtype));
    if (spec.embed_dim != d_model_) {
      weights.project_in = tensors_->linear("project_in", d_model_, spec.embed_dim);
      weights.project_out = tensors_->linear("project_out", spec.embed_dim, d_model_);
    }
    if (reader.get<bool>("embedding_norm"))
      weights.embedding_norm = tensors_->norm("embedding_norm", read_.norms, d_model_);
    if (reader.get<bool>("final_norm"))
      weights.final_norm = tensors_->norm("final_norm", read_.norms, d_model_);
    weights.head = reader.get<bool>("tied_head") ? weights.embedding
                                                 : tensors_->linear("head", spec.vocab, spec.embed_dim);
    weights.head.bias = tensors_->floats("head.bias", spec.vocab);
    return weights;
  }

  BlockWeights block_weights(std::size_t index, const SpecReader& reader, const RowFormat& rows,
                             const std::optional<LayerRows>& cache) {
    const BlockSpec& spec = read_.spec.block;
    const NormStyle& style = read_.norms;
    const SpecReader of_layer(reader.get<nb::tuple>("layers")[index]);
    const std::size_t d_ff = of_layer.get<std::size_t>("neurons"), attended = spec.heads * spec.head_dim,
                      cached = spec.kv_heads * spec.head_dim;
    const std::string layer = "layers." + std::to_string(index) + ".";
    BlockWeights weights;
    if (spec.norms != NormPlace::output) {
      weights.attention_norm = tensors_->norm(layer + "attention_norm", style, d_model_);
      if (!spec.shared_norm) weights.ffn_norm = tensors_->norm(layer + "ffn_norm", style, d_model_);
    }
    if (norms_output(spec.norms)) {
      weights.attention_output_norm = tensors_->norm(layer + "attention_output_norm", style, d_model_);
      weights.ffn_output_norm = tensors_->norm(layer + "ffn_output_norm", style, d_model_);
    }
    if (spec.head_norm != HeadNorm::none) {
      const bool together = spec.head_norm == HeadNorm::projection, own = spec.head_norm == HeadNorm::heads;
      const auto norm = [&](const char* name, std::size_t all) {
        return tensors_->norm(layer + name, style, together ? all : spec.head_dim,
                              together || own ? all : spec.head_dim);
      };
      weights.query_norm = norm("query_norm", attended);
      weights.key_norm = norm("key_norm", cached);
    }
    if (reader.get<bool>("sub_norms")) {
      weights.mixed_norm = tensors_->norm(layer + "attention_sub_norm", style, attended);
      weights.neuron_norm = {tensors_->floats(layer + "ffn_sub_norm.weight", d_ff), d_ff, style.epsilon,
                             spec.rounded_inputs};
      require(static_cast<bool>(weights.neuron_norm), layer + "ffn_sub_norm.weight is missing");
    }
    weights.rotary = of_layer.get_or("rotary", -1);
    weights.activation_threshold = of_layer.get<float>("activation_threshold");
    weights.activation_cut = of_layer.get<float>("activation_cut");
    weights.attention_window = of_layer.get_or<std::size_t>("window", 0);
    weights.query = tensors_->linear(layer + "query", attended, d_model_);
    weights.key = tensors_->linear(layer + "key", cached, d_model_);
    weights.value = tensors_->linear(layer + "value", cached, d_model_);
    weights.out = tensors_->linear(layer + "out", d_model_, attended);
    weights.sinks = tensors_->floats(layer + "sinks", spec.heads);
    const Activation activation = parse_activation(reader.get<std::string>("activation"),
                                                   weights.activation_threshold, weights.activation_cut);
    FfnLayerOptions ffn = read_ffn(*tensors_, rows, index, d_ff, activation);
    ffn.norm = weights.neuron_norm;
    weights.neurons = d_ff;
    weights.up_bias = ffn.up_bias;
    weights.gate_bias = ffn.gate_bias;
    weights.down_bias = ffn.down_bias;
    weights.gate = ffn.gate;
    weights.plane = ffn.plane;
    ffns_.push_back(cache ? std::make_shared<PyFfnLayer>(ffn, tensors_, source_, *cache, pool_, counters_)
                          : nullptr);
    if (!cache) return weights;
    weights.ffn = &ffns_.back()->layer();
    const nb::object experts = of_layer.get<nb::object>("experts");
    if (!experts.is_none()) weights.ffn->set_router(router(SpecReader(experts), layer));
    return weights;
  }

  std::unique_ptr<Router> router(const SpecReader& experts, const std::string& layer) {
    ExpertsSpec spec;
    spec.count = experts.get<std::size_t>("count");
    spec.chosen = experts.get<std::size_t>("chosen");
    spec.size = experts.get<std::size_t>("size");
    spec.shared = experts.get<std::size_t>("shared");
    spec.softmax_of_all = experts.get<std::string>("softmax_of") == "all";
    spec.normalized = experts.get<bool>("normalized");
    const Dtype dtype = tensors_->dtype();
    const auto matrix = [&](const char* name, std::size_t rows) {
      return tensors_->matrix(layer + name, rows, d_model_, codec_of(dtype));
    };
    auto made = std::make_unique<Router>(
        spec, matrix("router", spec.count),
        tensors_->contains(layer + "shared_gate.weight") ? matrix("shared_gate", 1) : RowMatrix{}, dtype,
        tensors_->level());
    made->set_down_bias(tensors_->floats(layer + "ffn.expert_down_bias", spec.count * d_model_));
    return made;
  }

  std::shared_ptr<ResidentTensors> tensors_;
  std::shared_ptr<PyRowStream> stream_;
  std::shared_ptr<NeuronSource> source_;
  std::shared_ptr<ThreadPool> pool_;
  std::shared_ptr<FfnCounters> counters_;
  PySpec read_;
  std::vector<std::shared_ptr<PyFfnLayer>> ffns_;
  std::size_t d_model_ = 0;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<Model> model_;
};

}  // namespace

void init_model(nb::module_& m) {
  nb::class_<PyModel>(m, "Model")
      .def(nb::init<nb::object, std::shared_ptr<ResidentTensors>, const RowFormat&,
                    std::shared_ptr<PyRowStream>, std::shared_ptr<NeuronSource>,
                    const std::vector<std::optional<LayerRows>>&, std::shared_ptr<ThreadPool>,
                    std::shared_ptr<FfnCounters>, std::size_t, std::size_t, bool>(),
           nb::kw_only(), nb::arg("block"), nb::arg("tensors"), nb::arg("row_format"), nb::arg("stream"),
           nb::arg("source"), nb::arg("caches"), nb::arg("pool"), nb::arg("counters"),
           nb::arg("block_tokens"), nb::arg("fill_tokens"), nb::arg("prefetch"))
      .def_prop_ro("ffns", &PyModel::ffns)
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
