// A layer's rows in file order, block by block, for dense products: the next blocks are read while one is
// used.
//
// The length of a block is a constant of the model directory, so that dense sums do not depend on the
// machine. A layer's first blocks may be kept in memory once they were read: then they come from there, while
// those behind them, and the next layer's, are read. Knows rows and blocks; not what is computed from them.
// One thread at a time uses a stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "io/error.h"
#include "io/memory.h"
#include "io/reader.h"
#include "io/row_source.h"

namespace flashllm {

// Rows that follow each other.
struct RowRun {
  std::size_t first_row = 0;
  std::size_t count = 0;
  const std::byte* rows = nullptr;  // where they are in memory, if they are
  std::size_t stride = 0;           // of a block: bytes from one to the next
};

// What was read since the last `take`.
struct StreamTimes {
  std::uint64_t wait_ns = 0, busy_ns = 0;
  std::uint64_t bytes = 0, requests = 0, retries = 0;
};

class RowStream {
 public:
  static constexpr int kNoLayer = -1;

  // layers: units of one row. `ahead` blocks are read while one is used. Keeps references
  // to `reader` and `file`. Throws CoreError where a size is zero.
  RowStream(Reader& reader, const DirectFile& file, std::vector<RowSource> layers, std::size_t block_rows,
            std::size_t ahead);
  ~RowStream() { drain(); }
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Starts at the layer's first row, or behind its first `passed` blocks: others may have used the stream in
  // between. `then`: the layer that is wanted next, whose first blocks are read while the caller works on
  // other things.
  void begin(int layer, int then = kNoLayer, std::size_t passed = 0);
  // The same of these rows alone, ascending runs; no block has rows of two of them. Runs that are in memory
  // stay there until the next one's blocks are asked for.
  void begin(int layer, const std::vector<RowRun>& runs, std::size_t passed = 0);
  // The next block of the layer, whose rows are valid until the one after it is asked for; false after the
  // last one. Throws CoreError, which names the layer and the row.
  bool next(RowRun& block);
  // Waits for the reads under way and drops them, errors included.
  void drain() noexcept;
  // A pass was interrupted: reads that never end do not hold up the drain (reader.h).
  void interrupt() noexcept { reader_.interrupt(); }

  // Keeps a layer's first rows, in whole blocks, in `memory`, which has room for `rows` of them.
  void keep(std::size_t layer, std::byte* memory, std::size_t rows);
  // From now on at most `rows` of them: what is beyond goes back to the system, or is kept again as it is
  // read. Throws CoreError (usage) beyond what `keep` was given.
  void set_kept(std::size_t layer, std::size_t rows);
  std::size_t kept(std::size_t layer) const { return kept_.at(layer).rows; }

  StreamTimes take();
  std::size_t num_layers() const { return layers_.size(); }
  std::size_t stride(std::size_t layer) const { return layers_.at(layer).stride; }

 private:
  struct Place {
    int layer;
    std::size_t first_row, count;
    const std::byte* rows = nullptr;  // in memory
    bool operator==(const Place& other) const {
      return layer == other.layer && first_row == other.first_row && count == other.count;
    }
  };
  struct Pending {
    Place place;
    std::size_t buffer;
    std::byte* rows;  // of the buffer, or where they are kept
  };
  struct Kept {
    std::byte* memory = nullptr;
    std::size_t most = 0, rows = 0;  // rows there is memory for; that may be kept
    std::size_t filled = 0;          // rows that have come, from the first on
  };

  bool is_kept(const Place& place) const;
  bool is_pending(const Place& place) const;
  std::size_t num_rows(std::size_t layer) const {
    return static_cast<std::size_t>(layers_.at(layer).units.num_rows);
  }
  RowRun all_rows(int layer) const;
  std::byte* kept_row(std::size_t layer, std::size_t row) const {
    return kept_[layer].memory + row * stride(layer);
  }
  void add_places(int layer, const RowRun& run, std::vector<Place>& places) const;
  void begin_places(int then, std::size_t passed);
  void submit(const Place& place);
  void settle(std::size_t buffer) noexcept;

  Reader& reader_;
  const DirectFile& file_;
  const std::vector<RowSource> layers_;
  const std::size_t block_rows_, ahead_, buffer_nbytes_;
  // One allocation: in ordinary pages, which small ones are in, direct reads ran at half the speed.
  HugeBuffer staging_;
  std::vector<std::unique_ptr<ReadBatch>> batches_;  // the reads into each buffer
  std::deque<Pending> pending_;                      // in the order they are wanted
  std::vector<Place> places_;                        // this layer's blocks
  std::size_t place_ = 0;                            // of them, the next
  std::vector<Place> wanted_;                        // of this layer, then of the next: those to be read
  std::size_t submitted_ = 0;                        // how many of them are, or were, under way
  std::vector<Kept> kept_;                           // of each layer
  std::size_t next_buffer_ = 0;
  StreamTimes times_;
};

}  // namespace flashllm
