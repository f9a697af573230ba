// Where a layer's units lie in a file, and what their rows must hash to. Makes read jobs; reads nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "io/request_plan.h"

namespace flashllm {

// A layer's rows in units, runs of `size` rows that are read and kept together; the last may be shorter.
struct RowUnits {
  std::int32_t num_rows = 0;
  std::int32_t size = 1;

  std::int32_t count() const { return (num_rows + size - 1) / size; }
  std::int32_t first(std::int32_t unit) const { return unit * size; }
  std::int32_t rows(std::int32_t unit) const { return std::min(size, num_rows - first(unit)); }
  // The first unit that begins at this row or behind it.
  std::int32_t from(std::int32_t row) const { return (row + size - 1) / size; }
  // Rows of `ids`, distinct units.
  template <typename Ids>
  std::size_t rows_of(const Ids& ids) const {
    if (size == 1) return ids.size();
    std::size_t total = 0;
    for (const std::int32_t unit : ids) total += static_cast<std::size_t>(rows(unit));
    return total;
  }
};

struct RowSource {
  RowUnits units;
  std::uint64_t file_offset = 0;             // of row 0
  std::uint32_t stride = 0;                  // bytes of a row
  const std::uint64_t* checksums = nullptr;  // of every `checksum_rows` rows; nullptr: not checked
  std::int32_t checksum_rows = 1;            // of which units are whole multiples
  // 0: a unit is one read. Otherwise pieces of so many bytes, unchecked, as if a neuron's matrices lay apart
  // (what bundling is worth: paper A, section 3.2).
  std::uint32_t piece_nbytes = 0;

  // The neuron whose row holds the byte at `offset` of the file, which lies in one of the layer's rows.
  std::int32_t neuron_at(std::uint64_t offset) const {
    return static_cast<std::int32_t>((offset - file_offset) / stride);
  }

  // The read of a whole unit.
  ReadJob job(std::int32_t unit, std::byte* destination) const {
    ReadJob result;
    result.offset = file_offset + static_cast<std::uint64_t>(units.first(unit)) * stride;
    result.nbytes = static_cast<std::uint64_t>(units.rows(unit)) * stride;
    result.destination = destination;
    if (checksums != nullptr) {
      result.checksums = checksums + units.first(unit) / checksum_rows;
      result.row_nbytes = static_cast<std::uint32_t>(checksum_rows) * stride;
    }
    return result;
  }

  void add_jobs(std::int32_t unit, std::byte* destination, std::vector<ReadJob>& jobs) const {
    jobs.push_back(job(unit, destination));
    if (piece_nbytes != 0) split(jobs);
  }
  std::size_t jobs_a_unit() const {
    return piece_nbytes == 0 ? 1 : static_cast<std::size_t>(units.size) * (stride / piece_nbytes);
  }

 private:
  void split(std::vector<ReadJob>& jobs) const {
    const ReadJob whole = jobs.back();
    jobs.pop_back();
    for (std::uint64_t row = 0; row < whole.nbytes; row += stride)
      for (std::uint64_t at = row; at + piece_nbytes <= row + stride; at += piece_nbytes)
        jobs.push_back({whole.offset + at, piece_nbytes, whole.destination + at});
  }
};

}  // namespace flashllm
