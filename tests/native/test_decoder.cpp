// Layer norms, and decoder layers at one token: as step by step, the same bits for any threads and company,
// and nothing but the new positions written.
#include "model/decoder.h"

#include <cerrno>
#include <cmath>
#include <cstring>

#include "io/error.h"
#include "ffn_fixture.h"

namespace {

using namespace ffn_tests;

constexpr std::size_t kHeads = 6, kKvHeads = 3, kHeadDim = 20, kContext = 5, kBatch = 3;

std::vector<float> random_floats(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

// Exactly as much memory as may be touched: an address sanitizer sees a load beyond it.
struct Matrix {
  Matrix(std::size_t rows, std::size_t columns, std::mt19937& random)
      : values(random_floats(rows * columns, random)), bias(random_floats(rows, random)) {
    weights.data = reinterpret_cast<const std::byte*>(values.data());
    weights.rows = rows;
    weights.columns = columns;
    weights.stride = 4 * columns;
    weights.bias = bias.data();
  }
  std::vector<float> values, bias;
  LinearWeights weights;
};

struct Norm {
  explicit Norm(std::mt19937& random)
      : weight(random_floats(kWidth, random)), bias(random_floats(kWidth, random)) {}
  LayerNorm norm() const { return {kWidth, 1e-5F, weight.data(), bias.data()}; }
  std::vector<float> weight, bias;
};

// A decoder of one layer in fp32; keys and values hold NaN where nothing was written.
struct OneLayer {
  OneLayer(const Flash& flash, int threads, std::int32_t capacity)
      : ffn(flash, capacity, 3, threads, 2), decoder(shape(), ffn.pool, ffn.counters, best_simd_level()) {
    layer.norm = norm.norm();
    layer.ffn_norm = ffn_norm.norm();
    layer.query = query.weights;
    layer.key = key.weights;
    layer.value = value.weights;
    layer.out = out.weights;
    layer.keys = reinterpret_cast<std::byte*>(keys.data());
    layer.values = reinterpret_cast<std::byte*>(values.data());
    layer.ffn = &ffn.layer;
    LinearWeights a = down.weights;
    a.bias = nullptr;
    ffn.layer.set_predictor(Predictor(a, up.weights, 0.0F));
    decoder.add_layer(layer);
  }
  static DecoderShape shape() {
    DecoderShape result;
    result.d_model = kWidth;
    result.heads = kHeads;
    result.kv_heads = kKvHeads;
    result.head_dim = kHeadDim;
    result.context = kContext;
    result.batch = kBatch;
    result.query_scale = 0.25F;
    return result;
  }
  // [tokens, sequences, width]; x alike
  std::vector<float> run(const std::vector<float>& x, std::size_t sequences) {
    std::vector<float> y(x.size());
    const std::size_t step = sequences * kWidth;
    for (std::size_t t = 0; t * step < x.size(); ++t)
      decoder.forward(0, reinterpret_cast<const std::byte*>(x.data() + t * step), sequences, t,
                      reinterpret_cast<std::byte*>(y.data() + t * step));
    return y;
  }

  std::mt19937 random{21};
  Norm norm{random}, ffn_norm{random};
  Matrix query{kHeads * kHeadDim, kWidth, random}, key{kKvHeads * kHeadDim, kWidth, random},
      value{kKvHeads * kHeadDim, kWidth, random}, out{kWidth, kHeads * kHeadDim, random};
  Matrix down{4, kWidth, random}, up{kNeurons, 4, random};  // of the predictor
  std::vector<float> keys = std::vector<float>(kBatch * kKvHeads * kContext * kHeadDim, NAN), values = keys;
  ffn_tests::Layer ffn;
  DecoderLayer layer;
  Decoder decoder;
};

bool same_bits(const float* a, const float* b, std::size_t n) { return std::memcmp(a, b, 4 * n) == 0; }

// One token of one sequence, step by step; keys and values [kv_heads, length, head_dim] without gaps.
std::vector<float> step_by_step(OneLayer& one, const float* x, std::vector<float>& keys,
                                std::vector<float>& values, std::size_t length) {
  ThreadPool& pool = one.ffn.pool;
  const SimdLevel level = best_simd_level();
  std::vector<float> h(x, x + kWidth), normed(kWidth), q(kHeads * kHeadDim), k(kKvHeads * kHeadDim), v(k),
      mixed(q), y(kWidth), scores(kHeads * length);
  layer_norm(one.layer.norm, h.data(), normed.data());
  linear(one.layer.query, normed.data(), 1, q.data(), pool, level);
  for (float& value : q) value *= 0.25F;
  linear(one.layer.key, normed.data(), 1, k.data(), pool, level);
  linear(one.layer.value, normed.data(), 1, v.data(), pool, level);
  for (std::size_t head = kKvHeads; head-- > 0;) {
    const auto at = static_cast<std::ptrdiff_t>((head * (length - 1) + length - 1) * kHeadDim);
    keys.insert(keys.begin() + at, k.begin() + static_cast<std::ptrdiff_t>(head * kHeadDim),
                k.begin() + static_cast<std::ptrdiff_t>((head + 1) * kHeadDim));
    values.insert(values.begin() + at, v.begin() + static_cast<std::ptrdiff_t>(head * kHeadDim),
                  v.begin() + static_cast<std::ptrdiff_t>((head + 1) * kHeadDim));
  }
  AttentionShape shape;
  shape.heads = kHeads;
  shape.kv_heads = kKvHeads;
  shape.head_dim = kHeadDim;
  shape.length = length;
  shape.row_stride = 4 * kHeadDim;
  shape.head_stride = length * shape.row_stride;
  attend_one(shape, q.data(), reinterpret_cast<const std::byte*>(keys.data()),
             reinterpret_cast<const std::byte*>(values.data()), scores.data(), mixed.data(), pool, level);
  linear(one.layer.out, mixed.data(), 1, y.data(), pool, level);
  for (std::size_t j = 0; j < kWidth; ++j) h[j] += y[j];
  layer_norm(one.layer.ffn_norm, h.data(), normed.data());
  one.ffn.layer.forward(normed.data(), 0, one.ffn.layer.predict(normed.data(), 0), y.data());
  for (std::size_t j = 0; j < kWidth; ++j) h[j] += y[j];
  return h;
}

void a_layer_is_its_steps(const Flash& flash) {
  OneLayer whole(flash, 2, 12), steps(flash, 1, kNeurons);
  std::mt19937 random(22);
  const std::vector<float> x = random_floats(kContext * kWidth, random), y = whole.run(x, 1);
  std::vector<float> keys, values;
  for (std::size_t t = 0; t < kContext; ++t) {
    const std::vector<float> expected = step_by_step(steps, x.data() + t * kWidth, keys, values, t + 1);
    CHECK(same_bits(y.data() + t * kWidth, expected.data(), kWidth));
  }
  CHECK(same_bits(whole.keys.data(), keys.data(), keys.size()));
  CHECK(same_bits(whole.values.data(), values.data(), values.size()));
  for (std::size_t i = keys.size(); i < whole.keys.size(); ++i)
    CHECK(std::isnan(whole.keys[i]) && std::isnan(whole.values[i]));
  CHECK(whole.ffn.counters.compute_ns > 0 && whole.ffn.counters.active > 0);
}

void company_and_threads_change_nothing(const Flash& flash, int scale) {
  std::mt19937 random(23);
  const std::vector<float> x = random_floats(kContext * kBatch * kWidth, random);
  const std::vector<float> together = OneLayer(flash, 1, kNeurons).run(x, kBatch);
  for (const int threads : {2, 2 + scale}) {
    const std::vector<float> again = OneLayer(flash, threads, 9).run(x, kBatch);
    CHECK(same_bits(again.data(), together.data(), x.size()));
  }
  for (std::size_t s = 0; s < kBatch; ++s) {
    std::vector<float> alone;
    for (std::size_t t = 0; t < kContext; ++t) {
      const auto from = x.begin() + static_cast<std::ptrdiff_t>((t * kBatch + s) * kWidth);
      alone.insert(alone.end(), from, from + kWidth);
    }
    const std::vector<float> y = OneLayer(flash, 2, 9).run(alone, 1);
    for (std::size_t t = 0; t < kContext; ++t)
      CHECK(same_bits(y.data() + t * kWidth, together.data() + (t * kBatch + s) * kWidth, kWidth));
  }
}

void a_failed_read_can_be_tried_again(Flash& flash) {
  std::mt19937 random(24);
  const std::vector<float> x = random_floats(kWidth, random);
  const std::vector<float> expected = OneLayer(flash, 1, kNeurons).run(x, 1);
  OneLayer faulty(flash, 2, 9);
  Fault fault;
  fault.kind = Fault::Kind::error;
  fault.count = 50;
  fault.argument = EIO;
  flash.file->inject(std::make_shared<FaultPlan>(fault));
  bool failed = false;
  try {
    faulty.run(x, 1);
  } catch (const CoreError& error) {
    failed = std::string(error.what()).find("layer 5, neuron ") == 0;
  }
  flash.file->inject(nullptr);
  CHECK(failed);
  CHECK(same_bits(faulty.run(x, 1).data(), expected.data(), kWidth));
}

void what_does_not_fit_is_refused(const Flash& flash) {
  OneLayer one(flash, 1, kNeurons);
  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const CoreError& error) {
      return error.kind() == ErrorKind::usage;
    }
    return false;
  };
  std::vector<std::byte> x(kBatch * kWidth * 4);
  CHECK(refused([&] { one.decoder.forward(1, x.data(), 1, 0, x.data()); }));
  CHECK(refused([&] { one.decoder.forward(0, x.data(), kBatch + 1, 0, x.data()); }));
  CHECK(refused([&] { one.decoder.forward(0, x.data(), 1, kContext, x.data()); }));
  for (LinearWeights* weights : {&one.layer.query, &one.layer.key, &one.layer.value, &one.layer.out}) {
    --weights->rows;
    CHECK(refused([&] { one.decoder.add_layer(one.layer); }));
    ++weights->rows;
  }
  --one.layer.ffn_norm.width;
  CHECK(refused([&] { one.decoder.add_layer(one.layer); }));
  DecoderShape shape = OneLayer::shape();
  shape.kv_heads = 4;
  CHECK(refused([&] { Decoder(shape, one.ffn.pool, one.ffn.counters, best_simd_level()); }));
}

}  // namespace

