// The model that runs tokens.
#include <atomic>
#include <chrono>

#include "bind/bindings.h"
#include "bind/py_ffn.h"
#include "model/model.h"

namespace flashllm {

namespace {

using Logits = Given<float, Two>;
using States = Array<float, Two>;

constexpr Named<Pass> kPasses[] = {NAMED(Pass, sparse), NAMED(Pass, oracle), NAMED(Pass, dense),
                                   NAMED(Pass, prompt)};

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
    observer_.attr("input")(layer, given_rows(x, tokens, d_model_));
  }
  void activations(std::size_t layer, std::size_t first, std::size_t count, float* h,
                   std::size_t stride) override {
    const nb::gil_scoped_acquire locked;
    const auto row = static_cast<std::int64_t>(stride);
    observer_.attr("activations")(layer, first, Given<float, Two>(h, {count, tokens_}, nb::none(), {row, 1}));
  }

 private:
  nb::object observer_;
  const std::size_t d_model_;
  std::size_t tokens_ = 0;
};

constexpr std::chrono::milliseconds kCheckAfter(50);

// What the table refers to (reader, file, rows, memory) lives as long as its object.
void make_table(TokenTable* self, Reader& reader, const DirectFile& file, const FileRows& rows,
                std::size_t columns, const std::string& encoding, std::uint32_t stride,
                const ByteArray& memory, const std::string& simd) {
  const RowCodec codec = parse_codec(encoding);
  require(stride != 0 && vector_nbytes(codec, columns) <= stride && memory.nbytes() >= stride,
          "a table's rows must fit their stride, and memory at least one of them");
  const std::size_t kept = std::min(memory.nbytes() / stride, rows.count);
  new (self) TokenTable(rows.source(stride), codec, columns, static_cast<std::int32_t>(kept),
                        bytes_of(memory), reader, file, parse_simd(simd));
}

// New ids of a sequence.
using Entry = std::tuple<SequenceState*, std::vector<std::int32_t>>;

class PyModel {
 public:
  // caches: of each layer whose neurons `source` reads; None: every token computes every neuron of it.
  PyModel(nb::handle block, std::shared_ptr<NamedTensors> tensors, const std::vector<RowFormat>& rows,
          std::shared_ptr<RowStream> stream, std::shared_ptr<NeuronSource> source,
          const std::vector<FileRows>& layers, const std::vector<std::optional<LayerCache>>& caches,
          std::shared_ptr<TokenTable> table, std::shared_ptr<ThreadPool> pool,
          std::shared_ptr<FfnCounters> counters, std::size_t part_tokens, std::size_t fill_tokens,
          bool prefetch, bool loads)
      : parts_{std::move(tensors), std::move(source), std::move(pool), std::move(counters)},
        stream_(std::move(stream)),
        table_(std::move(table)) {
    Architecture of = read_architecture(block, parts_.tensors->dtype());
    ModelSpec& spec = of.model;
    spec.part_tokens = part_tokens;
    spec.fill_tokens = fill_tokens;
    spec.prefetch = prefetch;
    spec.loads = loads;
    d_model_ = spec.block.d_model;
    require(rows.size() == of.layers.size() && layers.size() == rows.size() && caches.size() == rows.size(),
            "every layer needs its rows and their format, and a cache or None");
    ModelWeights weights = read_ends(*parts_.tensors, of);
    for (std::size_t i = 0; i < layers.size(); ++i)
      weights.blocks.push_back(block_weights(of, i, rows[i], layers[i], caches[i]));
    model_ = std::make_unique<Model>(spec, weights, *stream_, table_.get(), *parts_.pool, *parts_.counters,
                                     parts_.tensors->level());
  }

  const std::vector<std::shared_ptr<PyFfnLayer>>& ffns() const { return ffns_; }

  Model& model() { return *model_; }
  std::size_t d_model() const { return d_model_; }

  // states [tokens, d_model] that enter the first layer
  void embed(const std::vector<Entry>& entries, const States& states) {
    const std::vector<Token> tokens = tokens_of(entries);
    require_rows(states, tokens.size(), d_model_, "states");
    const nb::gil_scoped_release unlocked;
    model_->embed(tokens.data(), tokens.size(), states.data());
  }

