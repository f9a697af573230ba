// Streams of rows, and the model: the same bits in any company, in parts and with any threads; whatever
// interrupts a pass, the next one is right.
#include "model/model.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "ffn_fixture.h"
#include "io/error.h"
#include "io/row_stream.h"

namespace {

using namespace ffn_tests;

constexpr std::size_t kLayers = 2, kVocab = 37, kHeads = 6, kKvHeads = 3, kHeadDim = 20, kContext = 150,
                      kRank = 4;
constexpr std::size_t kBlockRows = 16, kAhead = 2;
constexpr std::size_t kBeside = 24;  // neurons of a shared expert

// Exactly as much memory as may be touched: an address sanitizer sees a load beyond it.
struct Matrix {
  Matrix(std::size_t rows, std::size_t columns, std::mt19937& random)
      : values(random_floats(rows * columns, random, 0.1F)), bias(random_floats(rows, random, 0.1F)) {
    weights.data = reinterpret_cast<const std::byte*>(values.data());
    weights.rows = rows;
    weights.columns = columns;
    weights.stride = 4 * columns;
    weights.bias = bias.data();
  }
  RowMatrix rows(bool with_bias) const {
    RowMatrix matrix = weights;
    matrix.bias = with_bias ? bias.data() : nullptr;
    return matrix;
  }
  std::vector<float> values, bias;
  RowMatrix weights;
};

struct Affine {
  explicit Affine(std::mt19937& random)
      : weight(random_floats(kWidth, random)), bias(random_floats(kWidth, random)) {}
  Norm norm(Norm::Kind kind) const { return {kind, kWidth, 1e-5F, weight.data(), bias.data()}; }
  std::vector<float> weight, bias;
};

struct Block {
  Block(const Flash& flash, int threads, std::int32_t capacity, std::mt19937& random)
      : norm(random),
        ffn_norm(random),
        query(kHeads * kHeadDim, kWidth, random),
        key(kKvHeads * kHeadDim, kWidth, random),
        value(kKvHeads * kHeadDim, kWidth, random),
        out(kWidth, kHeads * kHeadDim, random),
        down(kRank, kWidth, random),
        up(static_cast<std::size_t>(kNeurons), kRank, random),
        ffn(flash, capacity, 3, threads, 2) {
    ffn.layer.set_predictor(std::make_unique<LowRankPredictor>(down.rows(false), up.rows(true), 0.0F));
  }
  BlockWeights weights(Norm::Kind kind) {
    BlockWeights result;
    result.attention_norm = norm.norm(kind);
    result.ffn_norm = ffn_norm.norm(kind);
    result.query = query.weights;
    result.key = key.weights;
    result.value = value.weights;
    result.out = out.weights;
    result.spec.attention.heads = kHeads;
    result.spec.attention.kv_heads = kKvHeads;
    result.spec.attention.head_dim = kHeadDim;
    result.spec.attention.query_scale = 0.25F;
    result.spec.activation = Activation::relu;
    result.spec.neurons = static_cast<std::size_t>(kNeurons);
    result.ffn = &ffn.layer;
    return result;
  }
  Affine norm, ffn_norm;
  Matrix query, key, value, out, down, up;
  ffn_tests::Layer ffn;
};

struct Settings {
  int threads = 1;
  std::int32_t capacity = 12;
  std::size_t part_tokens = 256;
  bool rotary = false;  // and RMS norms, post-norm
  int io_threads = 3;   // of the stream
};

struct Whole {
  Whole(const Flash& flash, const Settings& settings)
      : pool(settings.threads), reader(ffn_tests::Layer::reader_options(settings.io_threads)) {
    for (std::size_t i = 0; i < kLayers; ++i)
      blocks.push_back(std::make_unique<Block>(flash, settings.threads, settings.capacity, random));
    stream = std::make_unique<RowStream>(reader, *flash.file, layers(flash), kBlockRows, kAhead);
    const Norm::Kind kind = settings.rotary ? Norm::Kind::rms : Norm::Kind::layer;
    ModelSpec spec;
    spec.block.d_model = kWidth;
    spec.vocab = kVocab;
    spec.embed_dim = kWidth;
    spec.part_tokens = settings.part_tokens;
    spec.fill_tokens = 3;
    ModelWeights weights;
    weights.embedding = weights.head = embedding.weights;
    weights.embedding.bias = weights.head.bias = nullptr;
    if (settings.rotary) {
      spec.rotary = {{frequencies, Rotary::Style::half, 1.0F}};
    } else {
      weights.positions = positions.weights;
      spec.position_offset = 2;
    }
    weights.final_norm = final_norm.norm(kind);
    for (const auto& block : blocks) {
      weights.blocks.push_back(block->weights(kind));
      weights.blocks.back().format = flash.options(1, 1).format;
      weights.blocks.back().spec.attention.rotary = settings.rotary ? 0 : -1;
      weights.blocks.back().spec.norms = settings.rotary ? NormPlace::sum : NormPlace::input;
    }
    model = std::make_unique<Model>(spec, weights, *stream, nullptr, pool, counters, best_simd_level());
  }
  static std::vector<RowSource> layers(const Flash& flash) {
    return {kLayers, {{kNeurons, 1}, kOffset, kStride, flash.sums.data()}};
  }
  std::unique_ptr<SequenceState> sequence() const { return std::make_unique<SequenceState>(states); }
  // Logits after the last of the ids.
  std::vector<float> step(SequenceState& sequence, const std::vector<std::int32_t>& ids, Pass pass) {
    std::vector<Token> tokens;
    for (std::size_t i = 0; i < ids.size(); ++i) tokens.push_back({&sequence, sequence.length() + i, ids[i]});
    std::vector<float> logits(kVocab);
    run(tokens, pass, {tokens.size() - 1}, logits.data(), 1);
    return logits;
  }
  void run(const std::vector<Token>& tokens, Pass pass, const std::vector<std::size_t>& wanted, float* logits,
           std::size_t stretches = 0) {
    RunningPass(*model, tokens, pass, wanted, logits, check, nullptr, 0, stretches).advance([] {
      return false;
    });
  }

