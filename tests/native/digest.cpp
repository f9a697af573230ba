#include "digest.h"

#include <random>
#include <vector>

#include "kernels/levels/levels.h"
#include "kernels/rows.h"
#include "planes/scale_planes.h"
#include "random_rows.h"

namespace flashllm {

namespace {

// Of bits, in their order: FNV-1a.
class Digest {
 public:
  void add(const void* values, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(values);
    for (std::size_t i = 0; i < nbytes; ++i) state_ = (state_ ^ bytes[i]) * 0x100000001b3U;
  }
  void add(const std::vector<float>& values) { add(values.data(), values.size() * sizeof(float)); }
  std::uint64_t value() const { return state_; }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325U;
};

// Products of a prompt, of every form of inputs: of `rows` vectors of a codec.
void add_prompt(SimdLevel level, RowCodec codec, const std::vector<std::byte>& vectors, std::size_t rows,
                const std::vector<float>& x, std::size_t columns, Digest& digest) {
  ThreadPool pool(1);
  const std::size_t tokens = x.size() / columns;
  const RowMatrix matrix{vectors.data(), rows, columns, vector_nbytes(codec, columns), codec};
  std::vector<float> out(tokens * rows);
  for (const InputForm form : {InputForm::f32, InputForm::int8, InputForm::int16, InputForm::token_int8}) {
    if (form != InputForm::f32 && !takes_inputs(codec, form)) continue;
    const PackedTokens packed(reinterpret_cast<const std::byte*>(x.data()), tokens, columns, Dtype::f32,
                              form_of_many(codec, form, Dtype::f32, columns, level), pool, level);
    linear_many(matrix, packed, Dtype::f32, reinterpret_cast<std::byte*>(out.data()), pool, level);
    digest.add(out);
  }
}

// Exact on every machine: no library's logarithm is in them.
std::vector<float> fractions(std::size_t n, std::mt19937& random) {
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(static_cast<std::int32_t>(random()) >> 8) / 4e6F;
  return values;
}

// Small positive fp16 numbers.
std::vector<std::uint16_t> halves(std::size_t n, std::mt19937& random) {
  std::vector<std::uint16_t> values(n);
  for (std::uint16_t& value : values) value = static_cast<std::uint16_t>(random() % 0x3C00);
  return values;
}

void add_planes(SimdLevel level, std::mt19937& random, Digest& digest) {
  constexpr std::size_t kWidth = 96, kNeurons = 64, kGroups = kNeurons / 32;
  const std::vector<std::uint16_t> scales = halves(kGroups * kWidth, random);
  const std::vector<std::uint16_t> minimums = halves(kGroups * kWidth, random);
  std::vector<std::int8_t> factors(kGroups * kWidth);
  for (std::int8_t& factor : factors) factor = static_cast<std::int8_t>(random());
  std::vector<std::uint8_t> powers(kGroups * kWidth);
  for (std::uint8_t& power : powers) power = static_cast<std::uint8_t>(110 + random() % 20);
  const float whole[kGroups] = {3e-3F, 7e-5F};
  for (std::size_t i = 0; i < kPlaneCodecs * kPlaneForms; ++i) {
    const auto codec = static_cast<RowCodec>(kFirstPlane + i / kPlaneForms);
    ScalePlane plane;
    if (codec == RowCodec::codes_fp4) {
      if (i % 2 != 0) continue;  // it has no minimums
      (i % kPlaneForms == 0 ? plane.powers : plane.quarters) = powers.data();
      plane.whole = whole;
    } else {
      plane.scales = scales.data();
      if (i % 2 != 0 && codec >= RowCodec::codes_iq4) continue;           // they have no minimums
      if (i % kPlaneForms == 0 && codec > RowCodec::codes_iq4) continue;  // they have factors
      if (i % 2 != 0) plane.minimums = minimums.data();
      if (i / 2 % 2 != 0) plane.factors = factors.data();
    }
    if (plane.minimums != nullptr && plane.factors != nullptr) plane.minimum_factors = factors.data();
    std::vector<std::byte> row(vector_nbytes(codec, kWidth));
    for (std::byte& byte : row) byte = static_cast<std::byte>(random());
    const PlaneKernels& kernels = plane_kernels(level, codec, plane);
    const void* rows[] = {row.data(), row.data(), row.data()};
    const std::int32_t ids[] = {0, 31, 63};
    const float values[] = {0.5F, -1.25F, 3.0F};
    std::vector<float> sums(kWidth), wide(kWidth);
    kernels.add_scaled_rows(rows, ids, values, 3, plane, kWidth, 0, kWidth, sums.data());
    kernels.widen(row.data(), row.size(), 63, 1, plane, kWidth, 0, kWidth, wide.data(), kWidth);
    digest.add(sums);
    digest.add(wide);
    const RowMatrix column = {row.data(), 1, kWidth, row.size(), codec, nullptr, InputForm::int8};
    const PlaneRows neuron(column, 63, plane, level);
    for (const std::size_t tokens : {1, 3, 11}) {
      if (!neuron.can_add_codes()) continue;
      const std::vector<float> by = fractions(tokens, random);
      std::vector<float> y(tokens * kWidth);
      ThreadPool pool(1);
      neuron.add_codes({by.data(), 1, tokens}, tokens, y.data(), kWidth, pool);
      digest.add(y);
    }
  }
}

}  // namespace

std::uint64_t digest_of(SimdLevel level) {
  constexpr std::size_t kRows = 21, kColumns = 207, kWidth = 48, kTerms = 9;
  std::mt19937 random(17);
  Digest digest;
  const std::vector<float> x = fractions(kColumns, random), scales = fractions(kRows, random);
  std::vector<float> dots(kRows), sums(kColumns), wide(kColumns);
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const KernelTable& kernels = kernel_table(level, dtype);
    const std::size_t stride = kColumns * dtype_nbytes(dtype);
    const std::vector<float> weights = fractions(kRows * kColumns, random);
    std::vector<std::byte> stored(kRows * stride);
    kernels.from_f32(weights.data(), weights.size(), stored.data());
    digest.add(stored.data(), stored.size());
    std::vector<const void*> rows;
    for (std::size_t r = 0; r < kRows; ++r) rows.push_back(stored.data() + r * stride);
    kernels.dot_rows(rows.data(), kRows, x.data(), kColumns, dots.data());
    digest.add(dots);
    kernels.dot_matrix(stored.data(), stride, kRows, x.data(), kColumns, dots.data());
    digest.add(dots);
    kernels.add_scaled_rows(rows.data(), scales.data(), kRows, 0, kColumns, sums.data());
    digest.add(sums);
    kernels.to_f32(stored.data(), kColumns, wide.data());
    digest.add(wide);
  }
  for (std::size_t i = 0; i < kCodedCodecs; ++i) {
    const auto codec = static_cast<RowCodec>(kFirstCoded + i);
    const std::vector<std::byte> row = random_rows(codec, 1, kColumns, random);
    const CodecKernels& kernels = codec_kernels(level, codec);
    const void* rows[] = {row.data(), row.data(), row.data()};
    kernels.dot_rows(rows, 3, x.data(), kColumns, dots.data());
    kernels.add_scaled_rows(rows, scales.data(), 3, kColumns, 0, kColumns, sums.data());
    kernels.widen(row.data(), kColumns, 0, kColumns, wide.data());
    digest.add(dots);
    digest.add(sums);
    digest.add(wide);
    const std::vector<std::byte> vectors = random_rows(codec, kRows, kColumns, random);
    add_prompt(level, codec, vectors, kRows, fractions(27 * kColumns, random), kColumns, digest);
    for (const InputForm form : {InputForm::int8, InputForm::int16, InputForm::token_int8}) {
      if (!takes_inputs(codec, form)) continue;
      const RowInputs inputs(x.data(), 1, kColumns, form, level);
      const CodedInputKernels& coded = coded_input_kernels(level, codec, form);
      coded.dot_rows(rows, 3, 3, inputs.codes(0), kColumns, dots.data());
      digest.add(dots);
      const std::vector<CodedInputs> tokens(5, inputs.codes(0));
      coded.dot_tokens(row.data(), row.size(), 1, tokens.data(), tokens.size(), kColumns, dots.data(), 2);
      digest.add(dots);
    }
  }
  add_planes(level, random, digest);
  std::vector<float> scores = fractions(kColumns, random);
  for (float& score : scores) score *= 3.0F;
  level_kernels(level).softmax(scores.data(), kColumns);
  digest.add(scores);
  for (const Activation::Kind kind : {Activation::silu, Activation::gelu_tanh}) {
    std::vector<float> values = fractions(kColumns, random);
    activate(kind, 0.5F, values.data(), values.size(), level);
    digest.add(values);
  }
  std::vector<float> tile = fractions(7 * kWidth, random);
  const std::vector<float> a = fractions(7 * kTerms, random), b = fractions(kTerms * kWidth, random);
  level_kernels(level).multiply_add({a.data(), kTerms, 1}, 7, {b.data(), kWidth}, kWidth, kTerms, tile.data(),
                                    kWidth);
  digest.add(tile);
  std::vector<float> block = fractions(5 * kWidth, random), largest(kWidth, -1.0F), sum(kWidth, 1.0F),
                     factor(kWidth);
  level_kernels(level).attention->online_softmax(block.data(), 5, kWidth, kWidth, largest.data(), sum.data(),
                                                 factor.data());
  for (const std::vector<float>& each : {block, largest, sum, factor}) digest.add(each);
  for (std::size_t kind = 0; kind < 3; ++kind) {
    std::vector<float> state = fractions(kTerms * kColumns, random);
    level_kernels(level).state_steps[kind](
        {kTerms, kColumns, a.data(), b.data(), x.data(), 0.5F, scales.data(), 0.25F}, state.data(),
        state.data(), sums.data());
    digest.add(state);
    digest.add(sums);
  }
  return digest.value();
}

}  // namespace flashllm