  // The states after layer `layer`, in the place of those before; the sequences hold one layer's keys and
  // values.
  void run_block(std::size_t layer, const std::vector<std::tuple<SequenceState*, std::size_t>>& entries,
                 const States& states, nb::object observer) {
    std::vector<Token> tokens;
    for (const auto& [sequence, count] : entries) {
      require(sequence != nullptr, "every sequence of a block needs a state");
      for (std::size_t i = 0; i < count; ++i) tokens.push_back({sequence, i, 0});
    }
    require_rows(states, tokens.size(), d_model_, "states");
    PyTap tap(observer, d_model_);
    Tap* asked = observer.is_none() ? nullptr : &tap;
    const nb::gil_scoped_release unlocked;
    model_->run_block(layer, tokens, states.data(), asked);
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

  // From any thread: until it is taken back, a prompt's pass ends between two layers.
  void cancel(bool on) { cancelled_.store(on, std::memory_order_relaxed); }
  bool is_cancelled() const { return cancelled_.load(std::memory_order_relaxed); }

 private:
  BlockWeights block_weights(const Architecture& of, std::size_t index, const RowFormat& format,
                             const FileRows& rows, const std::optional<LayerCache>& cache) {
    const std::string layer = "layers." + std::to_string(index) + ".";
    BlockWeights weights = read_block(*parts_.tensors, layer, of, index);
    FfnLayerOptions ffn =
        read_ffn(*parts_.tensors, format, index, weights.spec.neurons, weights.spec.activation);
    ffn.neuron_norm = weights.neuron_norm;
    static_cast<NeuronWeights&>(weights) = ffn;
    ffns_.push_back(nullptr);
    if (!cache) return weights;
    ffns_.back() = std::make_shared<PyFfnLayer>(ffn, parts_, rows, *cache);
    weights.ffn = &ffns_.back()->layer();
    if (auto router = read_router(*parts_.tensors, layer, weights.spec.experts, d_model_))
      weights.ffn->set_router(std::move(router));
    return weights;
  }

  const FfnParts parts_;
  std::shared_ptr<RowStream> stream_;
  std::shared_ptr<TokenTable> table_;
  std::vector<std::shared_ptr<PyFfnLayer>> ffns_;
  std::size_t d_model_ = 0;
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<Model> model_;
};

// A RunningPass, and what it refers to but for the model and the sequences. One thread at a time. `progress`,
// unless it is None, is called with its (done, total) a few times a second.
class PyPass {
 public:
  PyPass(PyModel& model, const std::vector<Entry>& entries, const std::string& pass, bool all_logits,
         nb::object observer, std::size_t drafted, std::size_t stretches, nb::object progress,
         std::size_t expanded)
      : model_(model),
        tap_(observer, model.d_model()),
        progress_(std::move(progress)),
        vocab_(model.model().spec().vocab) {
    std::vector<Token> tokens = PyModel::tokens_of(entries);
    std::vector<std::size_t> wanted;
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (all_logits || i + 1 == tokens.size() || tokens[i + 1].sequence != tokens[i].sequence)
        wanted.push_back(i);
    rows_ = wanted.size();
    logits_ = std::make_unique<float[]>(rows_ * vocab_);
    pass_.emplace(
        model.model(), std::move(tokens), by_name("a pass", pass, kPasses), std::move(wanted), logits_.get(),
        [this] { check(); }, observer.is_none() ? nullptr : &tap_, drafted, stretches, expanded);
  }

  // Logits [entries, vocab] after each entry's last token, or [tokens, vocab] after every token; None where
  // `seconds` have gone before the pass has ended.
  std::optional<Logits> advance(double seconds) {
    const Clock::time_point began = Clock::now();
    bool has_ended = false;
    checked_ = {};
    {
      const nb::gil_scoped_release unlocked;
      const auto stop = [&] {
        return std::chrono::duration<double>(Clock::now() - began).count() >= seconds;
      };
      has_ended = pass_->advance(stop);
    }
    if (!has_ended) return std::nullopt;
    float* data = logits_.release();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    return Logits(data, {rows_, vocab_}, owner);
  }

  void close() { pass_->close(); }

 private:
  using Clock = std::chrono::steady_clock;

  // The interpreter's lock is waited for at once in a pass, and then a few times a second.
  void check() {
    const auto now = Clock::now();
    if (now - checked_ < kCheckAfter && !model_.is_cancelled()) return;
    checked_ = now;
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (!progress_.is_none()) progress_(pass_->progress().done, pass_->progress().total);
    if (!model_.is_cancelled()) return;
    const nb::object type = nb::module_::import_("flashllm.errors").attr("Cancelled");
    PyErr_SetString(type.ptr(), "the computation was ended by another thread");
    throw nb::python_error();
  }

  PyModel& model_;
  PyTap tap_;
  const nb::object progress_;
  const std::size_t vocab_;
  std::size_t rows_ = 0;
  std::unique_ptr<float[]> logits_;
  Clock::time_point checked_;
  std::optional<RunningPass> pass_;
};

}  // namespace

void init_model(nb::module_& m) {
  nb::class_<TokenTable>(m, "TokenTable")
      .def("__init__", &make_table, nb::kw_only(), "reader"_a, "file"_a, "rows"_a, "columns"_a, "encoding"_a,
           "stride"_a, "memory"_a, "simd"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 8>());
  nb::class_<PyModel>(m, "Model")
      .def(nb::init<nb::handle, std::shared_ptr<NamedTensors>, const std::vector<RowFormat>&,
                    std::shared_ptr<RowStream>, std::shared_ptr<NeuronSource>, const std::vector<FileRows>&,
                    const std::vector<std::optional<LayerCache>>&, std::shared_ptr<TokenTable>,
                    std::shared_ptr<ThreadPool>, std::shared_ptr<FfnCounters>, std::size_t, std::size_t, bool,
                    bool>(),
           nb::kw_only(), "block"_a, "tensors"_a, "row_formats"_a, "stream"_a, "source"_a, "layers"_a,
           "caches"_a, "table"_a.none(), "pool"_a, "counters"_a, "part_tokens"_a, "fill_tokens"_a,
           "prefetch"_a, "loads"_a)
      .def_prop_ro("ffns", &PyModel::ffns)
      .def(
          "accept", [](PyModel& self, std::size_t count) { self.model().accept(count); }, "count"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def("embed", &PyModel::embed, "entries"_a, "states"_a)
      .def("run_block", &PyModel::run_block, "layer"_a, "entries"_a, "states"_a,
           "observer"_a.none() = nb::none())
      .def("interrupt", [](PyModel& self) { self.model().interrupt(); })
      .def("cancel", &PyModel::cancel, "on"_a);
  nb::class_<PyPass>(m, "Pass")
      .def(nb::init<PyModel&, const std::vector<Entry>&, const std::string&, bool, nb::object, std::size_t,
                    std::size_t, nb::object, std::size_t>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), "model"_a, "entries"_a, "pass_"_a,
           "all_logits"_a = false, "observer"_a.none() = nb::none(), "drafted"_a = 0, "stretches"_a = 0,
           "progress"_a.none() = nb::none(), "expanded"_a = 0)
      .def("advance", &PyPass::advance, "seconds"_a)
      .def("close", &PyPass::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace flashllm
