// A level's loops and its table, of the Vec before it; included last by each kernels_<level>.cpp.

#include "kernels/levels/kernels_impl.h"
#include "kernels/levels/row_codecs_impl.h"
#include "kernels/levels/row_codecs_inputs_impl.h"

#if defined(__AVX2__) || defined(FLASHLLM_NEON)
#include "kernels/levels/code_products_impl.h"
#else
constexpr MultiplyCodes multiply_codes = nullptr;
constexpr MultiplyBytes multiply_bytes = nullptr;
constexpr AddCodes add_codes = nullptr;
template <std::size_t>
constexpr UnpackCodes unpack_of() {
  return nullptr;
}
#endif

#include "planes/scale_planes_impl.h"

// In the order of RowCodec.
template <typename Codecs>
struct CodecTables;
template <std::size_t... I>
struct CodecTables<std::index_sequence<I...>> {
  static constexpr CodecKernels kCodecs[] = {kernels_of<Coded<I>>()...};
  static constexpr CodedInputKernels kInt8[] = {input_kernels_of<std::int8_t, I>()...};
  static constexpr UnpackCodes kUnpack[] = {unpack_of<I>()...};
};
using Tables = CodecTables<std::make_index_sequence<kCodedCodecs>>;

extern const LevelKernels kLevel;
#if defined(__AVXVNNI__) || defined(FLASHLLM_NEON_DOT)  // the others are avx2's, or neon's
const LevelKernels kLevel = {nullptr,   nullptr, nullptr, nullptr,        nullptr,
                             nullptr,   nullptr, nullptr, multiply_codes, multiply_bytes,
                             add_codes, nullptr, nullptr, Tables::kInt8,  kInt16,
                             nullptr,   kPlanes, nullptr, nullptr};
#else
#include "kernels/group_codec_impl.h"
const LevelKernels kLevel = {kTables,         nullptr,     nullptr,         &kAttention,    sum_floats,
                             softmax,         sigmoids,    multiply_add,    multiply_codes, multiply_bytes,
                             add_codes,       kStateSteps, Tables::kCodecs, Tables::kInt8,  kInt16,
                             Tables::kUnpack, kPlanes,     kGroups,         &kInputs};
#endif
