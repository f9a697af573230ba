#include "model/sequence_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "io/error.h"

namespace flashllm {

namespace {

constexpr std::size_t kSystemPage = 4096;

constexpr std::size_t kCheckpoints = 2;    // of a sequence: the first, which others may share, and the last
constexpr std::size_t kPromptTokens = 16;  // of a pass that leaves a checkpoint
constexpr std::size_t kMargin = kKvBlock;  // positions behind a window that are kept: for small steps back

std::size_t pages_of(std::size_t length) { return (length + kKvBlock - 1) / kKvBlock; }

// That n positions touch wherever they begin.
std::size_t pages_touched(std::size_t n) { return (n + kKvBlock - 2) / kKvBlock + 1; }

}  // namespace

std::size_t StateShape::Kind::page_nbytes() const {
  return (layers * layer_nbytes() + kSystemPage - 1) / kSystemPage * kSystemPage;
}

std::size_t StateShape::Kind::first_page(std::size_t position) const {
  return layer.window == 0 || position < layer.window ? 0 : (position + 1 - layer.window) / kKvBlock;
}

StateShape::StateShape(const std::vector<LayerKv>& layers, std::size_t context, std::size_t part_tokens,
                       Dtype dtype)
    : context_(context), part_tokens_(part_tokens), dtype_(dtype) {
  require(!layers.empty() && context != 0 && part_tokens != 0, "a KV cache's sizes must not be zero");
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 2;
  for (const LayerKv& layer : layers) {
    require(layer.kv_heads != 0 && layer.head_dim != 0, "a KV cache's sizes must not be zero");
    std::size_t nbytes = 1;
    for (const std::size_t factor : {layers.size(), layer.kv_heads, layer.head_dim, context + kKvBlock,
                                     2 * sizeof(float) * kSystemPage}) {
      require(nbytes <= kMost / factor, "a KV cache of these sizes exceeds the address space");
      nbytes *= factor;
    }
    const auto same =
        std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& kind) { return kind.layer == layer; });
    const auto kind = static_cast<std::size_t>(same - kinds_.begin());
    if (same == kinds_.end()) kinds_.push_back({layer, 0, layer.head_dim * dtype_nbytes(dtype)});
    layers_.push_back({kind, kinds_[kind].layers++});
  }
}

std::size_t StateShape::block_nbytes() const {
  std::size_t sum = 0;
  for (const Kind& kind : kinds_) sum += kind.page_nbytes();
  return sum;
}

std::size_t StateShape::pass_pages(const Kind& kind, std::size_t tokens) const {
  const std::size_t pages = pages_of(tokens);
  if (kind.layer.window == 0) return pages;
  return std::min(pages, pages_touched(std::min(kind.layer.window, context_) + kMargin + part_tokens_));
}

std::size_t StateShape::nbytes(std::size_t length) const {
  std::size_t sum = 0;
  for (const Kind& kind : kinds_) {
    std::size_t pages = pages_of(length);
    if (kind.layer.window != 0) {
      const std::size_t window = std::min(kind.layer.window, context_);
      pages = std::min(pages, pages_touched(window + kMargin) + pass_pages(kind, length) +
                                  kCheckpoints * pages_of(window));
    }
    sum += pages * kind.page_nbytes();
  }
  return sum;
}

StatePool::StatePool(const StateShape& shape) : shape_(shape) {
  for (const StateShape::Kind& kind : shape_.kinds())
    pools_.push_back(std::make_shared<PagePool>(kind.page_nbytes(), shape_.max_pages()));
}

std::size_t StatePool::nbytes() const {
  std::size_t sum = 0;
  for (const auto& pool : pools_) sum += pool->nbytes();
  return sum;
}

void SequenceState::Table::set(std::size_t index, Page page) {
  if (index >= pages.size()) resize(index + 1);
  addresses[index] = page.get();
  pages[index] = std::move(page);
}

void SequenceState::Table::resize(std::size_t count) {
  pages.resize(count);
  addresses.resize(count, nullptr);
}

SequenceState::SequenceState(std::shared_ptr<const StatePool> pool)
    : pool_(std::move(pool)),
      kernels_(kernel_table(best_simd_level(), shape().dtype())),
      tables_(shape().kinds().size()) {}

