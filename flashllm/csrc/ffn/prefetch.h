// Rows of one layer's units (io/row_source.h), read before the layer's turn on a predictor's word.
//
// The list comes the likeliest first and is read in waves of that order, behind every demand read. Of neurons
// what is a neighbour of a likely one on flash comes with it, as one request reads both; experts are read
// only while nothing else is, a few requests at a time (ReaderOptions::idle_nbytes). When the layer's active
// set is known, what has not been started and is not wanted is dropped, and what is wanted goes on as demand.
// Wrong predictions so cost what the device would have idled, and the reads under way at that moment. The
// rows lie in a buffer of their own: the neuron cache sees only those that turn out to be active, and gives
// nothing up for a guess.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "io/reader.h"
#include "io/row_source.h"

namespace flashllm {

// How far down a list, the likeliest first, reading pays: one a layer.
//
// A predictor names neurons that are next to never active as readily as others; by their place in a list
// sorted by how often neurons are active the two are told apart. Which places turned out active is counted,
// read or not, and lists are cut where too few do: a row read in vain costs a request, and delays those that
// are wanted. Changes what is read, never what is computed. Plain bookkeeping.
class PrefetchDepth {
 public:
  static constexpr std::size_t kPlaces = 16;  // of neurons, counted together
  static constexpr float kKnown = 16.0F;      // places counted, before which all are read
  static constexpr float kWorth = 0.5F;       // share that must turn out active (bench/log)
  static constexpr float kMemory = 0.95F;     // of the counts, from list to list

  // For lists of which no more than `most` are read, `places` of which are counted together.
  explicit PrefetchDepth(std::size_t most, std::size_t places = kPlaces)
      : places_(places), classes_((most + places - 1) / places) {}

  // How many places of the next list to read: those up to the place where reading has paid most.
  std::size_t worth_reading() const {
    float gain = 0.0F, best = 0.0F;
    std::size_t end = 0;
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      gain += classes_[c].known() ? classes_[c].active - kWorth * classes_[c].listed : 1.0F;
      if (gain <= best) continue;
      best = gain;
      end = c + 1;
    }
    return end * places_;
  }

  // What became of a list: `was_active(place)` for each of its `count` places.
  template <typename WasActive>
  void judge(std::size_t count, const WasActive& was_active) {
    for (Class& one : classes_) one = {one.listed * kMemory, one.active * kMemory};
    for (std::size_t place = 0; place < std::min(count, classes_.size() * places_); ++place) {
      Class& one = classes_[place / places_];
      one.listed += 1.0F;
      one.active += was_active(place) ? 1.0F : 0.0F;
    }
  }

 private:
  struct Class {
    float listed = 0.0F, active = 0.0F;
    bool known() const { return listed >= kKnown; }
  };
  std::size_t places_;
  std::vector<Class> classes_;
};

// The buffer, which layers may share where two that follow each other do not.
class Prefetch {
 public:
  // `rows` holds `capacity` units of at most `unit_nbytes`; keeps references to all of them.
  Prefetch(std::byte* rows, std::int32_t capacity, std::size_t unit_nbytes, std::int32_t num_units,
           Reader& reader, const DirectFile& file);
  ~Prefetch() { abandon(); }
  Prefetch(const Prefetch&) = delete;
  Prefetch& operator=(const Prefetch&) = delete;

  std::int32_t capacity() const { return capacity_; }
  std::size_t unit_nbytes() const { return unit_nbytes_; }

  // Begins to read `units` of `layer` (distinct, the likeliest first): as many as `depth` says, which
  // learns in `keep` what became of all of them, and at most the capacity. Forgets those before.
  void start(std::int32_t layer, const std::vector<std::int32_t>& units, const RowSource& source,
             PrefetchDepth& depth);
  // The layer whose rows these are; -1: none.
  std::int32_t layer() const { return layer_; }

  // The layer's active units, ascending: of the others no more is read than is under way. Those that
  // `has` says yes to afterwards are there after `finish`.
  void keep(const std::vector<std::int32_t>& active);
  bool has(std::int32_t unit) const { return place_of_[static_cast<std::size_t>(unit)] >= 0; }

  // Waits until every unit kept is there. Throws the reader's error where one of them could not be read.
  void finish();
  const std::byte* rows(std::int32_t unit) const {
    return rows_ + static_cast<std::size_t>(place_of_[static_cast<std::size_t>(unit)]) * unit_nbytes_;
  }

  // Waits for whatever is under way, and forgets it.
  void abandon() noexcept;

  ReadStats take_stats();  // of all reads waited for since the last call

 private:
  static constexpr std::size_t kWaves = 4;

  void choose(std::size_t most, bool neighbours);
  void add_stats(const ReadBatch& wave);
  std::int32_t unit_of(const ReadJob& job) const {
    return chosen_[static_cast<std::size_t>(job.destination - rows_) / unit_nbytes_];
  }

  std::byte* rows_;
  const std::int32_t capacity_;
  const std::size_t unit_nbytes_;
  Reader& reader_;
  const DirectFile& file_;
  std::int32_t layer_ = -1;
  PrefetchDepth* depth_ = nullptr;
  std::vector<std::int32_t> listed_;
  std::array<ReadBatch, kWaves> waves_;
  std::vector<std::int32_t> place_of_;  // [num_units]: its place in the buffer, -1 where it has none
  std::vector<std::int32_t> chosen_;    // the unit of each place
  std::vector<std::uint8_t> wanted_;    // [num_units]
  std::vector<std::uint8_t> unchosen_;  // [num_units]: listed, and not yet chosen
  ReadStats stats_;
};

}  // namespace flashllm