  std::mt19937 random{31};
  ThreadPool pool;
  Reader reader;
  FfnCounters counters;
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<RowStream> stream;
  Affine final_norm{random};
  Matrix embedding{kVocab, kWidth, random}, positions{kContext + 2, kWidth, random};
  std::vector<float> frequencies{1.0F, 0.3F, 0.1F, 0.03F, 0.01F};
  std::shared_ptr<StatePool> states = std::make_shared<StatePool>(
      StateShape(std::vector<LayerKv>(kLayers, {kKvHeads, kHeadDim, 0}), kContext, kContext, Dtype::f32));
  std::unique_ptr<Model> model;
  int checks_left = -1;
  const std::function<void()> check = [this] {
    if (checks_left-- == 0) throw std::runtime_error("interrupted");
  };
};

std::vector<std::int32_t> ids_of(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(n);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % kVocab);
  return ids;
}

// A prompt, then tokens one by one, in each kind of pass.
std::vector<float> conversation(Whole& whole, unsigned seed) {
  const auto sequence = whole.sequence();
  std::vector<float> all = whole.step(*sequence, ids_of(70 + seed, seed), Pass::prompt);
  for (const Pass pass : {Pass::sparse, Pass::oracle, Pass::dense})
    for (const std::int32_t id : ids_of(3, seed + 1)) {
      const std::vector<float> logits = whole.step(*sequence, {id}, pass);
      all.insert(all.end(), logits.begin(), logits.end());
    }
  return all;
}

void settings_change_nothing(const Flash& flash, bool rotary) {
  Whole plain(flash, {1, 12, 256, rotary});
  const std::vector<float> expected = conversation(plain, 1);
  for (const Settings& settings : {Settings{3, 12, 256, rotary}, Settings{1, kNeurons, 256, rotary},
                                   Settings{2, 1, 17, rotary}, Settings{1, 12, 64, rotary}}) {
    Whole other(flash, settings);
    CHECK(conversation(other, 1) == expected);
    CHECK(conversation(other, 1) == expected);  // whatever the caches hold by now
  }
  CHECK(plain.counters.compute_ns > 0 && plain.counters.bytes_read > 0 &&
        plain.blocks[0]->ffn.counters.active > 0);
}

void company_changes_nothing(const Flash& flash) {
  Whole whole(flash, {2, 12, 256, true});
  for (const Pass pass : {Pass::sparse, Pass::oracle, Pass::dense, Pass::prompt}) {
    std::vector<std::vector<float>> alone;
    std::vector<std::unique_ptr<SequenceState>> sequences;
    std::vector<Token> tokens;
    std::vector<std::size_t> wanted;
    for (unsigned i = 0; i < 11; ++i) {
      const std::vector<std::int32_t> ids = ids_of(1 + i % 3, i);
      alone.push_back(whole.step(*whole.sequence(), ids, pass));
      sequences.push_back(whole.sequence());
      for (std::size_t t = 0; t < ids.size(); ++t) tokens.push_back({sequences.back().get(), t, ids[t]});
      wanted.push_back(tokens.size() - 1);
    }
    std::vector<float> logits(wanted.size() * kVocab);
    whole.run(tokens, pass, wanted, logits.data());
    for (std::size_t i = 0; i < wanted.size(); ++i)
      CHECK(std::memcmp(logits.data() + i * kVocab, alone[i].data(), 4 * kVocab) == 0);
  }
}

