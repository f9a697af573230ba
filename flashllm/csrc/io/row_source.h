// Where a layer's units lie in a file, and what their rows must hash to. Makes read jobs; reads nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "io/error.h"
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

struct FilePlace {
  const DirectFile* file = nullptr;
  std::uint64_t offset = 0;
};

// A matrix of every expert of a layer where it lies in files of another layout: a slice of each.
struct ExpertSlices {
  std::vector<FilePlace> places;  // of each expert's
  std::uint64_t nbytes = 0;       // of an expert's
  std::uint64_t piece = 0;        // bytes that share a checksum, and are one read
  const Unpacking* unpacking = nullptr;

  std::size_t pieces() const { return static_cast<std::size_t>((nbytes + piece - 1) / piece); }
};

// The experts of a layer that lie so, each with the rows of a unit. Behind them come rows of the usual file.
struct LyingExperts {
  std::vector<ExpertSlices> matrices;
  std::int32_t count = 0, size = 0;  // experts, rows of one

  std::int32_t num_rows() const { return count * size; }
  std::size_t pieces() const {  // of an expert
    std::size_t total = 0;
    for (const ExpertSlices& each : matrices) total += each.pieces();
    return total;
  }
  // `sum`: the first of its checksums, matrix by matrix, piece by piece; or nullptr.
  void add_jobs(std::int32_t expert, std::byte* rows, const std::uint64_t* sum,
                std::vector<ReadJob>& jobs) const {
    for (const ExpertSlices& each : matrices)
      for (std::uint64_t first = 0; first < each.nbytes; first += each.piece) {
        ReadJob job;
        const FilePlace& place = each.places[static_cast<std::size_t>(expert)];
        job.offset = place.offset + first;
        job.nbytes = std::min(each.piece, each.nbytes - first);
        job.destination = rows;
        job.row_nbytes = static_cast<std::uint32_t>(job.nbytes);
        job.file = place.file;
        job.unpacking = each.unpacking;
        job.first = first;
        if (sum != nullptr) job.checksums = sum++;
        jobs.push_back(job);
      }
  }
};

struct RowSource {
  RowUnits units;
  std::uint64_t file_offset = 0;  // of row 0, or of the first behind lying experts
  std::uint32_t stride = 0;       // bytes of a row
  // Of each expert's pieces, then of every `checksum_rows` rows behind them; nullptr: not checked.
  const std::uint64_t* checksums = nullptr;
  std::int32_t checksum_rows = 1;         // of which units are whole multiples
  const LyingExperts* experts = nullptr;  // whose rows are the first ones

  // The neuron whose row holds the byte at `offset` of the file, or of the experts' file the first of that
  // expert's; -1 where it lies in none of the layer's rows, or in one of several, of different files.
  std::int32_t neuron_at(std::uint64_t offset) const {
    if (experts != nullptr) {
      std::int32_t found = -1;
      for (const ExpertSlices& each : experts->matrices)
        for (std::int32_t expert = 0; expert < experts->count; ++expert) {
          const std::uint64_t start = each.places[static_cast<std::size_t>(expert)].offset;
          if (offset < start || offset - start >= each.nbytes || expert == found) continue;
          if (found >= 0) return -1;
          found = expert;
        }
      if (found >= 0) return found * experts->size;
    }
    if (offset < file_offset) return -1;
    return lying_rows() + static_cast<std::int32_t>((offset - file_offset) / stride);
  }

  // The reads of rows that begin and end between checksums; lying experts are read whole. Throws CoreError
  // (usage) for others.
  void add_rows(std::int32_t first, std::int32_t count, std::byte* destination,
                std::vector<ReadJob>& jobs) const {
    for (; first < lying_rows() && count > 0; first += experts->size, count -= experts->size) {
      if (first % experts->size != 0 || count < experts->size)
        throw CoreError(ErrorKind::usage, "experts are read whole");
      const std::int32_t expert = first / experts->size;
      experts->add_jobs(expert, destination, sums_from(expert), jobs);
      destination += static_cast<std::size_t>(experts->size) * stride;
    }
    if (count == 0) return;
    const std::int32_t behind = first - lying_rows();
    ReadJob job;
    job.offset = file_offset + static_cast<std::uint64_t>(behind) * stride;
    job.nbytes = static_cast<std::uint64_t>(count) * stride;
    job.destination = destination;
    if (checksums != nullptr) {
      if (behind % checksum_rows != 0 || count % checksum_rows != 0)
        throw CoreError(ErrorKind::usage, "rows that are read must be whole runs of " +
                                              std::to_string(checksum_rows) + ", which share a checksum");
      job.checksums = sums_from(experts == nullptr ? 0 : experts->count) + behind / checksum_rows;
      job.row_nbytes = static_cast<std::uint32_t>(checksum_rows) * stride;
    }
    jobs.push_back(job);
  }

  // The reads of a whole unit.
  void add_jobs(std::int32_t unit, std::byte* destination, std::vector<ReadJob>& jobs) const {
    add_rows(units.first(unit), units.rows(unit), destination, jobs);
  }
  std::size_t jobs_a_unit() const { return experts == nullptr ? 1 : experts->pieces(); }

  // A failed read's error, with the layer, its neuron, and what to do about it.
  [[noreturn]] void rethrow(const CoreError& error, int layer) const {
    std::string message = "layer " + std::to_string(layer);
    if (error.offset() != CoreError::kNoOffset && neuron_at(error.offset()) >= 0)
      message += ", neuron " + std::to_string(neuron_at(error.offset()));
    message += std::string(": ") + error.what();
    if (error.kind() == ErrorKind::checksum || error.kind() == ErrorKind::format)
      message +=
          "; the model directory is damaged: check it with `flashllm verify`, then convert the model again";
    if (error.kind() == ErrorKind::io)
      message += "; check the drive (the system's log says more), then try again";
    throw CoreError(error.kind(), message, error.offset());
  }

 private:
  std::int32_t lying_rows() const { return experts == nullptr ? 0 : experts->num_rows(); }
  // The checksums from an expert's on; from those of the rows behind the last.
  const std::uint64_t* sums_from(std::int32_t expert) const {
    if (checksums == nullptr || experts == nullptr) return checksums;
    return checksums + static_cast<std::size_t>(expert) * experts->pieces();
  }
};

}  // namespace flashllm
