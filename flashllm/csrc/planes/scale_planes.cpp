#include "planes/scale_planes.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "io/error.h"
#include "kernels/levels/levels.h"
#include "kernels/row_inputs.h"
#include "kernels/rows.h"

namespace flashllm {

const PlaneKernels& plane_kernels(SimdLevel level, RowCodec codec, const ScalePlane& plane) {
  if (!has_plane(codec)) throw CoreError(ErrorKind::usage, "these weights have scales of their own");
  if ((codec == RowCodec::codes_fp4) != (plane.powers != nullptr))
    throw CoreError(ErrorKind::usage, "these scales are of other codes");
  const std::size_t index = static_cast<std::size_t>(codec) - kFirstPlane;
  const std::size_t form = (plane.has_minimums() ? 1 : 0) + (plane.factors != nullptr ? 2 : 0);
  const PlaneKernels& found = level_kernels(level).planes[index][form];
  if (found.widen == nullptr) throw CoreError(ErrorKind::usage, "these scales are of other codes");
  return found;
}

void sum_block(const PlaneColumns& columns, const float* values, std::size_t begin, std::size_t end, float* y,
               SimdLevel level) {
  plane_kernels(level, columns.codec, *columns.plane)
      .add_scaled_rows(columns.vectors, columns.ids, values, columns.count, *columns.plane, columns.k, begin,
                       end, y);
}

void sum_scattered(const PlaneColumns& columns, const float* values, float* y, ThreadPool& pool,
                   SimdLevel level) {
  plane_kernels(level, columns.codec, *columns.plane);  // throws here, not in a thread
  pool.parallel_for(columns.k, column_share(columns.k, pool), [&](std::size_t begin, std::size_t end) {
    sum_block(columns, values, begin, end, y, level);
  });
}

namespace {

constexpr std::size_t kWindow = 32;     // neurons whose values share a scale
constexpr std::size_t kTokenGrain = 8;  // tokens a thread takes at a time
constexpr std::size_t kColumnGrain = 4 * kCodeColumns;

// Values [count, padded] of neurons as codes, `lead` zeros before them.
struct TokenCodes {
  std::vector<std::int16_t> codes;
  std::vector<float> scales, sums;

  explicit TokenCodes(std::size_t tokens)
      : codes(tokens * kCodeTerms), scales(tokens * CodeWeights::kWindows), sums(scales.size()) {}
  void set(const float* values, std::size_t padded, std::size_t lead, std::size_t count, std::size_t token) {
    float window[kWindow];
    for (std::size_t slot = 0; slot < lead + count; slot += kWindow) {
      for (std::size_t i = 0; i < kWindow; ++i) {
        const std::size_t at = slot + i - lead;  // beyond `count` before the first one, too
        window[i] = at < count ? values[at * padded + token] : 0.0F;
      }
      std::int16_t* to = codes.data() + token * kCodeTerms + slot;
      const std::size_t w = token * CodeWeights::kWindows + slot / kWindow;
      scales[w] = to_codes(window, kWindow, to);
      sums[w] = scales[w] * static_cast<float>(std::accumulate(to, to + kWindow, 0));
    }
  }
};

}  // namespace

void PlaneRows::add_codes(std::size_t count, const float* values, std::size_t padded, std::size_t tokens,
                          float* y, std::size_t y_stride, ThreadPool& pool) const {
  const AddCodes add = add_codes_kernel(level_);
  TokenCodes all(tokens);
  for (std::size_t done = 0, some = 0; done < count; done += some) {
    const std::size_t lead = (first_ + done) % kWindow;
    some = std::min(count - done, kCodeTerms - lead);
    const std::size_t terms = (lead + some + kWindow - 1) / kWindow * kWindow;
    pool.parallel_for(tokens, kTokenGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t m = begin; m < end; ++m) all.set(values + done * padded, padded, lead, some, m);
    });
    pool.parallel_for(k_, kColumnGrain, [&](std::size_t begin, std::size_t end) {
      CodeWeights weights;
      for (std::size_t j = begin; j < end; j += kCodeColumns) {
        kernels_.pair(data_ + done * stride_, stride_, first_ + done, some, plane_, k_, j, weights);
        add({all.codes.data(), all.scales.data(), all.sums.data()}, tokens, weights, terms, y + j, y_stride);
      }
    });
  }
}

}  // namespace flashllm
