#include "planes/scale_planes.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "io/error.h"
#include "kernels/levels/levels.h"
#include "kernels/rows.h"

namespace flashllm {

const PlaneKernels& plane_kernels(SimdLevel level, RowCodec codec, const ScalePlane& plane) {
  if (!has_plane(codec)) throw CoreError(ErrorKind::usage, "these weights have scales of their own");
  if ((codec == RowCodec::codes_fp4) != plane.of_fp4())
    throw CoreError(ErrorKind::usage, "these scales are of other codes");
  const std::size_t index = static_cast<std::size_t>(codec) - kFirstPlane;
  const std::size_t form =
      (plane.has_minimums() ? 1 : 0) + (plane.factors != nullptr || plane.quarters != nullptr ? 2 : 0);
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

namespace {

constexpr std::size_t kWindow = 32;     // neurons whose values share a scale
constexpr std::size_t kAlone = 8;       // tokens, up to which pairing the codes once costs more than it saves
constexpr std::size_t kTokenGrain = 8;  // tokens a thread takes at a time
constexpr std::size_t kColumnGrain = 4 * kCodeColumns;

std::size_t in_windows(std::size_t terms) { return (terms + kWindow - 1) / kWindow * kWindow; }

}  // namespace

void TokenCodes::begin(std::size_t tokens, std::size_t terms, SimdLevel level) {
  kernels_ = &input_kernels(level);
  terms_ = in_windows(terms);
  codes_.resize(tokens * terms_);
  scales_.resize(tokens * terms_ / kWindow);
  sums_.resize(scales_.size());
}

void TokenCodes::set(std::size_t token, std::size_t id, std::size_t count, const float* values,
                     std::size_t step) {
  const std::size_t lead = id % kWindow;
  float window[kWindow];
  for (std::size_t slot = 0; slot < lead + count; slot += kWindow) {
    for (std::size_t i = 0; i < kWindow; ++i) {
      const std::size_t at = slot + i - lead;  // beyond `count` before the first one, too
      window[i] = at < count ? values[at * step] : 0.0F;
    }
    std::int16_t* to = codes_.data() + token * terms_ + slot;
    const std::size_t w = (token * terms_ + slot) / kWindow;
    scales_[w] = kernels_->to_int16(window, kWindow, to);
    sums_[w] = scales_[w] * static_cast<float>(std::accumulate(to, to + kWindow, 0));
  }
}

// Calls use(add), where add(begin, end) adds to these outputs: the values become codes once.
template <typename Use>
void PlaneRows::with_codes(TileRows values, std::size_t tokens, float* y, std::size_t y_stride,
                           const Use& use) const {
  TokenCodes all;
  all.begin(tokens, first_ % kWindow + columns_.rows, level_);
  for (std::size_t m = 0; m < tokens; ++m)
    all.set(m, first_, columns_.rows, values.data + m * values.row, values.step);
  CodeTokens each[kAlone];
  for (std::size_t m = 0; m < tokens; ++m) each[m] = all.of(m);
  use([&](std::size_t begin, std::size_t end) {
    kernels_.add_run({columns_.data, columns_.stride, first_, columns_.rows}, each, tokens, plane_,
                     columns_.columns, begin, end, y, y_stride);
  });
}

void PlaneRows::add_codes(TileRows values, std::size_t tokens, std::size_t begin, std::size_t end, float* y,
                          std::size_t y_stride) const {
  with_codes(values, tokens, y, y_stride, [&](const auto& add) { add(begin, end); });
}

void PlaneRows::add_codes(TileRows values, std::size_t tokens, float* y, std::size_t y_stride,
                          ThreadPool& pool) const {
  if (tokens <= kAlone)
    return with_codes(values, tokens, y, y_stride, [&](const auto& add) {
      pool.parallel_for(columns_.columns, column_share(columns_.columns, pool), add);
    });
  TokenCodes all;
  // kCodeTerms slots of all tokens, then the next ones': use(which these are, their first neuron, how many)
  const auto each_block = [&](const auto& use) {
    for (std::size_t block = 0, done = 0, some = 0; done < columns_.rows; ++block, done += some) {
      some = std::min(columns_.rows - done, kCodeTerms - (first_ + done) % kWindow);
      use(block, done, some);
    }
  };
  const AddCodes add = level_kernels(level_).add_codes;
  all.begin((first_ % kWindow + columns_.rows + kCodeTerms - 1) / kCodeTerms * tokens, kCodeTerms, level_);
  pool.parallel_for(tokens, kTokenGrain, [&](std::size_t begin, std::size_t end) {
    each_block([&](std::size_t block, std::size_t done, std::size_t some) {
      for (std::size_t m = begin; m < end; ++m)
        all.set(block * tokens + m, first_ + done, some, values.data + m * values.row + done * values.step,
                values.step);
    });
  });
  pool.parallel_for(columns_.columns, kColumnGrain, [&](std::size_t begin, std::size_t end) {
    CodeWeights weights;
    for (std::size_t j = begin; j < end; j += kCodeColumns)
      each_block([&](std::size_t block, std::size_t done, std::size_t some) {
        kernels_.pair(columns_.data + done * columns_.stride, columns_.stride, first_ + done, some, plane_,
                      columns_.columns, j, weights);
        add(all.of(block * tokens), tokens, weights, in_windows((first_ + done) % kWindow + some), y + j,
            y_stride);
      });
  });
}

}  // namespace flashllm
