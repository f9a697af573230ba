#include "planes/scale_planes.h"

#include "io/error.h"
#include "kernels/levels/levels.h"
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

}  // namespace flashllm
