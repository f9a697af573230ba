#include "offload/packed_weights.h"

#include <algorithm>
#include <atomic>

#include "io/error.h"
#include "kernels/matmul.h"
#include "kernels/scratch.h"
#include "offload/group_refine.h"

namespace flashllm {

namespace {

constexpr std::size_t kColumns = 256;  // of a panel handled at a time, in whole units
constexpr std::size_t kRefined = 4;    // what refine_groups takes multiples of
static_assert(kColumns % kGroup == 0, "pieces must be whole groups");
static_assert(kUnit % kRefined == 0, "what is left of a row must be whole for refine_groups");

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

// pack_columns with scales of least squares. What is left of a column's last four rows repeats its last one.
void pack_refined_columns(const float* values, std::size_t rows, std::size_t columns, int bits,
                          const GroupedRows& to, const GroupKernels& kernels) {
  const std::size_t n = (rows + kRefined - 1) / kRefined * kRefined;
  const Scratch<float> groups(kColumns * kGroup);
  for (std::size_t r = 0; r < n; ++r) {
    const float* row = values + std::min(r, rows - 1) * kColumns;
    for (std::size_t j = 0; j < columns; ++j) groups.get()[j * n + r] = row[j];
  }
  refine_groups(groups.get(), columns, n, bits, to.scales, to.minimums);
  kernels.encode_columns(values, kColumns, rows, columns, bits, to);
}

// pack_rows of one row with scales of least squares.
void pack_refined_row(const float* values, std::size_t columns, int bits, const GroupedRows& to,
                      const GroupKernels& kernels) {
  const std::size_t whole = columns / kGroup, rest = columns % kGroup;
  refine_groups(values, whole, kGroup, bits, to.scales, to.minimums);
  if (rest != 0)
    refine_groups(values + whole * kGroup, 1, rest, bits, to.scales + whole, to.minimums + whole);
  kernels.encode_rows(values, kColumns, 1, columns, bits, to);
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

GroupScales parse_group_scales(const std::string& name) {
  if (name == "range") return GroupScales::range;
  if (name == "squares") return GroupScales::squares;
  throw CoreError(ErrorKind::usage, "scales of packed weights are of the range or of squares, not " + name);
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

void pack_weights(const std::byte* weights, Dtype dtype, const PackedWeights& packed, GroupScales scales,
                  std::uint8_t* to, ThreadPool& pool, SimdLevel level) {
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
        const bool is_refined = scales == GroupScales::squares;
        if (packed.along == GroupsAlong::outputs) {
          const auto columns_to = panel_columns<GroupedRows>(packed, at, rows, 0, j);
          if (is_refined) {
            pack_refined_columns(values.get(), rows, in_units(width), packed.bits, columns_to, groups);
          } else {
            groups.pack_columns(values.get(), kColumns, rows, in_units(width), packed.bits, columns_to);
          }
          continue;
        }
        for (std::size_t i = 0; i < rows; ++i) {
          const float* row = values.get() + i * kColumns;
          const auto row_to = panel_columns<GroupedRows>(packed, at, rows, i, j);
          if (is_refined) {
            pack_refined_row(row, in_units(width), packed.bits, row_to, groups);
          } else {
            groups.pack_rows(row, kColumns, 1, in_units(width), packed.bits, row_to);
          }
        }
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