// Two prompts a step each in turn, a token between them, and one that is given up.
void waiting_changes_nothing(const Flash& flash, bool rotary) {
  Whole whole(flash, {2, 12, 20, rotary});
  const auto sequence = whole.sequence();
  const std::vector<std::int32_t> ids = ids_of(90, 6), others = ids_of(50, 7);
  const std::vector<float> expected = whole.step(*whole.sequence(), ids, Pass::prompt),
                           expected_others = whole.step(*whole.sequence(), others, Pass::prompt);
  const std::vector<float> token = whole.step(*sequence, {5}, Pass::sparse);
  const auto first = whole.sequence(), second = whole.sequence(), third = whole.sequence();
  const auto begin = [&](SequenceState& state, const std::vector<std::int32_t>& of, float* logits) {
    std::vector<Token> tokens;
    for (std::size_t i = 0; i < of.size(); ++i) tokens.push_back({&state, i, of[i]});
    return std::make_unique<RunningPass>(*whole.model, tokens, Pass::prompt,
                                         std::vector<std::size_t>{of.size() - 1}, logits, whole.check,
                                         nullptr, 0, 2);
  };
  std::vector<float> logits(3 * kVocab);
  const auto one = begin(*first, ids, logits.data()), two = begin(*second, others, logits.data() + kVocab);
  const auto stop = [] { return true; };
  bool one_ended = false, two_ended = false;
  while (!one_ended || !two_ended) {
    if (!one_ended) one_ended = one->advance(stop);
    sequence->keep(0);
    CHECK(whole.step(*sequence, {5}, Pass::sparse) == token);
    if (!two_ended) two_ended = two->advance(stop);
    const auto three = begin(*third, ids, logits.data() + 2 * kVocab);
    CHECK(!three->advance(stop) && !three->advance(stop));
  }
  CHECK(third->length() == 0 && first->length() == 90 && second->length() == 50);
  CHECK(std::memcmp(logits.data(), expected.data(), 4 * kVocab) == 0);
  CHECK(std::memcmp(logits.data() + kVocab, expected_others.data(), 4 * kVocab) == 0);
}

void interrupted_passes_leave_no_trace(const Flash& flash) {
  Whole whole(flash, {2, 12, 20, false});
  const std::vector<float> expected = conversation(whole, 5);
  for (int checks = 0; checks < 9; ++checks) {  // anywhere in a stretch
    const auto sequence = whole.sequence();
    whole.checks_left = 3 * checks;
    bool threw = false;
    try {
      whole.step(*sequence, ids_of(90, 6), Pass::prompt);
    } catch (const std::runtime_error&) {
      threw = true;
    }
    whole.checks_left = -1;
    CHECK(threw && sequence->length() == 0 && whole.states->nbytes() == 0);
    if (checks % 3 == 0) CHECK(conversation(whole, 5) == expected);
  }
  CHECK(conversation(whole, 5) == expected);
}