// The first page that is not given up while queries are at `position` or behind it.
std::size_t SequenceState::first_kept(std::size_t kind, std::size_t position) const {
  return this->kind(kind).first_page(position - std::min(position, kMargin));
}

// Whether the page of the next position is somebody else's too, and is written on the way to `length`.
bool SequenceState::must_copy(const Table& table, std::size_t length) const {
  return length > length_ && length_ % kKvBlock != 0 && table.pages[length_ / kKvBlock].use_count() > 1;
}

std::ptrdiff_t SequenceState::nbytes_to_add(std::size_t length) const {
  std::ptrdiff_t sum = 0;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const Table& table = tables_[i];
    std::size_t added = must_copy(table, length) ? 1 : 0, given_up = 0;
    if (pages_of(length) > table.pages.size())
      added += shape().pass_pages(kind(i), length - table.pages.size() * kKvBlock);
    for (std::size_t page = 0; page < first_kept(i, length_); ++page)
      given_up += table.pages[page].use_count() == 1 ? 1 : 0;
    sum += (static_cast<std::ptrdiff_t>(added) - static_cast<std::ptrdiff_t>(given_up)) *
           static_cast<std::ptrdiff_t>(kind(i).page_nbytes());
  }
  return sum;
}

// Pages that queries from `from` on do not see, but those that were there when the pass began.
void SequenceState::give_up(std::size_t from) {
  for (std::size_t i = 0; i < tables_.size(); ++i)
    for (std::size_t page = from == start_ ? 0 : pages_of(start_); page < first_kept(i, from); ++page)
      tables_[i].set(page, nullptr);
}

void SequenceState::reserve(std::size_t length, std::size_t from) {
  require(from >= length_ && from <= length && length <= shape().context(),
          "a KV cache for " + std::to_string(shape().context()) + " tokens cannot hold " +
              std::to_string(length));
  if (!in_pass_) start_ = length_;
  in_pass_ = true;
  give_up(from);
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    Table& table = tables_[i];
    PagePool& pool = pool_->of_kind(i);
    if (must_copy(table, length)) {
      const std::size_t last = length_ / kKvBlock;
      Page copy = pool.take();
      std::memcpy(copy.get(), table.addresses[last], pool.page_nbytes());
      table.set(last, std::move(copy));
    }
    while (table.pages.size() < pages_of(length)) table.set(table.pages.size(), pool.take());
  }
}

void SequenceState::append(std::size_t layer, std::size_t position, const float* key, const float* value) {
  require(layer < shape().layers().size() && position >= length_ &&
              position / kKvBlock < tables_[shape().layers()[layer].kind].pages.size(),
          "a position of the KV cache must be reserved before it is written");
  const StateShape::Kind& of_layer = kind(shape().layers()[layer].kind);
  const KvView rows = view(layer);
  const std::size_t dim = of_layer.layer.head_dim;
  for (std::size_t h = 0; h < of_layer.layer.kv_heads; ++h) {
    std::byte* to = const_cast<std::byte*>(rows.key_rows(h, position / kKvBlock)) +
                    position % kKvBlock * of_layer.row_nbytes;
    kernels_.from_f32(key + h * dim, dim, to);
    kernels_.from_f32(value + h * dim, dim, to + rows.value_offset);
  }
}

KvView SequenceState::view(std::size_t layer) const {
  require(layer < shape().layers().size(), "a KV cache's layer beyond those there are");
  const StateShape::Place& place = shape().layers()[layer];
  const StateShape::Kind& of_layer = kind(place.kind);
  return {tables_[place.kind].addresses.data(), place.index * of_layer.layer_nbytes(), of_layer.head_nbytes(),
          of_layer.layer.kv_heads * of_layer.head_nbytes()};
}

void SequenceState::commit(std::size_t length) {
  require(length >= length_ && length <= shape().context() && pages_of(length) <= tables_[0].pages.size(),
          "a KV cache can commit only positions that it has reserved");
  length_ = length;
  in_pass_ = false;
  if (length_ - start_ >= kPromptTokens) take_checkpoint();
}