void test_layer_norm(int scale) {
  std::mt19937 random(25);
  for (const std::size_t width : {1, 7, 16, 33, 1000}) {
    const std::size_t rows = 5;
    const std::vector<float> weight = random_floats(width, random), bias = random_floats(width, random),
                             x = random_floats(rows * width, random);
    const LayerNorm norm{width, 1e-5F, weight.data(), bias.data()};
    std::vector<float> y(x);
    for (std::size_t r = 0; r < rows; ++r) {
      layer_norm(norm, y.data() + r * width, y.data() + r * width);  // in place
      double mean = 0.0, variance = 0.0;
      for (std::size_t j = 0; j < width; ++j) mean += x[r * width + j] / static_cast<double>(width);
      for (std::size_t j = 0; j < width; ++j)
        variance += std::pow(x[r * width + j] - mean, 2) / static_cast<double>(width);
      for (std::size_t j = 0; j < width; ++j) {
        const double expected = (x[r * width + j] - mean) / std::sqrt(variance + 1e-5) * weight[j] + bias[j];
        CHECK(std::fabs(y[r * width + j] - expected) <= 1e-5 * std::fmax(1.0, std::fabs(expected)));
      }
    }
    for (const int threads : {1, 2, 2 + scale}) {
      ThreadPool pool(threads);
      std::vector<float> again(x.size());
      layer_norm_rows(norm, reinterpret_cast<const std::byte*>(x.data()), rows, Dtype::f32,
                      reinterpret_cast<std::byte*>(again.data()), pool, best_simd_level());
      CHECK(same_bits(again.data(), y.data(), y.size()));
    }
  }
}

void test_decoder(const std::string& directory, int scale) {
  Flash flash(directory + "/decoder.bin");
  a_layer_is_its_steps(flash);
  company_and_threads_change_nothing(flash, scale);
  a_failed_read_can_be_tried_again(flash);
  what_does_not_fit_is_refused(flash);
}
