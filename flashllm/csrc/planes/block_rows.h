// Rows of a tensor of a checkpoint, in ggml's blocks or plain numbers, put into rows of neurons as a
// conversion would have written them (flashllm/convert/kept/weights.py): the same bytes, but that the padding
// of a row is not touched, and that a unit's lie matrix by matrix (RowFormat::unit).
//
// Stored rows of up and gate become vectors with their scales. Stored rows of down are its outputs, so that
// their codes go across all neurons' rows, 32 outputs to a unit; their scales lie in the layer's plane.
//
// gpt-oss's safetensors have an expert's gates and ups in turn, codes in one tensor and scales in another.
// Those codes go by the name of up, those scales by that of gate; a stored row is a gate and its up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "io/row_source.h"
#include "kernels/rows.h"

namespace flashllm {

struct BlockKind;

enum class RowMatrixName { up, gate, down };

class BlockRows final : public Unpacking {
 public:
  // `kind`: ggml's name, plain ones are also safetensors'; `length`: weights of a stored row. Throws
  // CoreError (usage) for a kind that does not lie in such rows.
  BlockRows(const std::string& kind, std::size_t length, const RowFormat& format, RowMatrixName matrix);

  std::size_t row_nbytes() const { return row_nbytes_; }  // of a stored row
  // Stored rows that are put in place together.
  std::size_t grain() const { return is_down_ ? kCodeUnit : 1; }
  // Rows of memory that `rows` stored rows, all of a slice, fill.
  std::size_t neurons(std::size_t rows) const { return is_down_ ? length_ : rows; }

  bool outputs_fit(std::size_t rows) const { return !is_down_ || rows <= outputs_; }
  const RowFormat& format() const { return format_; }

  // Whole stored rows, in whole grains. Throws CoreError (format) for scales that no weights have.
  void unpack(const std::byte* stored, std::uint64_t first, std::uint64_t nbytes,
              std::byte* rows) const override;

 private:
  void unpack_pairs(const std::uint8_t* stored, std::size_t row, std::size_t count, std::uint8_t* rows) const;
  template <std::size_t bits>  // of a code in memory
  void unpack_outputs(const std::uint8_t* stored, std::size_t count, std::uint8_t* to) const;

  const BlockKind& kind_;
  const std::size_t length_, outputs_;
  const RowFormat format_;
  const bool is_down_;
  std::size_t at_ = 0, step_ = 0;        // of the matrix's first vector, from one to the next
  std::size_t gate_at_ = 0, up_at_ = 0;  // where both are in turn
  std::size_t row_nbytes_ = 0;
  std::size_t bits_ = 0;    // of a code in memory
  std::uint8_t shift_ = 0;  // added to stored codes
};

}  // namespace flashllm
