#include "io/row_stream.h"

#include <algorithm>
#include <string>

#include "io/error.h"
#include "io/stopwatch.h"

namespace flashllm {

namespace {

constexpr std::size_t kPageNbytes = 4096;

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes; }

std::size_t longest_row(const std::vector<RowSource>& layers) {
  std::size_t longest = 0;
  for (const RowSource& each : layers) longest = std::max<std::size_t>(longest, each.stride);
  return longest;
}

}  // namespace

RowStream::RowStream(Reader& reader, const DirectFile& file, std::vector<RowSource> layers,
                     std::size_t block_rows, std::size_t ahead)
    : reader_(reader),
      file_(file),
      layers_(std::move(layers)),
      block_rows_(block_rows),
      ahead_(ahead),
      buffer_nbytes_(whole_pages(longest_row(layers_) * block_rows)),
      staging_((ahead + 1) * buffer_nbytes_),
      kept_(layers_.size()) {
  require(buffer_nbytes_ != 0 && ahead != 0, "a row stream needs layers, and sizes that are not zero");
  for (std::size_t i = 0; i <= ahead; ++i) batches_.push_back(std::make_unique<ReadBatch>());
}

bool RowStream::is_kept(const Place& place) const {
  return place.rows != nullptr ||
         place.first_row + place.count <= kept_[static_cast<std::size_t>(place.layer)].filled;
}

bool RowStream::is_pending(const Place& place) const {
  return std::any_of(pending_.begin(), pending_.end(),
                     [&](const Pending& pending) { return pending.place == place; });
}

RowRun RowStream::all_rows(int layer) const {
  return {0, num_rows(static_cast<std::size_t>(layer)), nullptr};
}

void RowStream::add_places(int layer, const RowRun& run, std::vector<Place>& places) const {
  const std::size_t end = run.first_row + run.count;
  for (std::size_t row = run.first_row; row < end; row += block_rows_)
    places.push_back({layer, row, std::min(block_rows_, end - row),
                      run.rows == nullptr
                          ? nullptr
                          : run.rows + (row - run.first_row) * stride(static_cast<std::size_t>(layer))});
}

void RowStream::begin(int layer, int then, std::size_t passed) {
  places_.clear();
  add_places(layer, all_rows(layer), places_);
  begin_places(then, passed);
}

void RowStream::begin(int layer, const std::vector<RowRun>& runs, std::size_t passed) {
  const std::size_t num_rows = all_rows(layer).count;
  places_.clear();
  for (const RowRun& run : runs) {
    if (run.first_row + run.count > num_rows)
      throw CoreError(ErrorKind::usage, "a layer has " + std::to_string(num_rows) + " rows; more are wanted");
    add_places(layer, run, places_);
  }
  begin_places(kNoLayer, passed);
}

void RowStream::begin_places(int then, std::size_t passed) {
  place_ = 0;
  places_.erase(places_.begin(), places_.begin() + static_cast<std::ptrdiff_t>(passed));
  wanted_ = places_;
  if (then != kNoLayer) add_places(then, all_rows(then), wanted_);
  // What is on its way already is waited for, though it may be in memory by now.
  const auto has = [this](const Place& place) { return is_kept(place) && !is_pending(place); };
  wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(), has), wanted_.end());
  // Reads under way are used where they are those wanted now; else an interrupted pass left them.
  bool matches = pending_.size() <= wanted_.size();
  for (std::size_t i = 0; matches && i < pending_.size(); ++i) matches = pending_[i].place == wanted_[i];
  if (!matches) {
    pending_.clear();
    wanted_.erase(std::remove_if(wanted_.begin(), wanted_.end(), has), wanted_.end());
  }
  submitted_ = pending_.size();
  if (submitted_ == 0) reader_.take_busy_ns();  // time of earlier passes does not count
}

bool RowStream::next(RowRun& block) {
  if (place_ == places_.size()) return false;
  // The blocks behind the one to use: the buffer of the block before is free by now.
  while (pending_.size() <= ahead_ && submitted_ < wanted_.size()) submit(wanted_[submitted_]);
  const Place place = places_[place_];
  const auto layer = static_cast<std::size_t>(place.layer);
  Kept& kept = kept_[layer];
  if (pending_.empty() || !(pending_.front().place == place)) {  // it was in memory
    block = {place.first_row, place.count,
             place.rows != nullptr ? place.rows : kept_row(layer, place.first_row), stride(layer)};
    ++place_;
    return true;
  }
  const Pending current = pending_.front();
  pending_.pop_front();
  ++place_;
  Stopwatch watch;
  ReadBatch& batch = *batches_[current.buffer];
  try {
    reader_.wait(batch);
  } catch (const CoreError& error) {
    layers_[layer].rethrow(error, place.layer);
  }
  watch.charge(times_.wait_ns);
  times_.busy_ns += reader_.take_busy_ns();
  times_.bytes += batch.stats().bytes;
  times_.requests += batch.stats().requests;
  times_.retries += batch.stats().retries;
  const bool is_own = kept.memory != nullptr && current.rows == kept_row(layer, place.first_row);
  if (is_own && kept.filled == place.first_row) kept.filled += place.count;
  block = {place.first_row, place.count, current.rows, stride(layer)};
  return true;
}

void RowStream::submit(const Place& place) {
  const std::size_t buffer = next_buffer_;
  next_buffer_ = (next_buffer_ + 1) % batches_.size();
  settle(buffer);
  const auto layer = static_cast<std::size_t>(place.layer);
  const Kept& kept = kept_[layer];
  const std::size_t count = place.count;
  // Where a layer follows itself its rows may be on their way already.
  const bool stays =
      place.first_row + count <= kept.rows && place.first_row >= kept.filled && !is_pending(place);
  std::byte* rows = stays ? kept_row(layer, place.first_row) : staging_.data() + buffer * buffer_nbytes_;
  ReadBatch& batch = *batches_[buffer];
  batch.jobs.clear();
  layers_[layer].add_rows(static_cast<std::int32_t>(place.first_row), static_cast<std::int32_t>(count), rows,
                          batch.jobs);
  reader_.submit(batch, file_);
  reader_.start();
  pending_.push_back({place, buffer, rows});
  ++submitted_;
}

void RowStream::keep(std::size_t layer, std::byte* memory, std::size_t rows) {
  drain();
  const std::size_t most = std::min(rows, num_rows(layer));
  kept_[layer] = {memory, most, most, 0};
}

void RowStream::set_kept(std::size_t layer, std::size_t rows) {
  Kept& kept = kept_.at(layer);
  require(rows <= kept.most,
          "memory for " + std::to_string(kept.most) + " rows cannot keep " + std::to_string(rows));
  if (rows == kept.rows) return;
  drain();  // no read may land in memory that is given back
  if (rows < kept.rows) {
    kept.filled = std::min(kept.filled, rows / block_rows_ * block_rows_);
    release_pages(kept_row(layer, rows), (kept.most - rows) * stride(layer));
  } else {
    reclaim_pages(kept.memory, rows * stride(layer));
  }
  kept.rows = rows;
}

// After an interrupted pass a read may still be under way into this buffer: it ends before the buffer is
// reused.
void RowStream::settle(std::size_t buffer) noexcept { reader_.settle(*batches_[buffer]); }

void RowStream::drain() noexcept {
  pending_.clear();
  wanted_.clear();
  submitted_ = 0;
  places_.clear();
  place_ = 0;
  for (std::size_t buffer = 0; buffer < batches_.size(); ++buffer) settle(buffer);
}

StreamTimes RowStream::take() {
  const StreamTimes times = times_;
  times_ = {};
  return times;
}

}  // namespace flashllm
