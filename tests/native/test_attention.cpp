// Attention against fp64 at every level and dtype; a query's bits whatever is computed beside it.
#include <algorithm>

#include "attention_fixture.h"
#include "kernels/levels/levels.h"
#include "simd_levels.h"

namespace {

using namespace attention_tests;

struct Problem {
  std::size_t heads, kv_heads, head_dim, length;
  Dtype dtype;
  const Alibi* alibi = nullptr;

  AttentionShape shape() const {
    AttentionShape shape;
    shape.heads = heads;
    shape.kv_heads = kv_heads;
    shape.head_dim = head_dim;
    shape.dtype = dtype;
    shape.alibi = alibi;
    return shape;
  }
};

// The token at `position`: out [heads, head_dim], and the sums of its terms' magnitudes.
void check_token(const Problem& problem, const Cached& cached, std::size_t position, const float* q,
                 const float* out, bool is_rounded) {
  const std::size_t dim = problem.head_dim;
  std::vector<double> weights(position + 1);
  for (std::size_t h = 0; h < problem.heads; ++h) {
    const std::size_t offset = h / (problem.heads / problem.kv_heads) * dim;
    double total = 0.0;
    for (std::size_t p = 0; p <= position; ++p) {
      double score = 0.0;
      for (std::size_t j = 0; j < dim; ++j)
        score += static_cast<double>(q[h * dim + j]) * cached.keys[p * cached.row + offset + j];
      if (problem.alibi != nullptr)
        score -= static_cast<double>(problem.alibi->slopes[h]) * static_cast<double>(position - p);
      total += weights[p] = std::exp(score);
    }
    for (std::size_t j = 0; j < dim; ++j) {
      double sum = 0.0, magnitude = 0.0;
      for (std::size_t p = 0; p <= position; ++p) {
        const double term = weights[p] / total * cached.values[p * cached.row + offset + j];
        sum += term;
        magnitude += std::fabs(term);
      }
      // Weights rounded to bf16 are off by at most 2^-9 of themselves.
      CHECK(std::fabs(out[h * dim + j] - sum) <= (is_rounded ? 3e-3 : 1e-5) * magnitude);
    }
  }
}

std::vector<float> many(const Problem& problem, const Cached& cached, const std::vector<float>& q,
                        std::size_t first, std::size_t n, int threads, SimdLevel level) {
  ThreadPool pool(threads);
  const std::size_t row = problem.heads * problem.head_dim;
  // Exactly as much memory as may be touched: an address sanitizer sees a load beyond it.
  const std::vector<float> asked(q.begin() + static_cast<std::ptrdiff_t>(first * row),
                                 q.begin() + static_cast<std::ptrdiff_t>((first + n) * row));
  std::vector<float> out(n * row);
  attend_many(problem.shape(), asked.data(), n, first, cached.sequence.view(1), out.data(), pool, level);
  return out;
}

std::vector<float> each(const Problem& problem, const Cached& cached, const std::vector<float>& q,
                        int threads, SimdLevel level) {
  ThreadPool pool(threads);
  const std::size_t row = problem.heads * problem.head_dim;
  std::vector<float> out(q.size());
  std::vector<AttendingToken> tokens;
  for (std::size_t i = 0; i < problem.length; ++i)
    tokens.push_back({q.data() + i * row, cached.sequence.view(1), i + 1, out.data() + i * row});
  attend_each(problem.shape(), tokens.data(), tokens.size(), pool, level);
  return out;
}

// One token as attend_each must add it up, over keys and values that lie without gaps.
std::vector<float> step_by_step(const Problem& problem, const Cached& cached, std::size_t position,
                                const float* q, SimdLevel level) {
  const KernelTable& kernels = kernel_table(level, problem.dtype);
  const std::size_t dim = problem.head_dim, length = position + 1, row = dim * dtype_nbytes(problem.dtype);
  std::vector<float> out(problem.heads * dim), scores(length);
  std::vector<std::byte> keys(length * row), values(length * row);
  for (std::size_t h = 0; h < problem.heads; ++h) {
    const std::size_t offset = h / (problem.heads / problem.kv_heads) * dim;
    std::vector<const void*> rows;
    for (std::size_t p = 0; p < length; ++p) {
      kernels.from_f32(cached.keys.data() + p * cached.row + offset, dim, keys.data() + p * row);
      kernels.from_f32(cached.values.data() + p * cached.row + offset, dim, values.data() + p * row);
      rows.push_back(values.data() + p * row);
    }
    kernels.dot_matrix(keys.data(), row, length, q + h * dim, dim, scores.data());
    if (problem.alibi != nullptr)
      for (std::size_t p = 0; p < length; ++p) scores[p] += problem.alibi->bias(h, p, position);
    level_kernels(level).softmax(scores.data(), length);
    for (std::size_t p = 0; p < length; p += 64)
      kernels.add_scaled_rows(rows.data() + p, scores.data() + p, std::min<std::size_t>(64, length - p), 0,
                              dim, out.data() + h * dim);
  }
  return out;
}

void check_problem(const Problem& problem, SimdLevel level, std::size_t step) {
  Cached cached(problem.kv_heads, problem.head_dim, problem.length, problem.dtype);
  const std::size_t row = problem.heads * problem.head_dim, n = problem.length;
  const float scale = 1.0F / std::sqrt(static_cast<float>(problem.head_dim));
  const std::vector<float> q = rounded(random_floats(n * row, 3, scale), problem.dtype);
  const bool in_pairs = problem.dtype == Dtype::bf16 && level_kernels(level).pairs != nullptr;

  const std::vector<float> all = many(problem, cached, q, 0, n, 1, level);
  const std::vector<float> single = each(problem, cached, q, 1, level);
  for (const std::size_t i : {std::size_t{0}, n / 2, n - 1}) {
    check_token(problem, cached, i, q.data() + i * row, all.data() + i * row, in_pairs);
    check_token(problem, cached, i, q.data() + i * row, single.data() + i * row, false);
    CHECK(same_bits(step_by_step(problem, cached, i, q.data() + i * row, level).data(),
                    single.data() + i * row, row));
  }
  CHECK(same_bits(many(problem, cached, q, 0, n, 3, level).data(), all.data(), n * row));
  CHECK(same_bits(each(problem, cached, q, 3, level).data(), single.data(), n * row));
  // A query's bits do not depend on its company: alone, or in tiles that begin elsewhere.
  for (std::size_t i = 0; i < n; i += step)
    CHECK(same_bits(many(problem, cached, q, i, 1, 1, level).data(), all.data() + i * row, row));
  for (const std::size_t first : {std::size_t{1}, n / 3, n - n / 4})
    CHECK(same_bits(many(problem, cached, q, first, std::min<std::size_t>(n - first, 37), 2, level).data(),
                    all.data() + first * row, std::min<std::size_t>(n - first, 37) * row));
  // Nor on what comes later, even if that is not a number.
  for (const std::size_t first : {n - 1, n / 2}) {
    for (std::size_t i = first; i < n; ++i)
      std::fill_n(cached.values.data() + i * cached.row, cached.row, std::nanf(""));
    for (std::size_t i = first; i < n; ++i) cached.append(i);
    CHECK(same_bits(many(problem, cached, q, 0, n, 1, level).data(), all.data(), first * row));
    CHECK(std::isnan(many(problem, cached, q, 0, n, 1, level)[first * row]));
  }
}

// A query sees the pages before its own as they were packed, whatever comes with it in a pass.
void check_packed(Dtype dtype, int bits, SimdLevel level) {
  const Problem problem{4, 2, 20, 200, dtype};
  const std::size_t dim = problem.head_dim, row = problem.heads * dim;
  Cached seen(problem.kv_heads, dim, problem.length, dtype);
  SequenceState sequence(std::make_shared<StatePool>(
      StateShape({{problem.kv_heads, dim, 0}}, problem.length, problem.length, dtype, bits)));
  sequence.reserve(problem.length);
  for (std::size_t i = 0; i < problem.length; ++i)
    sequence.append(0, i, seen.keys.data() + i * seen.row, seen.values.data() + i * seen.row);
  for (std::size_t page = 0; page < problem.length / kPageTokens; ++page) CHECK(sequence.seal(0, page));
  const KvView view = sequence.view(0);
  const std::vector<float> q = rounded(random_floats(problem.length * row, 3), dtype);
  const auto many = [&](std::size_t first, std::size_t n, int threads) {
    ThreadPool pool(threads);
    std::vector<float> out(n * row);
    attend_many(problem.shape(), q.data() + first * row, n, first, view, out.data(), pool, level);
    return out;
  };
  const std::vector<float> all = many(0, problem.length, 1);
  CHECK(many(0, problem.length, 3) == all);
  ThreadPool pool(2);
  std::vector<float> unpacked(view.format->unpacked_row()), few(row);
  for (const std::size_t i : {10, 63, 64, 100, 150, 192, 199}) {
    // Pages come one after the other: what later queries see packed, earlier ones have seen plain.
    for (std::size_t p = 0; p < i / kPageTokens * kPageTokens; ++p)
      for (std::size_t h = 0; h < problem.kv_heads; ++h)
        for (std::vector<float>* side : {&seen.keys, &seen.values}) {
          view.format->unpack(side == &seen.keys ? PageFormat::Side::keys : PageFormat::Side::values,
                              view.packed(p / kPageTokens), h, p % kPageTokens, 1, unpacked.data(),
                              level_kernels(level).groups);
          std::copy_n(unpacked.data(), dim, side->data() + p * seen.row + h * dim);
        }
    const AttendingToken token{q.data() + i * row, view, i + 1, few.data()};
    attend_each(problem.shape(), &token, 1, pool, level);
    check_token(problem, seen, i, q.data() + i * row, few.data(), false);
    check_token(problem, seen, i, q.data() + i * row, all.data() + i * row, false);
    CHECK(same_bits(many(i, 1, 1).data(), all.data() + i * row, row));
    const std::size_t n = std::min<std::size_t>(37, problem.length - i);
    CHECK(same_bits(many(i, n, 1).data(), all.data() + i * row, n * row));
  }
}

}  // namespace

void test_attention(int scale) {
  const std::size_t step = scale > 1 ? 7 : 31;  // between the queries computed alone
  const Alibi alibi{{0.5F, 0.25F, 0.0625F, 0.7F}};
  for (const SimdLevel level : simd_levels()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const int bits : {4, 8}) check_packed(dtype, bits, level);
      check_problem({4, 2, 16, 1, dtype}, level, step);
      check_problem({4, 4, 16, 64, dtype}, level, step);
      check_problem({6, 2, 80, 65, dtype}, level, step);
      check_problem({4, 2, 16, 70, dtype, &alibi}, level, step);  // distances added to scores
      check_problem({3, 1, 20, 70, dtype}, level, step);          // rows that are not whole vectors
      check_problem({2, 1, 7, 67, dtype}, level, step);           // nor pairs
      if (scale == 1) continue;
      check_problem({2, 2, 64, 131, dtype}, level, step);
      check_problem({8, 2, 128, 150, dtype}, level, step);
    }
  }
}
