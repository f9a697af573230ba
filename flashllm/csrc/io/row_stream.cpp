#include "io/row_stream.h"

#include <algorithm>
#include <string>

#include "io/error.h"
#include "io/stopwatch.h"

namespace flashllm {

namespace {

constexpr std::size_t kPageNbytes = 4096;

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes; }

}  // namespace

RowStream::RowStream(Reader& reader, const DirectFile& file, std::vector<StreamedLayer> layers,
                     std::size_t stride, std::size_t block_rows, std::size_t ahead)
    : reader_(reader),
      file_(file),
      layers_(std::move(layers)),
      stride_(stride),
      block_rows_(block_rows),
      ahead_(ahead),
      buffer_nbytes_(whole_pages(stride * block_rows)),
      staging_((ahead + 1) * buffer_nbytes_) {
  if (stride == 0 || block_rows == 0 || ahead == 0 || layers_.empty())
    throw CoreError(ErrorKind::usage, "a row stream needs layers, and sizes that are not zero");
  for (std::size_t i = 0; i <= ahead; ++i) batches_.push_back(std::make_unique<ReadBatch>());
}

void RowStream::add_places(int layer) {
  const std::size_t num_rows = layers_.at(static_cast<std::size_t>(layer)).num_rows;
  for (std::size_t row = 0; row < num_rows; row += block_rows_) wanted_.push_back({layer, row});
}

void RowStream::begin(int layer, int then) {
  wanted_.clear();
  add_places(layer);
  own_ = wanted_.size();
  if (then != kNoLayer) add_places(then);
  // Reads under way are used where they are those wanted now; else an interrupted pass left them.
  bool matches = pending_.size() <= wanted_.size();
  for (std::size_t i = 0; matches && i < pending_.size(); ++i) matches = pending_[i].place == wanted_[i];
  if (!matches) pending_.clear();
  used_ = 0;
  submitted_ = pending_.size();
  if (submitted_ == 0) reader_.take_busy_ns();  // time of earlier passes does not count
}

bool RowStream::next(RowBlock& block) {
  if (used_ == own_) return false;
  // The block to use, and those behind it: the buffer of the block before is free by now.
  while (pending_.size() <= ahead_ && submitted_ < wanted_.size()) submit(wanted_[submitted_]);
  const Pending current = pending_.front();
  pending_.pop_front();
  ++used_;
  Stopwatch watch;
  ReadBatch& batch = *batches_[current.buffer];
  try {
    reader_.wait(batch);
  } catch (const CoreError& error) {
    rethrow_with_place(error, current.place.layer);
  }
  watch.charge(times_.wait_ns);
  times_.busy_ns += reader_.take_busy_ns();
  times_.bytes += batch.stats().bytes;
  times_.requests += batch.stats().requests;
  times_.retries += batch.stats().retries;
  block = {current.place.first_row, current.count, staging_.data() + current.buffer * buffer_nbytes_};
  return true;
}

void RowStream::submit(const Place& place) {
  const std::size_t buffer = next_buffer_;
  next_buffer_ = (next_buffer_ + 1) % batches_.size();
  settle(buffer);
  const StreamedLayer& layer = layers_[static_cast<std::size_t>(place.layer)];
  const std::size_t count = std::min(block_rows_, layer.num_rows - place.first_row);
  ReadJob job;
  job.offset = layer.offset + place.first_row * stride_;
  job.nbytes = count * stride_;
  job.destination = staging_.data() + buffer * buffer_nbytes_;
  job.checksums = layer.checksums + place.first_row;
  job.row_nbytes = static_cast<std::uint32_t>(stride_);
  ReadBatch& batch = *batches_[buffer];
  batch.jobs.assign(1, job);
  reader_.submit(batch, file_);
  reader_.start();
  pending_.push_back({place, count, buffer});
  ++submitted_;
}

// After an interrupted pass a read may still be under way into this buffer: it ends before the buffer is
// reused.
void RowStream::settle(std::size_t buffer) noexcept { reader_.settle(*batches_[buffer]); }

void RowStream::drain() noexcept {
  pending_.clear();
  wanted_.clear();
  own_ = used_ = submitted_ = 0;
  for (std::size_t buffer = 0; buffer < batches_.size(); ++buffer) settle(buffer);
}

StreamTimes RowStream::take() {
  const StreamTimes times = times_;
  times_ = {};
  return times;
}

void RowStream::rethrow_with_place(const CoreError& error, int layer) const {
  std::string message = "layer " + std::to_string(layer);
  const std::uint64_t start = layers_[static_cast<std::size_t>(layer)].offset;
  if (error.offset() != CoreError::kNoOffset && error.offset() >= start)
    message += ", neuron " + std::to_string((error.offset() - start) / stride_);
  message += std::string(": ") + error.what() + read_advice(error.kind());
  throw CoreError(error.kind(), message, error.offset());
}

}  // namespace flashllm
