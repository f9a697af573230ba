// Blocks of GGUF files whose weights are points of a codebook, eight or four weights to a point
// (ggml-common.h and ggml-quants.c of ggml: block_iq1_s to block_iq3_s). They become codes of the levels that
// points have (kIq3S to kIq1 of kernels/row_codecs.h), and scales: the same weights, without loss.
#pragma once

#include <cstdint>

#include "planes/blocks.h"

namespace flashllm {

// As BlockKind::decode.
void iq3_s(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq3_xxs(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq2_xxs(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq2_xs(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq2_s(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq1_s(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);
void iq1_m(const std::uint8_t* block, BlockCodes& codes, BlockScales& scales);

}  // namespace flashllm
