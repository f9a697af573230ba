#include "ffn/prefetch.h"

#include <exception>
#include <utility>

#include "io/error.h"

namespace flashllm {

Prefetch::Prefetch(std::byte* rows, std::int32_t capacity, std::uint32_t stride, std::int32_t num_neurons,
                   Reader& reader, const DirectFile& file)
    : rows_(rows),
      capacity_(capacity),
      stride_(stride),
      reader_(reader),
      file_(file),
      row_of_(static_cast<std::size_t>(num_neurons), -1),
      wanted_(static_cast<std::size_t>(num_neurons), 0),
      unchosen_(static_cast<std::size_t>(num_neurons), 0) {
  chosen_.reserve(static_cast<std::size_t>(capacity));
  listed_.reserve(static_cast<std::size_t>(num_neurons));
  for (ReadBatch& wave : waves_) wave.jobs.reserve(static_cast<std::size_t>(capacity) / kWaves + 1);
}

void Prefetch::start(std::int32_t layer, const std::vector<std::int32_t>& neurons, const RowSource& source,
                     PrefetchDepth& depth) {
  abandon();
  layer_ = layer;
  depth_ = &depth;
  listed_.assign(neurons.begin(), neurons.end());
  choose_rows(std::min(neurons.size(), depth.worth_reading()));
  const std::size_t count = chosen_.size();
  for (std::size_t w = 0; w < kWaves; ++w) {
    ReadBatch& wave = waves_[w];
    wave.jobs.clear();
    for (std::size_t i = count * w / kWaves; i < count * (w + 1) / kWaves; ++i)
      source.add_rows(chosen_[i], 1, rows_ + i * stride_, wave.jobs);
    if (!wave.jobs.empty()) reader_.submit(wave, file_, ReadPriority::prefetch);
  }
}

// In the order of the list, but neighbours on flash one after the other.
void Prefetch::choose_rows(std::size_t most) {
  const auto unchosen = [this](std::int32_t neuron) -> std::uint8_t& {
    return unchosen_[static_cast<std::size_t>(neuron)];
  };
  const auto end = listed_.begin() + static_cast<std::ptrdiff_t>(most);
  std::for_each(listed_.begin(), end, [&](std::int32_t neuron) { unchosen(neuron) = 1; });
  const auto neurons = static_cast<std::int32_t>(unchosen_.size());
  for (auto listed = listed_.begin(); listed != end; ++listed) {
    std::int32_t neuron = *listed;
    if (unchosen(neuron) == 0) continue;  // came with a neighbour
    while (neuron > 0 && unchosen(neuron - 1) != 0) --neuron;
    for (; neuron < neurons && unchosen(neuron) != 0; ++neuron) {
      unchosen(neuron) = 0;
      if (chosen_.size() == static_cast<std::size_t>(capacity_)) continue;
      row_of_[static_cast<std::size_t>(neuron)] = static_cast<std::int32_t>(chosen_.size());
      chosen_.push_back(neuron);
    }
  }
}

void Prefetch::keep(const std::vector<std::int32_t>& active) {
  for (const std::int32_t neuron : active) wanted_[static_cast<std::size_t>(neuron)] = 1;
  depth_->judge(listed_.size(),
                [this](std::size_t place) { return wanted_[static_cast<std::size_t>(listed_[place])] != 0; });
  for (ReadBatch& wave : waves_) {
    if (!wave.in_flight()) continue;
    reader_.keep(
        wave, [this](const ReadJob& job) { return wanted_[static_cast<std::size_t>(neuron_of(job))] != 0; });
  }
  // From here on only what is wanted has a row: the others are neither waited for by name nor found.
  for (const std::int32_t neuron : chosen_)
    if (wanted_[static_cast<std::size_t>(neuron)] == 0) row_of_[static_cast<std::size_t>(neuron)] = -1;
  for (const std::int32_t neuron : active) wanted_[static_cast<std::size_t>(neuron)] = 0;
}

void Prefetch::finish() {
  std::exception_ptr error;
  for (ReadBatch& wave : waves_) {
    if (!wave.in_flight()) continue;
    try {
      reader_.wait(wave);
    } catch (const CoreError&) {
      // Only a row that is wanted may end a token.
      for (const ReadJob& job : wave.jobs)
        if (!job.landed && has(neuron_of(job))) error = std::current_exception();
    }
    add_stats(wave);
  }
  if (error) std::rethrow_exception(error);
}

void Prefetch::abandon() noexcept {
  for (ReadBatch& wave : waves_) {
    if (!wave.in_flight()) continue;
    reader_.cancel(wave);
    reader_.settle(wave);
    add_stats(wave);
  }
  for (const std::int32_t neuron : chosen_) row_of_[static_cast<std::size_t>(neuron)] = -1;
  chosen_.clear();
  layer_ = -1;
}

void Prefetch::add_stats(const ReadBatch& wave) {
  const ReadStats& stats = wave.stats();
  for (const ReadJob& job : wave.jobs) stats_.jobs += job.landed ? 1 : 0;
  stats_.requests += stats.requests;
  stats_.dropped += stats.dropped;
  stats_.bytes += stats.bytes;
  stats_.retries += stats.retries;
}

ReadStats Prefetch::take_stats() { return std::exchange(stats_, ReadStats{}); }

}  // namespace flashllm