void SequenceState::take_checkpoint() {
  Checkpoint made{length_ / kKvBlock * kKvBlock, {}};
  if (made.length == 0 || (!checkpoints_.empty() && made.length <= checkpoints_.back().length)) return;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    made.pages.emplace_back();
    if (kind(i).layer.window == 0) continue;
    const auto pages = tables_[i].pages.begin();
    made.pages.back().assign(pages + static_cast<std::ptrdiff_t>(kind(i).first_page(made.length)),
                             pages + static_cast<std::ptrdiff_t>(made.length / kKvBlock));
  }
  if (checkpoints_.size() == kCheckpoints) checkpoints_.pop_back();
  checkpoints_.push_back(std::move(made));
}

// Whether every page that a query at `length` sees is there.
bool SequenceState::holds(std::size_t length) const {
  for (std::size_t i = 0; i < tables_.size(); ++i)
    for (std::size_t page = kind(i).first_page(length); page < pages_of(length); ++page)
      if (tables_[i].pages[page] == nullptr) return false;
  return true;
}

const SequenceState::Checkpoint* SequenceState::last_checkpoint(std::size_t length) const {
  const Checkpoint* last = nullptr;
  for (const Checkpoint& each : checkpoints_)
    if (each.length <= length) last = &each;
  return last;
}

std::size_t SequenceState::can_keep(std::size_t length) const {
  require(length <= length_,
          "a KV cache of " + std::to_string(length_) + " tokens cannot keep " + std::to_string(length));
  if (holds(length)) return length;
  const Checkpoint* last = last_checkpoint(length);
  const std::size_t kept = last == nullptr ? 0 : last->length;
  return start_ <= length && start_ > kept && holds(start_) ? start_ : kept;
}

std::size_t SequenceState::keep(std::size_t length) {
  length = can_keep(length);
  if (!holds(length)) {
    const Checkpoint& last = *last_checkpoint(length);
    for (std::size_t i = 0; i < tables_.size(); ++i)
      for (std::size_t n = 0; n < last.pages[i].size(); ++n)
        tables_[i].set(length / kKvBlock - last.pages[i].size() + n, last.pages[i][n]);
  }
  while (!checkpoints_.empty() && checkpoints_.back().length > length) checkpoints_.pop_back();
  for (Table& table : tables_) table.resize(std::min(table.pages.size(), pages_of(length)));
  start_ = std::min(start_, length);
  in_pass_ = false;
  return length_ = length;
}

void SequenceState::copy_from(const SequenceState& other) {
  require(pool_ == other.pool_, "a KV cache can be copied only to one of the same model");
  if (this == &other) return;
  tables_ = other.tables_;
  checkpoints_ = other.checkpoints_;
  length_ = start_ = other.length_;
  in_pass_ = false;
  for (Table& table : tables_) table.resize(pages_of(length_));
  give_up(length_);
}

SequenceState::Spans SequenceState::save() const {
  Spans spans(tables_.size());
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const std::vector<Page>& pages = tables_[i].pages;
    std::size_t first = pages_of(length_);
    while (first > first_kept(i, length_) && pages[first - 1] != nullptr) --first;
    for (; first < pages_of(length_); ++first)
      spans[i].push_back({pages[first].get(), kind(i).page_nbytes()});
  }
  return spans;
}

SequenceState::Spans SequenceState::restore(std::size_t length, const std::vector<std::size_t>& pages) {
  require(length_ == 0 && length <= shape().context() && pages.size() == tables_.size(),
          "only an empty KV cache can be restored, to one of the same model");
  for (std::size_t i = 0; i < tables_.size(); ++i)
    require(pages[i] <= pages_of(length) - first_kept(i, length) &&
                pages[i] >= pages_of(length) - kind(i).first_page(length),
            "these are not the pages of a KV cache of " + std::to_string(length) + " tokens");
  Spans spans(tables_.size());
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    tables_[i].resize(0);
    tables_[i].resize(pages_of(length));
    for (std::size_t page = pages_of(length) - pages[i]; page < pages_of(length); ++page) {
      tables_[i].set(page, pool_->of_kind(i).take());
      spans[i].push_back({tables_[i].pages[page].get(), kind(i).page_nbytes()});
    }
  }
  start_ = length;
  return spans;
}

}  // namespace flashllm
