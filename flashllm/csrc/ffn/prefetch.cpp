#include "ffn/prefetch.h"

#include <exception>
#include <utility>

#include "io/error.h"

namespace flashllm {

Prefetch::Prefetch(std::byte* rows, std::int32_t capacity, std::size_t unit_nbytes, std::int32_t num_units,
                   Reader& reader, const DirectFile& file)
    : rows_(rows),
      capacity_(capacity),
      unit_nbytes_(unit_nbytes),
      reader_(reader),
      file_(file),
      place_of_(static_cast<std::size_t>(num_units), -1),
      wanted_(static_cast<std::size_t>(num_units), 0),
      unchosen_(static_cast<std::size_t>(num_units), 0) {
  chosen_.reserve(static_cast<std::size_t>(capacity));
  listed_.reserve(static_cast<std::size_t>(num_units));
  for (ReadBatch& wave : waves_) wave.jobs.reserve(static_cast<std::size_t>(capacity) / kWaves + 1);
}

void Prefetch::start(std::int32_t layer, const std::vector<std::int32_t>& units, const RowSource& source,
                     PrefetchDepth& depth) {
  abandon();
  layer_ = layer;
  depth_ = &depth;
  listed_.assign(units.begin(), units.end());
  const bool neurons = source.units.size == 1;
  choose(std::min(units.size(), depth.worth_reading()), neurons);
  const std::size_t count = chosen_.size();
  for (std::size_t w = 0; w < kWaves; ++w) {
    ReadBatch& wave = waves_[w];
    wave.jobs.clear();
    for (std::size_t i = count * w / kWaves; i < count * (w + 1) / kWaves; ++i)
      source.add_rows(source.units.first(chosen_[i]), source.units.rows(chosen_[i]), rows_ + i * unit_nbytes_,
                      wave.jobs);
    if (!wave.jobs.empty())
      reader_.submit(wave, file_, neurons ? ReadPriority::prefetch : ReadPriority::idle);
  }
}

// In the order of the list, but `neighbours` on flash one after the other.
void Prefetch::choose(std::size_t most, bool neighbours) {
  const auto unchosen = [this](std::int32_t unit) -> std::uint8_t& {
    return unchosen_[static_cast<std::size_t>(unit)];
  };
  const auto end = listed_.begin() + static_cast<std::ptrdiff_t>(most);
  std::for_each(listed_.begin(), end, [&](std::int32_t unit) { unchosen(unit) = 1; });
  const auto units = static_cast<std::int32_t>(unchosen_.size());
  for (auto listed = listed_.begin(); listed != end; ++listed) {
    std::int32_t unit = *listed;
    if (unchosen(unit) == 0) continue;  // came with a neighbour
    while (neighbours && unit > 0 && unchosen(unit - 1) != 0) --unit;
    do {
      unchosen(unit) = 0;
      if (chosen_.size() == static_cast<std::size_t>(capacity_)) continue;
      place_of_[static_cast<std::size_t>(unit)] = static_cast<std::int32_t>(chosen_.size());
      chosen_.push_back(unit);
    } while (neighbours && ++unit < units && unchosen(unit) != 0);
  }
}

void Prefetch::keep(const std::vector<std::int32_t>& active) {
  for (const std::int32_t unit : active) wanted_[static_cast<std::size_t>(unit)] = 1;
  depth_->judge(listed_.size(),
                [this](std::size_t place) { return wanted_[static_cast<std::size_t>(listed_[place])] != 0; });
  for (ReadBatch& wave : waves_) {
    if (!wave.in_flight()) continue;
    reader_.keep(wave,
                 [this](const ReadJob& job) { return wanted_[static_cast<std::size_t>(unit_of(job))] != 0; });
  }
  // From here on only what is wanted has a place: the others are neither waited for by name nor found.
  for (const std::int32_t unit : chosen_)
    if (wanted_[static_cast<std::size_t>(unit)] == 0) place_of_[static_cast<std::size_t>(unit)] = -1;
  for (const std::int32_t unit : active) wanted_[static_cast<std::size_t>(unit)] = 0;
}

void Prefetch::finish() {
  std::exception_ptr error;
  for (ReadBatch& wave : waves_) {
    if (!wave.in_flight()) continue;
    try {
      reader_.wait(wave);
    } catch (const CoreError&) {
      // Only a unit that is wanted may end a token.
      for (const ReadJob& job : wave.jobs)
        if (!job.landed && has(unit_of(job))) error = std::current_exception();
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
  for (const std::int32_t unit : chosen_) place_of_[static_cast<std::size_t>(unit)] = -1;
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
