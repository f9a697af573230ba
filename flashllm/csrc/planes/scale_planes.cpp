#include "planes/scale_planes.h"

#include "io/error.h"
#include "kernels/levels.h"

namespace flashllm {

const PlaneKernels& plane_kernels(SimdLevel level, RowCodec codec, const ScalePlane& plane) {
  if (!has_plane(codec)) throw CoreError(ErrorKind::usage, "these weights have scales of their own");
  if ((codec == RowCodec::codes_fp4) != (plane.powers != nullptr))
    throw CoreError(ErrorKind::usage, "these scales are of other codes");
  const std::size_t index = static_cast<std::size_t>(codec) - kFirstPlane;
  const std::size_t form = (plane.has_minimums() ? 1 : 0) + (plane.factors != nullptr ? 2 : 0);
  return level_kernels(level).planes[index][form];
}

void sum_scattered(const PlaneColumns& columns, const float* values, float* y, ThreadPool& pool,
                   SimdLevel level) {
  const PlaneKernels& kernels = plane_kernels(level, columns.codec, *columns.plane);
  constexpr std::size_t kGrain = 64;  // weights
  const auto threads = static_cast<std::size_t>(pool.threads());
  const std::size_t share = (columns.k + threads - 1) / threads;
  pool.parallel_for(columns.k, (share + kGrain - 1) / kGrain * kGrain,
                    [&](std::size_t begin, std::size_t end) {
                      kernels.add_scaled_rows(columns.vectors, columns.ids, values, columns.count,
                                              *columns.plane, columns.k, begin, end, y);
                    });
}

}  // namespace flashllm
