// Where a layer's rows lie in a file, and what they must hash to. Makes read jobs; reads nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "io/request_plan.h"

namespace flashllm {

struct RowSource {
  std::uint64_t file_offset = 0;             // of row 0
  std::uint32_t stride = 0;                  // bytes
  const std::uint64_t* checksums = nullptr;  // [num_neurons], of whole rows, by neuron; nullptr: not checked
  const std::int32_t* row_of = nullptr;      // [num_neurons]: a neuron's row; nullptr: in the order of ids
  // 0: a row is one read. Otherwise pieces of so many bytes, unchecked, as if a neuron's matrices lay apart
  // (what bundling is worth: paper A, section 3.2).
  std::uint32_t piece_nbytes = 0;

  std::int32_t row(std::int32_t neuron) const { return row_of != nullptr ? row_of[neuron] : neuron; }

  // The neuron whose row holds the byte at `offset` of the file, which lies in one of `num_neurons` rows.
  std::int32_t neuron_at(std::uint64_t offset, std::int32_t num_neurons) const {
    const auto at = static_cast<std::int32_t>((offset - file_offset) / stride);
    return row_of == nullptr
               ? at
               : static_cast<std::int32_t>(std::find(row_of, row_of + num_neurons, at) - row_of);
  }

  // The read of a whole row.
  ReadJob job(std::int32_t neuron, std::byte* destination) const {
    ReadJob result;
    result.offset = file_offset + static_cast<std::uint64_t>(row(neuron)) * stride;
    result.nbytes = stride;
    result.destination = destination;
    if (checksums != nullptr) {
      result.checksums = checksums + neuron;
      result.row_nbytes = stride;
    }
    return result;
  }

  void add_jobs(std::int32_t neuron, std::byte* destination, std::vector<ReadJob>& jobs) const {
    jobs.push_back(job(neuron, destination));
    if (piece_nbytes != 0) split(jobs);
  }
  std::size_t jobs_a_row() const { return piece_nbytes == 0 ? 1 : stride / piece_nbytes; }

 private:
  void split(std::vector<ReadJob>& jobs) const {
    ReadJob piece = jobs.back();
    jobs.pop_back();
    piece.checksums = nullptr;
    piece.row_nbytes = 0;
    piece.nbytes = piece_nbytes;
    for (std::size_t left = jobs_a_row(); left > 0; --left) {
      jobs.push_back(piece);
      piece.offset += piece_nbytes;
      piece.destination += piece_nbytes;
    }
  }
};

}  // namespace flashllm
