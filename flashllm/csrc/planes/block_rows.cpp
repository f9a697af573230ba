#include "planes/block_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "io/error.h"
#include "planes/blocks.h"

namespace flashllm {

namespace {

// Units of codes of down for kBlockWeights neurons: byte by byte, each of all of them.
constexpr std::size_t kMostBytes = kCodeUnit;  // of a unit
using Rows = std::uint8_t[kBlockWeights];

// Bits of codes `first`, `first` + 8 and so on, `mask` from `from` on, into every second place of a byte.
template <unsigned from, unsigned mask>
void gather_bits(const BlockCodes* codes, std::size_t first, Rows& to) {
  constexpr std::uint64_t bits = in_each(mask << from);
  for (std::size_t n = 0; n < kBlockWeights; n += 8) {
    std::uint64_t all = 0;
    for (unsigned i = 0; i < 4; ++i) {
      const std::uint64_t word = eight(codes[first + 8 * i] + n) & bits;
      all |= 2 * i < from ? word >> (from - 2 * i) : word << (2 * i - from);
    }
    std::memcpy(to + n, &all, 8);
  }
}

// Single bits, as pack_unit has them.
template <unsigned from>
void gather_single(const BlockCodes* codes, std::size_t first, Rows& to) {
  Rows upper;
  gather_bits<from, 1>(codes, first, to);
  gather_bits<from, 1>(codes, first + 4, upper);
  for (std::size_t n = 0; n < kBlockWeights; ++n) to[n] = static_cast<std::uint8_t>(to[n] | upper[n] << 1);
}

// As pack_unit, of kCodeUnit outputs' codes. `nibbles`: no code has more bits than four.
template <std::size_t bits>
void pack_across(const BlockCodes* codes, bool nibbles, Rows* to) {
  constexpr std::size_t half = kCodeUnit / 2;
  if constexpr (bits == 8) {
    std::memcpy(to, codes, sizeof(BlockCodes) * kCodeUnit);
  } else if constexpr (bits < 4) {
    for (std::size_t k = 0; k < 8; ++k) gather_bits<0, 3>(codes, k, to[k]);
    for (std::size_t k = 0; bits == 3 && k < 4; ++k) gather_single<2>(codes, k, to[8 + k]);
  } else {
    for (std::size_t j = 0; j < half; ++j)
      for (std::size_t n = 0; n < kBlockWeights; ++n)
        to[j][n] = static_cast<std::uint8_t>((codes[j][n] & 15) | codes[j + half][n] << 4);
    if (bits == 4) return;
    if (nibbles) {
      std::memset(to + half, 0, sizeof(Rows) * (bits == 5 ? 4 : 8));
    } else if (bits == 6) {
      for (std::size_t k = 0; k < 8; ++k) gather_bits<4, 3>(codes, k, to[half + k]);
    } else {
      for (std::size_t k = 0; k < 4; ++k) gather_single<4>(codes, k, to[half + k]);
    }
  }
}

// `count` rows of `length` items, a power of two, across: each perfect shuffle takes a bit of a place's
// number from its top to its end.
template <std::size_t count, std::size_t length, typename Item>
void turn(Item* rows) {
  Item other[count * length];
  const auto shuffle = [](const Item* __restrict from, Item* __restrict to) {
    constexpr std::size_t half = count * length / 2;
    for (std::size_t i = 0; i < half; ++i) {
      to[2 * i] = from[i];
      to[2 * i + 1] = from[half + i];
    }
  };
  Item *from = rows, *to = other;
  for (std::size_t left = count; left > 1; left /= 2, std::swap(from, to)) shuffle(from, to);
  if (from != rows) std::memcpy(rows, from, sizeof other);
}

}  // namespace

BlockRows::BlockRows(const std::string& kind, std::size_t length, const RowFormat& format,
                     RowMatrixName matrix)
    : kind_(block_kind(kind)),
      length_(length),
      outputs_(format.d_model),
      format_(format),
      is_down_(matrix == RowMatrixName::down) {
  require(kind_.codec != RowCodec::nvfp4, "a tensor of " + kind + " is not read where it lies");
  format.check();
  bool fits = length % kind_.weights == 0 && length != 0;
  row_nbytes_ = length / kind_.weights * kind_.nbytes;
  const auto gate = static_cast<std::uint32_t>(format.gate);
  const std::uint32_t driven = matrix == RowMatrixName::up ? format.up : gate,
                      offset = is_down_ ? format.down : driven;
  at_ = format.start(offset);
  step_ = format.step(offset);
  if (!is_down_ && kind_.is_apart()) {
    row_nbytes_ *= 2;
    gate_at_ = format.start(gate);
    up_at_ = format.start(format.up);
    fits = fits && format.codec == kind_.codec && length == format.d_model && format.gated() &&
           (matrix == RowMatrixName::gate) == kind_.is_plain();
  } else if (is_down_ && kind_.is_plain()) {
    fits = fits && kind_.codec == format.down_codec;
  } else if (is_down_) {
    fits = fits && has_plane(format.down_codec);
    if (fits) {
      const CodecShape& shape = shape_of(format.down_codec);
      bits_ = shape.bits;
      fits = bits_ >= kind_.bits && (kind_.of_table() ? format.down_codec == kind_.table : !shape.of_table());
      if (!kind_.is_unsigned()) shift_ = static_cast<std::uint8_t>(zero_of(bits_) - zero_of(kind_.bits));
    }
  } else {
    bits_ = kind_.bits;
    fits = fits && kind_.codec == format.codec && length == format.d_model &&
           (matrix == RowMatrixName::up || format.gated());
  }
  if (!fits)
    throw CoreError(ErrorKind::usage, "rows of " + std::to_string(length) + " weights of " + kind +
                                          " do not fit the neurons' rows");
}

namespace {

// `count` stored rows of `length` numbers as columns, of which whole cache lines are written together.
template <typename Item>
void put_across(const std::uint8_t* stored, std::size_t count, std::size_t length, std::uint8_t* to,
                std::size_t stride) {
  constexpr std::size_t kSide = 16, kTogether = 128;  // neurons; outputs
  Item tile[kTogether * kSide] = {};
  for (std::size_t first = 0; first < length; first += kSide)
    for (std::size_t r = 0; r < count; r += kTogether) {
      const std::size_t neurons = std::min(kSide, length - first), outputs = std::min(kTogether, count - r);
      const std::uint8_t* from = stored + (r * length + first) * sizeof(Item);
      for (std::size_t j = 0; j < outputs; ++j)
        std::memcpy(tile + j * kSide, from + j * length * sizeof(Item), neurons * sizeof(Item));
      turn<kTogether, kSide>(tile);
      for (std::size_t n = 0; n < neurons; ++n)
        std::memcpy(to + (first + n) * stride + r * sizeof(Item), tile + n * kTogether,
                    outputs * sizeof(Item));
    }
}

}  // namespace

void BlockRows::unpack(const std::byte* stored, std::uint64_t first, std::uint64_t nbytes,
                       std::byte* rows) const {
  const auto* from = reinterpret_cast<const std::uint8_t*>(stored);
  auto* to = reinterpret_cast<std::uint8_t*>(rows);
  const std::size_t row = first / row_nbytes_, count = nbytes / row_nbytes_;
  if (!is_down_ && kind_.is_apart()) return unpack_pairs(from, row, count, to);
  to += at_;
  if (kind_.is_plain()) {
    if (!is_down_) {
      for (std::size_t r = 0; r < count; ++r)
        std::memcpy(to + (row + r) * step_, from + r * row_nbytes_, row_nbytes_);
      return;
    }
    to += row * kind_.nbytes;
    if (kind_.nbytes == 2) return put_across<std::uint16_t>(from, count, length_, to, step_);
    return put_across<std::uint32_t>(from, count, length_, to, step_);
  }
  if (is_down_) {
    to += row / kCodeUnit * 4 * bits_;
    if (bits_ == 2) return unpack_outputs<2>(from, count, to);
    if (bits_ == 3) return unpack_outputs<3>(from, count, to);
    if (bits_ == 4) return unpack_outputs<4>(from, count, to);
    if (bits_ == 5) return unpack_outputs<5>(from, count, to);
    if (bits_ == 6) return unpack_outputs<6>(from, count, to);
    return unpack_outputs<8>(from, count, to);
  }
  const auto to_vector = unpackers_of(kind_).vector;
  for (std::size_t r = 0; r < count; ++r)
    to_vector(from + r * row_nbytes_, length_ / kind_.weights, to + (row + r) * step_);
}

void BlockRows::unpack_pairs(const std::uint8_t* stored, std::size_t row, std::size_t count,
                             std::uint8_t* rows) const {
  constexpr std::size_t kTogether = 32;
  const std::size_t groups = length_ / kCodeUnit;
  std::uint8_t even[8 * kTogether], odd[8 * kTogether];
  for (std::size_t r = row; r < row + count; ++r)
    for (const std::size_t at : {gate_at_, up_at_}) {
      std::uint8_t* to = rows + r * step_ + at;
      if (kind_.is_plain()) {
        for (std::size_t g = 0; g < groups; ++g)
          to[g] = is_usual_power(stored[g]) ? stored[g] : kPowerOfZeros;
        stored += groups;
        continue;
      }
      to += groups;
      for (std::size_t g = 0; g < groups; g += kTogether) {
        const std::size_t nbytes = 16 * std::min(kTogether, groups - g);
        for (std::size_t i = 0; i < nbytes; i += 16) {  // codes i and i + 16 share a byte
          const std::uint64_t lower = eight(stored + i), upper = eight(stored + i + 8);
          const std::uint64_t bytes[] = {(lower & in_each(15)) | (upper & in_each(15)) << 4,
                                         (lower >> 4 & in_each(15)) | (upper & in_each(0xF0))};
          std::memcpy(even + i / 2, bytes, 8);
          std::memcpy(odd + i / 2, bytes + 1, 8);
        }
        for (std::size_t i = 0; i < nbytes / 2; ++i) {
          to[2 * i] = even[i];
          to[2 * i + 1] = odd[i];
        }
        stored += nbytes;
        to += nbytes;
      }
    }
}

// Each kCodeUnit stored rows' codes for a neuron are a unit of its column. All rows of some neurons go first,
// as their columns then stay in the processor's cache.
template <std::size_t bits>
void BlockRows::unpack_outputs(const std::uint8_t* stored, std::size_t count, std::uint8_t* to) const {
  constexpr std::size_t kTogether = 4;  // units that are written to a column together: whole cache lines
  constexpr std::size_t unit = 4 * bits,
                        whole = bits == 3                ? 8
                                : bits == 5 || bits == 6 ? 16
                                                         : unit,
                        upper = unit - whole;
  const auto to_codes = unpackers_of(kind_).codes;
  BlockCodes codes[kCodeUnit] = {};
  Rows across[kTogether][kMostBytes];
  for (std::size_t first = 0; first < length_; first += kBlockWeights) {
    const std::size_t neurons = std::min(kBlockWeights, length_ - first), blocks = neurons / kind_.weights;
    const std::uint8_t* from = stored + first / kind_.weights * kind_.nbytes;
    for (std::size_t r = 0; r < count;) {
      std::uint8_t* column = to + first * step_ + r / kCodeUnit * unit;
      std::size_t units = 0;
      for (; units < kTogether && r < count; ++units, r += kCodeUnit) {
        to_codes(from + r * row_nbytes_, row_nbytes_, blocks, codes);
        if (shift_ != 0)
          for (BlockCodes& each : codes)
            for (std::uint8_t& code : each) code = static_cast<std::uint8_t>(code + shift_);
        pack_across<bits>(codes, kind_.bits <= 4 && shift_ == 0, across[units]);
        turn<whole, kBlockWeights>(across[units][0]);
        if constexpr (upper != 0) turn<upper, kBlockWeights>(across[units][whole]);
      }
      for (std::size_t n = 0; n < neurons; ++n, column += step_)
        for (std::size_t u = 0; u < units; ++u) {
          std::memcpy(column + u * unit, across[u][0] + n * whole, whole);
          if constexpr (upper != 0)
            std::memcpy(column + u * unit + whole, across[u][whole] + n * upper, upper);
        }
    }
  }
}

}  // namespace flashllm
