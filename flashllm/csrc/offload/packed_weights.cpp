#include "offload/packed_weights.h"

#include <algorithm>
#include <atomic>

#include "io/error.h"
#include "kernels/matmul.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kColumns = 256;  // of a panel handled at a time, in whole units
static_assert(kColumns % kGroup == 0, "pieces must be whole groups");

// Row `row` of the panel of `panel_rows` rows at `data`, from column `first` on. Where groups lie along the
// outputs, the rows that follow in the panel have the same scales.
template <typename Rows, typename Byte>
Rows panel_columns(const PackedWeights& packed, Byte* data, std::size_t panel_rows, std::size_t row,
                   std::size_t first) {
  using Half = std::conditional_t<std::is_const_v<Byte>, const std::uint16_t, std::uint16_t>;
  auto* scales = reinterpret_cast<Half*>(data);
  auto* minimums = scales + packed.panel_scales(panel_rows);
  auto* codes = reinterpret_cast<Byte*>(minimums + packed.panel_scales(panel_rows));
  codes += row * packed.row_nbytes() + codes_nbytes(first, packed.bits);
  const std::size_t group =
      packed.along == GroupsAlong::outputs ? first : row * groups_of(packed.columns) + first / kGroup;
  return {scales + group, minimums + group, codes, packed.row_nbytes()};
}

class PackedRows : public WideRows {
 public:
  PackedRows(const PackedWeights& packed, SimdLevel level)
      : packed_(packed), kernels_(group_kernels(level)) {}
  void widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width, float* to,
             std::size_t stride) const override {
    packed_.widen(begin, count, first, width, to, stride, kernels_);
  }

 private:
  static_assert(kColumnPad % kUnit == 0, "columns must begin at whole units");
  const PackedWeights& packed_;
  const GroupKernels& kernels_;
};

}  // namespace

GroupsAlong parse_groups_along(const std::string& name) {
  if (name == "outputs") return GroupsAlong::outputs;
  if (name == "inputs") return GroupsAlong::inputs;
  throw CoreError(ErrorKind::usage, "groups of packed weights lie along outputs or inputs, not " + name);
}

void PackedWeights::widen(std::size_t begin, std::size_t count, std::size_t first, std::size_t width,
                          float* to, std::size_t stride, const GroupKernels& kernels) const {
  for (std::size_t r = begin; r < begin + count;) {
    const std::size_t panel = r / kGroup, panel_rows = std::min(kGroup, rows - panel * kGroup);
    const std::uint8_t* at = data + panel * panel_nbytes();
    const std::size_t together = std::min(begin + count, (panel + 1) * kGroup) - r;
    if (along == GroupsAlong::outputs) {
      const auto from = panel_columns<ConstGroupedRows>(*this, at, panel_rows, r % kGroup, first);
      kernels.unpack_columns(from, together, in_units(width), bits, to, stride);
    } else {
      for (std::size_t i = 0; i < together; ++i) {
        const auto from = panel_columns<ConstGroupedRows>(*this, at, panel_rows, r % kGroup + i, first);
        kernels.unpack_rows(from, 1, in_units(width), bits, to + i * stride, stride);
      }
    }
    to += together * stride;
    r += together;
  }
}

void pack_weights(const std::byte* weights, Dtype dtype, const PackedWeights& packed, std::uint8_t* to,
                  ThreadPool& pool, SimdLevel level) {
  const GroupKernels& groups = group_kernels(level);
  const KernelTable& kernels = kernel_table(level, dtype);
  const AttentionKernels& attention = attention_kernels(level);
  const std::size_t item = dtype_nbytes(dtype), columns = packed.columns;
  std::atomic<bool> is_finite{true};
  pool.parallel_for(groups_of(packed.rows), 1, [&](std::size_t begin, std::size_t end) {
    const Scratch<float> values(kGroup * kColumns);
    for (std::size_t panel = begin; panel < end; ++panel) {
      const std::size_t r = panel * kGroup, rows = std::min(kGroup, packed.rows - r);
      for (std::size_t j = 0; j < columns; j += kColumns) {
        const std::size_t width = std::min(kColumns, columns - j);
        if (!widen_rows(weights + (r * columns + j) * item, columns * item, rows, width, kernels, attention,
                        values.get(), kColumns)) {
          is_finite = false;
          return;
        }
        std::uint8_t* at = to + panel * packed.panel_nbytes();
        if (packed.along == GroupsAlong::outputs) {
          groups.pack_columns(values.get(), kColumns, rows, in_units(width), packed.bits,
                              panel_columns<GroupedRows>(packed, at, rows, 0, j));
          continue;
        }
        for (std::size_t i = 0; i < rows; ++i)
          groups.pack_rows(values.get() + i * kColumns, kColumns, 1, in_units(width), packed.bits,
                           panel_columns<GroupedRows>(packed, at, rows, i, j));
      }
    }
  });
  if (!is_finite) throw CoreError(ErrorKind::usage, "weights that are not finite cannot be packed");
}

void unpack_weights(const PackedWeights& packed, float* out, ThreadPool& pool, SimdLevel level) {
  const GroupKernels& kernels = group_kernels(level);
  pool.parallel_for(packed.rows, kGroup, [&](std::size_t begin, std::size_t end) {
    const Scratch<float> values(kGroup * kColumns);
    for (std::size_t r = begin; r < end; r += kGroup) {
      const std::size_t rows = std::min(kGroup, end - r);
      for (std::size_t j = 0; j < packed.columns; j += kColumns) {
        const std::size_t width = std::min(kColumns, packed.columns - j);
        packed.widen(r, rows, j, width, values.get(), kColumns, kernels);
        for (std::size_t i = 0; i < rows; ++i)
          std::copy_n(values.get() + i * kColumns, width, out + (r + i) * packed.columns + j);
      }
    }
  });
}

void packed_linear_many(const PackedWeights& packed, const float* bias, const std::byte* x,
                        std::size_t tokens, Dtype dtype, std::byte* out, ThreadPool& pool, SimdLevel level) {
  level = std::min(level, SimdLevel::avx512);  // the highest without pairs: they would round the weights
  const PackedTokens inputs(x, tokens, packed.columns, dtype, pool, level);
  linear_many(PackedRows(packed, level), packed.rows, bias, inputs, dtype, out, pool, level);
}

}  // namespace flashllm
