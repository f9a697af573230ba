#include "model/recurrence.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace flashllm {

namespace {

constexpr std::size_t kChannels = 128;  // that a thread takes

// Channels [begin, end) of all, which lie in a matrix of `width` columns whose first is channel `at`, with
// these taps: of `n` tokens from `first` on. `before`, `now`: the last inputs of the tokens before them, and
// theirs.
struct Columns {
  std::size_t begin, end, at, width;
  const float* taps;
};
void convolve_columns(const Convolution& spec, const Columns& columns, std::size_t count, std::size_t first,
                      std::size_t n, const float* inputs, const float* before, float* now, float* out,
                      SimdLevel level) {
  const auto [begin, end, at, width, all_taps] = columns;
  const std::size_t kernel = spec.kernel, held = kernel - 1, channels = spec.channels();
  inputs += count * at + first * width - at;
  out += count * at + first * width - at;
  const auto input = [&, width = width](std::size_t t) {  // of the token t - held, from the first one on
    return t < held ? before + t * channels : inputs + (t - held) * width;
  };
  float taps[kChannels];
  for (std::size_t t = 0; t < n; ++t) {
    if (spec.bias == nullptr)
      std::fill(out + t * width + begin, out + t * width + end, 0.0F);
    else
      std::copy(spec.bias + begin, spec.bias + end, out + t * width + begin);
  }
  for (std::size_t j = 0; j < kernel; ++j) {
    for (std::size_t c = begin; c < end; ++c) taps[c - begin] = all_taps[(c - at) * kernel + j];
    for (std::size_t t = 0; t < n; ++t) {
      const float* from = input(t + j) + begin;
      float* to = out + t * width + begin;
      for (std::size_t c = 0; c < end - begin; ++c) to[c] += taps[c] * from[c];
    }
  }
  for (std::size_t t = 0; spec.has_silu && t < n; ++t)
    activate(Activation::silu, 0.0F, out + t * width + begin, end - begin, level);
  for (std::size_t t = 0; t < held; ++t)
    std::copy_n(input(n + t) + begin, end - begin, now + t * channels + begin);
}

}  // namespace

void convolve(const Convolution& spec, const Part& part, std::size_t offset, const float* inputs, float* out,
              ThreadPool& pool, SimdLevel level) {
  const std::size_t channels = spec.channels();
  const auto run = [&](std::size_t first, std::size_t n, const float* before, float* now) {
    pool.parallel_for(channels, kChannels, [&](std::size_t begin, std::size_t end) {
      std::size_t at = 0;
      for (std::size_t i = 0; i < spec.widths.size(); ++i) {
        const std::size_t width = spec.widths[i];
        for (std::size_t from = std::max(begin, at); from < std::min(end, at + width); from += kChannels)
          convolve_columns(spec,
                           {from, std::min({end, at + width, from + kChannels}), at, width, spec.taps[i]},
                           part.count, first, n, inputs, before, now, out, level);
        at += width;
      }
    });
  };
  for_each_state(part, offset, (spec.kernel - 1) * channels, run);
}

}  // namespace flashllm
