#include "model/token_table.h"

#include <algorithm>

namespace flashllm {

namespace {

NeuronCacheOptions options_of(const RowSource& rows, std::int32_t kept) {
  NeuronCacheOptions options;
  options.units = rows.units;
  options.capacity = kept;
  options.stride = rows.stride;
  options.policy = "frequency";
  return options;
}

}  // namespace

TokenTable::TokenTable(const RowSource& rows, RowCodec codec, std::size_t columns, std::int32_t kept,
                       std::byte* memory, Reader& reader, const DirectFile& file, SimdLevel level)
    : rows_(rows),
      codec_(codec),
      columns_(columns),
      cache_(options_of(rows, kept), memory, nullptr),
      reader_(reader),
      file_(file),
      level_(level) {}

void TokenTable::request(const Token* tokens, std::size_t count) {
  ids_.clear();
  for (std::size_t t = 0; t < count; ++t) {
    ids_.push_back(tokens[t].id < rows_.units.num_rows ? tokens[t].id : 0);
    cache_.observe({ids_.back()});
  }
  wanted_ = ids_;
  std::sort(wanted_.begin(), wanted_.end());
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
  end_ = 0;
  admit();
}

// As many of the next as there is room for.
void TokenTable::admit() {
  first_ = end_;
  end_ = std::min(first_ + cache_.part_size(), wanted_.size());
  cache_.admit(wanted_.data() + first_, wanted_.data() + end_);
  is_open_ = true;
  batch_.jobs.clear();
  for (const std::int32_t id : cache_.misses()) rows_.add_jobs(id, cache_.rows(id), batch_.jobs);
  if (batch_.jobs.empty()) return;
  reader_.submit(batch_, file_);
  reader_.start();
}

void TokenTable::take(const std::function<void(std::size_t token, float* row)>& call, FfnCounters& counters) {
  std::vector<float> row(columns_);
  for (;;) {
    if (batch_.in_flight()) {
      reader_.wait(batch_);
      counters.add(batch_.stats());
    }
    RowMatrix one;
    one.columns = columns_;
    one.codec = codec_;
    for (std::size_t t = 0; t < ids_.size(); ++t) {
      if (ids_[t] < wanted_[first_] || ids_[t] > wanted_[end_ - 1]) continue;
      one.data = cache_.rows(ids_[t]);
      widen_row(one, 0, row.data(), level_);
      call(t, row.data());
    }
    cache_.end_part();
    is_open_ = false;
    if (end_ == wanted_.size()) return;
    admit();
  }
}

void TokenTable::give_up() noexcept {
  if (!is_open_) return;
  reader_.settle(batch_);
  cache_.discard_part();
  is_open_ = false;
}

}  // namespace flashllm