// Between the start of a layer's reads and their end; its outputs are added where they are without reads.
void a_shared_expert_is_computed_while_reads_fly(const Flash& flash) {
  std::mt19937 random(4);
  Block block(flash, 1, 12, random);
  const Matrix up(kBeside, kWidth, random), down(kWidth, kBeside, random);
  std::vector<BlockWeights> weights = {block.weights(Norm::Kind::layer)};
  weights[0].format = flash.options(1, 1).format;
  weights[0].spec.attention.heads = 0;
  weights[0].spec.beside = kBeside;
  weights[0].beside_up = up.weights;
  weights[0].beside_down = down.weights;
  ModelSpec spec;
  spec.block.d_model = kWidth;
  RowStream stream(block.ffn.reader, *flash.file, {Whole::layers(flash)[0]}, kBlockRows, kAhead);
  FfnCounters counters;
  Stopwatch watch;
  Arithmetic arithmetic(Dtype::f32, block.ffn.pool, best_simd_level());
  SequenceMemory memory(block.ffn.pool, best_simd_level());
  FeedForward ffn(spec, weights, stream, counters, watch, arithmetic);
  flashllm::Layer layer(spec.block, spec.rotary, arithmetic, memory, ffn);
  const std::vector<Token> tokens(FfnTokens::kMost + 1);  // in two groups
  const Part part{tokens.data(), tokens.size(), Pass::sparse};
  const std::vector<float> states = random_floats(tokens.size() * kWidth, random);
  std::vector<float> expected = states, found = states;
  layer.run(0, weights[0], part, expected.data());
  block.ffn.layer.cache().forget(block.ffn.layer.cached());

  auto held = std::make_shared<FaultPlan>(Fault{Fault::Kind::hold, 0, 1, 0});
  inject(*flash.file, held);
  constexpr int kPatience = 5000;  // ms
  const auto wait_for = [](const auto& is_so) {
    for (int i = 0; i < kPatience && !is_so(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return is_so();
  };
  std::atomic<int> times{0};
  std::atomic<bool> is_late{false};
  std::thread releasing([&] {  // until then `finish` cannot end
    is_late = !wait_for([&] { return times != 0; });
    held->release();
  });
  arithmetic.set_watch([&](const float*, std::size_t count, std::size_t width, std::ptrdiff_t) {
    if (width != kBeside) return;
    CHECK(!is_late && count == tokens.size() && wait_for([&] { return held->calls() != 0; }));
    ++times;
  });
  layer.run(0, weights[0], part, found.data());
  releasing.join();
  inject(*flash.file, nullptr);
  CHECK(times == 1 && same_bits(found, expected) && !same_bits(found, states));
  weights[0].spec.beside = 0;
  found = states;
  layer.run(0, weights[0], part, found.data());
  CHECK(!same_bits(found, expected));
}

// The interruption is seen in a layer's attention, when the read that never ends is of its rows.
void an_interruption_does_not_wait_for_a_read_that_never_ends(const Flash& flash) {
  Settings settings;
  settings.io_threads = 1;  // reads begin in their order
  Whole whole(flash, settings);
  const auto sequence = whole.sequence();
  constexpr std::size_t kReadsOfALayer = (static_cast<std::size_t>(kNeurons) + kBlockRows - 1) / kBlockRows;
  hang_reads(1, kReadsOfALayer);
  whole.checks_left = 1 + static_cast<int>(kReadsOfALayer);
  const auto start = std::chrono::steady_clock::now();
  bool threw = false;
  try {
    whole.step(*sequence, ids_of(90, 6), Pass::prompt);
  } catch (const std::runtime_error&) {
    threw = true;
  }
  CHECK(threw && std::chrono::steady_clock::now() - start < std::chrono::seconds(20));  // a read has 60
  CHECK(whole.reader.is_lost());
  hang_reads(0);
}

void wrong_tokens_are_refused(const Flash& flash) {
  Whole whole(flash, {});
  const auto sequence = whole.sequence();
  for (const Token& token : {Token{sequence.get(), 0, static_cast<std::int32_t>(kVocab)},
                             Token{sequence.get(), 0, -1}, Token{sequence.get(), kContext, 0}}) {
    std::vector<float> logits(kVocab);
    CHECK(is_refused([&] { whole.run({token}, Pass::sparse, {0}, logits.data()); }));
    CHECK(sequence->length() == 0);
  }
}

void streams_give_every_row_once(const Flash& flash, int scale) {
  for (const std::size_t ahead : {std::size_t{1}, std::size_t{3}, std::size_t{7}}) {
    Reader reader(ffn_tests::Layer::reader_options(3));
    RowStream stream(reader, *flash.file, Whole::layers(flash), 7, ahead);
    for (int round = 0; round < 4 * scale; ++round) {
      stream.begin(round % 2, (round + 1) % 2);
      RowRun block;
      std::size_t rows = 0;
      while (stream.next(block)) {
        CHECK(block.first_row == rows);
        for (std::size_t i = 0; i < block.count; ++i)
          CHECK(xxh3_64(block.rows + i * kStride, kStride) == flash.sums[rows + i]);
        rows += block.count;
        if (round % 3 == 1 && rows > 14) break;  // given up
      }
      if (round % 4 == 3) stream.drain();
    }
    CHECK(stream.take().bytes > 0 && stream.take().bytes == 0);
  }
}

}  // namespace

void test_model(const std::string& directory, int scale) {
  const Flash flash(directory + "/model");
  streams_give_every_row_once(flash, scale);
  settings_change_nothing(flash, false);
  settings_change_nothing(flash, true);
  company_changes_nothing(flash);
  for (const bool rotary : {false, true}) waiting_changes_nothing(flash, rotary);
  interrupted_passes_leave_no_trace(flash);
  wrong_tokens_are_refused(flash);
  a_shared_expert_is_computed_while_reads_fly(flash);
  // Last: from then on memory is kept. So is this file, from which that read still reads once it may go on.
  static const auto* const kept = new Flash(directory + "/kept");
  an_interruption_does_not_wait_for_a_read_that_never_ends(*kept);
}
