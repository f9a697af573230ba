// Rows of one layer's neurons, read on a guess before the layer is reached.
//
// The guess comes the likeliest first and is read in waves of that order, behind every demand read; what is a
// neighbour of a likely one on flash comes with it, as one request reads both. When the
// layer's active set is known, what has not been started and is not wanted is dropped, and what is wanted
// goes on as demand. Wrong guesses so cost what the device would have idled, and the reads under way at that
// moment. The rows lie in a buffer of their own: the neuron cache never sees a guess.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "io/reader.h"
#include "model/guess_limit.h"

namespace flashllm {

// Where a layer's rows lie, and what they must hash to.
struct RowSource {
  std::uint64_t file_offset = 0;  // of row 0
  std::uint32_t stride = 0;
  const std::uint64_t* checksums = nullptr;  // by neuron
  const std::int32_t* row_of = nullptr;      // each neuron's row in the file; nullptr: in the order of ids

  std::int32_t row(std::int32_t neuron) const { return row_of != nullptr ? row_of[neuron] : neuron; }
  ReadJob job(std::int32_t neuron, std::byte* destination) const {
    ReadJob job;
    job.offset = file_offset + static_cast<std::uint64_t>(row(neuron)) * stride;
    job.nbytes = stride;
    job.destination = destination;
    if (checksums != nullptr) {
      job.checksums = checksums + neuron;
      job.row_nbytes = stride;
    }
    return job;
  }
};

class EarlyReads {
 public:
  // `rows` holds `capacity` rows of `stride` bytes; keeps references to all of them.
  EarlyReads(std::byte* rows, std::int32_t capacity, std::uint32_t stride, std::int32_t num_neurons,
             Reader& reader, const DirectFile& file);
  ~EarlyReads() { abandon(); }
  EarlyReads(const EarlyReads&) = delete;
  EarlyReads& operator=(const EarlyReads&) = delete;

  std::int32_t capacity() const { return capacity_; }

  // Begins to read `neurons` of `layer` (distinct, the likeliest first): as many as `limit` says, which
  // learns in `keep` what became of all of them, and at most the capacity. Forgets those before.
  void start(std::int32_t layer, const std::vector<std::int32_t>& neurons, const RowSource& source,
             GuessLimit& limit);
  // Whose rows these are; -1: nobody's.
  std::int32_t layer() const { return layer_; }

  // The layer's active neurons, ascending: of the others no more is read than is under way. Those asked for
  // and active are there after `finish`.
  void keep(const std::vector<std::int32_t>& active);
  bool asked_for(std::int32_t neuron) const { return row_of_[static_cast<std::size_t>(neuron)] >= 0; }

  // Waits until every row kept is there. Throws the reader's error where one of them could not be read.
  void finish();
  const std::byte* row(std::int32_t neuron) const {
    return rows_ + static_cast<std::size_t>(row_of_[static_cast<std::size_t>(neuron)]) * stride_;
  }

  // Waits for whatever is under way, and forgets it.
  void abandon() noexcept;

  ReadStats take_stats();  // of all reads waited for since the last call

 private:
  static constexpr std::size_t kWaves = 4;

  void ask_for(std::size_t most, const RowSource& source);
  void add_stats(const ReadBatch& wave);
  std::int32_t neuron_of(const ReadJob& job) const {
    return asked_[static_cast<std::size_t>(job.destination - rows_) / stride_];
  }

  std::byte* rows_;
  const std::int32_t capacity_;
  const std::uint32_t stride_;
  Reader& reader_;
  const DirectFile& file_;
  std::int32_t layer_ = -1;
  GuessLimit* limit_ = nullptr;
  std::vector<std::int32_t> guesses_;
  std::array<ReadBatch, kWaves> waves_;
  std::vector<std::int32_t> row_of_;  // [num_neurons]: row of the buffer, -1 where not asked for
  std::vector<std::int32_t> asked_;   // the neuron of each row of the buffer
  std::vector<std::uint8_t> wanted_;  // [num_neurons]
  std::vector<std::int32_t>
      guess_at_;  // [num_neurons]: by row of the file, the neuron guessed and not yet asked for
  ReadStats stats_;
};

}  // namespace flashllm
