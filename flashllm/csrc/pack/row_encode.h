// Weights to vectors of a codec in groups (kernels/row_codecs.h), with scales that are fitted to them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"
#include "kernels/row_codecs.h"

namespace flashllm {

enum class Encoded { whole, not_finite, too_large };

// weights: [rows, columns] of the given dtype, consecutive rows; to: [rows, vector_nbytes(codec, columns)].
// The last group of a vector is filled up with zeros. Undefined where it is not `whole`: a weight is not
// finite, or too large for an fp16 scale.
Encoded encode_rows(RowCodec codec, const std::byte* weights, Dtype dtype, std::size_t rows,
                    std::size_t columns, std::uint8_t* to, ThreadPool& pool, SimdLevel level);

}  // namespace flashllm
