#include "sequence/sequence_state.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "io/error.h"
#include "io/memory.h"
#include "kernels/scratch.h"

namespace flashllm {

namespace {

constexpr std::size_t kCheckpoints = 3;    // of a sequence: the first, which others may share, and two more
constexpr std::size_t kPromptTokens = 16;  // of a pass that leaves a checkpoint
constexpr std::size_t kMargin = kPageTokens;  // positions behind a window that are kept: for small steps back

std::size_t pages_of(std::size_t length) { return (length + kPageTokens - 1) / kPageTokens; }

// That n positions touch wherever they begin.
std::size_t pages_touched(std::size_t n) { return (n + kPageTokens - 2) / kPageTokens + 1; }

}  // namespace

std::size_t StateShape::Kind::page_nbytes(bool is_packed) const {
  const std::size_t nbytes = layers * (is_packed ? format.packed_nbytes() : format.plain_nbytes());
  return round_up(nbytes, system_page());
}

std::size_t StateShape::Kind::first_page(std::size_t position) const {
  return layer.window == 0 || position < layer.window ? 0 : (position + 1 - layer.window) / kPageTokens;
}

StateShape::StateShape(const std::vector<LayerKv>& layers, std::size_t context, std::size_t part_tokens,
                       Dtype dtype, int bits)
    : context_(context), part_tokens_(part_tokens), dtype_(dtype) {
  require(!layers.empty() && context != 0 && part_tokens != 0, "a KV cache's sizes must not be zero");
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max() / 2;
  std::size_t floats = 0;
  for (const LayerKv& layer : layers) {
    require(layer.state_floats <= kMost / sizeof(float) / layers.size(),
            "a state of this size exceeds the address space");
    if (layer.shared >= 0) {
      require(static_cast<std::size_t>(layer.shared) < layers_.size(),
              "a layer shares what an earlier one has");
      layers_.push_back(layers_[static_cast<std::size_t>(layer.shared)]);
      continue;
    }
    layers_.push_back({kNone, 0, layer.state_floats == 0 ? kNone : floats});
    floats += layer.state_floats;
    if (layer.kv_heads == 0) continue;
    require(layer.head_dim != 0, "a KV cache's sizes must not be zero");
    std::size_t nbytes = 1;
    for (const std::size_t factor : {layers.size(), layer.kv_heads, layer.head_dim, context + kPageTokens,
                                     2 * sizeof(float) * system_page()}) {
      require(nbytes <= kMost / factor, "a KV cache of these sizes exceeds the address space");
      nbytes *= factor;
    }
    const auto same =
        std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& kind) { return kind.layer == layer; });
    const auto kind = static_cast<std::size_t>(same - kinds_.begin());
    if (same == kinds_.end())
      kinds_.push_back({layer, PageFormat(layer.kv_heads, layer.head_dim, dtype, bits, layer.keys_alone)});
    layers_.back().kind = kind;
    layers_.back().index = kinds_[kind].layers++;
  }
  require(!kinds_.empty(), "a sequence's state needs a layer with keys and values");
  state_nbytes_ = round_up(floats * sizeof(float), system_page());
}

const StateShape::Place& StateShape::place(std::size_t layer) const {
  require(layer < layers_.size() && layers_[layer].kind != kNone, "there is no such layer of a KV cache");
  return layers_[layer];
}

std::size_t StateShape::page_nbytes() const {
  std::size_t sum = 0;
  for (const Kind& kind : kinds_) sum += kind.page_nbytes(false);
  return sum;
}

std::size_t StateShape::held_pages(const Kind& kind, bool is_packed, std::size_t pages,
                                   std::size_t together) const {
  if (!is_packed && kind.format.is_packed()) return std::min(pages, pages_touched(together));
  if (kind.layer.window == 0) return pages;
  return std::min(pages, pages_touched(std::min(kind.layer.window, context_) + kMargin + together));
}

std::size_t StateShape::nbytes(std::size_t length) const {
  std::size_t sum = 0;
  for (const Kind& kind : kinds_) {
    const bool is_packed = kind.format.is_packed();
    const std::size_t all = pages_of(length);
    std::size_t pages = all;
    if (kind.layer.window != 0) {
      const std::size_t window = std::min(kind.layer.window, context_);
      pages =
          std::min(pages, pages_touched(window + kMargin) + held_pages(kind, is_packed, all, part_tokens_) +
                              kCheckpoints * pages_of(window));
    }
    sum += pages * kind.page_nbytes(is_packed);
    // And plain the page that the last pass began in, and those of this pass.
    if (is_packed)
      sum += std::min(all, 1 + held_pages(kind, false, all, part_tokens_)) * kind.page_nbytes(false);
  }
  // The states before and after a pass (has_spare_states), and those of checkpoints: the old ones, and the
  // one that the pass leaves where it ends.
  return sum + (2 + (length < kPageTokens ? 0 : kCheckpoints + 1)) * state_nbytes_;
}

StatePool::StatePool(const StateShape& shape) : shape_(shape) {
  for (const StateShape::Kind& kind : shape_.kinds())
    for (const bool is_packed : {false, true})
      pools_.push_back(std::make_shared<PagePool>(kind.page_nbytes(is_packed), shape_.max_pages()));
  if (shape_.state_nbytes() != 0) pools_.push_back(std::make_shared<PagePool>(shape_.state_nbytes(), 4));
}

std::size_t StatePool::nbytes() const {
  std::size_t sum = 0;
  for (const auto& pool : pools_) sum += pool->nbytes();
  return sum;
}

void SequenceState::Pages::set(std::size_t index, Page page) {
  if (index >= size()) resize(index + 1);
  addresses[index] = page.get();
  pages[index] = std::move(page);
}

void SequenceState::Pages::resize(std::size_t count) {
  pages.resize(count);
  addresses.resize(count, nullptr);
}

std::size_t SequenceState::Pages::held_alone(std::size_t end) const {
  std::size_t count = 0;
  for (std::size_t i = 0; i < std::min(end, size()); ++i) count += pages[i].use_count() == 1 ? 1 : 0;
  return count;
}

SequenceState::SequenceState(std::shared_ptr<const StatePool> pool)
    : pool_(std::move(pool)), tables_(shape().kinds().size()) {}

// The first page that is not given up while queries are at `position` or behind it.
std::size_t SequenceState::first_kept(std::size_t kind, std::size_t position) const {
  return this->kind(kind).first_page(position - std::min(position, kMargin));
}

// The same of plain pages.
std::size_t SequenceState::first_plain(std::size_t kind, std::size_t position) const {
  return shape().is_packed() ? position / kPageTokens : first_kept(kind, position);
}

// As it is when positions below `length` are there.
const Page& SequenceState::page(std::size_t kind, std::size_t index, std::size_t length) const {
  const bool is_packed = shape().is_packed() && index < length / kPageTokens;
  return (is_packed ? tables_[kind].packed : tables_[kind].plain).pages[index];
}

// Whether the page of the next position is somebody else's too, and is written on the way to `length`.
bool SequenceState::must_copy(const Pages& plain, std::size_t length) const {
  return length > length_ && length_ % kPageTokens != 0 && plain.pages[length_ / kPageTokens].use_count() > 1;
}

std::ptrdiff_t SequenceState::nbytes_to_add(std::size_t length, std::size_t together) const {
  together = std::max(together, shape().part_tokens());
  const auto nbytes = [&](std::size_t i, bool is_packed, std::size_t added, std::size_t given_up) {
    return (static_cast<std::ptrdiff_t>(added) - static_cast<std::ptrdiff_t>(given_up)) *
           static_cast<std::ptrdiff_t>(kind(i).page_nbytes(is_packed));
  };
  const auto more = [](std::size_t pages, const Pages& held) { return pages - std::min(pages, held.size()); };
  std::ptrdiff_t sum = 0;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    const auto& [plain, packed] = tables_[i];
    const std::size_t copied = must_copy(plain, length) ? 1 : 0;
    const auto added = [&](std::size_t new_pages, bool is_packed) {
      const std::size_t held = shape().held_pages(kind(i), is_packed, new_pages, together);
      const std::size_t marked = is_packed == shape().is_packed() ? marks_.size() : 0;
      return std::min(new_pages, held + marked * pages_of(std::min(kind(i).layer.window, shape().context())));
    };
    sum += nbytes(i, false, copied + added(more(pages_of(length), plain), false),
                  plain.held_alone(first_plain(i, length_)));
    if (shape().is_packed())
      sum += nbytes(i, true, added(more(length / kPageTokens, packed), true),
                    packed.held_alone(first_kept(i, length_)));
  }
  if (shape().state_nbytes() != 0 && length > length_) {
    std::size_t states = (has_spare_states() ? 0 : 1) + (length - length_ >= kPromptTokens ? 1 : 0);
    for (const std::size_t mark : marks_) states += mark > length_ && mark <= length ? 1 : 0;
    sum += static_cast<std::ptrdiff_t>(states * shape().state_nbytes());
  }
  return sum;
}

std::size_t SequenceState::nbytes_alone() const {
  struct Held {
    const std::byte* page;
    long holders;
    std::size_t nbytes;
  };
  std::vector<Held> held;
  const auto add = [&](const std::vector<Page>& pages, std::size_t i, bool is_packed) {
    for (const Page& page : pages)
      if (page != nullptr) held.push_back({page.get(), page.use_count(), kind(i).page_nbytes(is_packed)});
  };
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    add(tables_[i].plain.pages, i, false);
    add(tables_[i].packed.pages, i, true);
    for (const Checkpoint& each : checkpoints_) add(each.pages[i], i, shape().is_packed());
  }
  std::vector<const Page*> states{&states_, &states_before_};
  for (const Checkpoint& each : checkpoints_) states.push_back(&each.states);
  for (const Page* page : states)
    if (*page != nullptr) held.push_back({page->get(), page->use_count(), shape().state_nbytes()});
  std::sort(held.begin(), held.end(), [](const Held& a, const Held& b) { return a.page < b.page; });
  std::size_t sum = 0;
  for (std::size_t begin = 0, end = 0; begin < held.size(); begin = end) {
    while (end < held.size() && held[end].page == held[begin].page) ++end;
    if (static_cast<std::size_t>(held[begin].holders) == end - begin) sum += held[begin].nbytes;
  }
  return sum;
}

void SequenceState::mark(std::vector<std::size_t> positions) {
  std::sort(positions.begin(), positions.end());
  marks_ = std::move(positions);
}

// Pages that queries from `from` on do not see, but those that were there when the pass began.
void SequenceState::give_up(std::size_t from) {
  const bool begins = from == start_;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    auto& [plain, packed] = tables_[i];
    for (std::size_t page = begins ? 0 : pages_of(start_); page < first_plain(i, from); ++page)
      plain.set(page, nullptr);
    if (!shape().is_packed()) continue;
    for (std::size_t page = begins ? 0 : start_ / kPageTokens; page < first_kept(i, from); ++page)
      packed.set(page, nullptr);
  }
}

void SequenceState::reserve(std::size_t length, std::size_t from) {
  require(from >= length_ && from <= length && length <= shape().context(),
          "a KV cache for " + std::to_string(shape().context()) + " tokens cannot hold " +
              std::to_string(length));
  const bool begins = !in_pass_;  // later, what makes a page another's is a checkpoint of whole pages
  if (begins) start_ = length_;
  in_pass_ = true;
  if (shape().state_nbytes() != 0) reserve_states(length, from, begins);
  take_checkpoints(from);
  give_up(from);
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    auto& [plain, packed] = tables_[i];
    PagePool& pool = pool_->of_kind(i, false);
    if (begins && must_copy(plain, length)) {
      const std::size_t last = length_ / kPageTokens;
      Page copy = pool.take();
      std::memcpy(copy.get(), plain.addresses[last], pool.page_nbytes());
      plain.set(last, std::move(copy));
    }
    while (plain.size() < pages_of(length)) plain.set(plain.size(), pool.take());
    while (shape().is_packed() && packed.size() < length / kPageTokens)
      packed.set(packed.size(), pool_->of_kind(i, true).take());
  }
}

// Where the states of a stretch of a pass are recorded, whose positions are from `from` to `length`: at
// marks, and at the last whole page, should this be the pass's end.
std::vector<std::size_t> SequenceState::recorded_of(std::size_t length, std::size_t from) const {
  std::vector<std::size_t> positions;
  const auto add = [&](std::size_t position) {
    position = position / kPageTokens * kPageTokens;
    if (position >= from && position <= length && position > length_) positions.push_back(position);
  };
  for (const std::size_t mark : marks_)
    if (mark <= length) add(mark);
  if (length - length_ >= kPromptTokens) add(length);
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

void SequenceState::reserve_states(std::size_t length, std::size_t from, bool begins) {
  PagePool& pool = pool_->of_states();
  if (begins) {
    states_now_ = has_spare_states() ? std::move(states_before_) : pool.take();
    if (states_ == nullptr) std::memset(states_now_.get(), 0, pool.page_nbytes());  // others may have had it
    states_before_ = states_;
  }
  for (const std::size_t position : recorded_of(length, from)) {
    Page& page = recorded_[position];
    if (page != nullptr) continue;
    page = pool.take();
    if (position == from) std::memcpy(page.get(), states_now_.get(), pool.page_nbytes());
  }
}

// Whether the next pass can use the memory of the states before the last one.
bool SequenceState::has_spare_states() const {
  return states_ != nullptr && states_before_ != nullptr && states_before_ != states_ &&
         states_before_.use_count() == 1;
}

SequenceState::Recurrent SequenceState::recurrent(std::size_t layer, std::size_t position) const {
  require(layer < shape().layers().size() && shape().layers()[layer].state != StateShape::kNone &&
              states_now_ != nullptr,
          "a state must be reserved before it is changed");
  const std::size_t at = shape().layers()[layer].state;
  float* now = reinterpret_cast<float*>(states_now_.get()) + at;
  const bool begins = position == length_ && states_ != nullptr;
  return {begins ? reinterpret_cast<const float*>(states_.get()) + at : now, now};
}

std::size_t SequenceState::next_recorded(std::size_t from, std::size_t end) const {
  const auto next = recorded_.upper_bound(from);
  return next == recorded_.end() ? end : std::min(end, next->first);
}

void SequenceState::record(std::size_t layer, std::size_t position, std::size_t offset, std::size_t floats) {
  const auto found = recorded_.find(position);
  if (found == recorded_.end()) return;
  const std::size_t at = shape().layers()[layer].state + offset;
  std::memcpy(found->second.get() + at * sizeof(float), states_now_.get() + at * sizeof(float),
              floats * sizeof(float));
}

void SequenceState::append(std::size_t layer, std::size_t position, const float* key, const float* value) {
  const StateShape::Place& place = shape().place(layer);
  require(position >= length_ && position / kPageTokens < tables_[place.kind].plain.size(),
          "a position of the KV cache must be reserved before it is written");
  const PageFormat& format = kind(place.kind).format;
  std::byte* page = tables_[place.kind].plain.pages[position / kPageTokens].get();
  format.write(key, value, position, page + place.index * format.plain_nbytes());
}

bool SequenceState::seal(std::size_t layer, std::size_t page) {
  const StateShape::Place& place = shape().place(layer);
  const PageFormat& format = kind(place.kind).format;
  require(format.is_packed() && page < tables_[place.kind].packed.size(), "only a full page is packed");
  std::byte* to = tables_[place.kind].packed.pages[page].get() + place.index * format.packed_nbytes();
  return format.pack(view(layer), page, to, best_simd_level());
}

KvView SequenceState::view(std::size_t layer) const {
  const StateShape::Place& place = shape().place(layer);
  const PageFormat& format = kind(place.kind).format;
  KvView view = format.view(tables_[place.kind].plain.addresses.data(), place.index * format.plain_nbytes());
  if (!format.is_packed()) return view;
  view.format = &format;
  view.packed_pages = tables_[place.kind].packed.addresses.data();
  view.packed_offset = place.index * format.packed_nbytes();
  return view;
}

void SequenceState::commit(std::size_t length, bool as_prompt) {
  require(length >= length_ && length <= shape().context() && pages_of(length) <= tables_[0].plain.size(),
          "a KV cache can commit only positions that it has reserved");
  take_checkpoints(length);
  if (length - start_ >= kPromptTokens) take_checkpoint(length / kPageTokens * kPageTokens);
  for (Checkpoint& made : of_pass_) {
    if (checkpoints_.size() == kCheckpoints) checkpoints_.erase(checkpoints_.begin() + 1);
    checkpoints_.push_back(std::move(made));
  }
  of_pass_.clear();
  recorded_.clear();
  if (length > length_) states_ = std::move(states_now_);
  if (as_prompt && prompted_ == length_) prompted_ = length;
  states_now_ = nullptr;
  length_ = length;
  in_pass_ = false;
}

// Those of the marks that the pass has left behind when queries are at `from`.
void SequenceState::take_checkpoints(std::size_t from) {
  const auto passed = std::upper_bound(marks_.begin(), marks_.end(), from);
  for (auto mark = marks_.begin(); mark != passed; ++mark)
    if (*mark > length_) take_checkpoint(*mark / kPageTokens * kPageTokens);
  marks_.erase(marks_.begin(), passed);
}

void SequenceState::take_checkpoint(std::size_t length) {
  const std::vector<Checkpoint>& others = of_pass_.empty() ? checkpoints_ : of_pass_;
  if (length == 0 || (!others.empty() && length <= others.back().length)) return;
  Checkpoint made{length, {}, nullptr};
  if (shape().state_nbytes() != 0) {
    const auto states = recorded_.find(length);
    if (states == recorded_.end()) return;
    made.states = states->second;
  }
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    made.pages.emplace_back();
    if (kind(i).layer.window == 0) continue;
    for (std::size_t at = kind(i).first_page(length); at < length / kPageTokens; ++at) {
      if (page(i, at, length) == nullptr) return;
      made.pages.back().push_back(page(i, at, length));
    }
  }
  of_pass_.push_back(std::move(made));
}

// The recurrent states there, where they are kept but for checkpoints.
const Page* SequenceState::states_at(std::size_t length) const {
  static const Page kZero;
  return length == length_ || shape().state_nbytes() == 0 ? &states_
         : length == start_                               ? &states_before_
         : length == 0                                    ? &kZero
                                                          : nullptr;
}

// Whether every page that a query at `length` sees is there.
bool SequenceState::holds(std::size_t length) const {
  for (std::size_t i = 0; i < tables_.size(); ++i)
    for (std::size_t at = kind(i).first_page(length); at < pages_of(length); ++at)
      if (page(i, at, length) == nullptr) return false;
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
  if (states_at(length) != nullptr && holds(length)) return length;
  const Checkpoint* last = last_checkpoint(length);
  std::size_t kept = last == nullptr ? 0 : last->length;
  for (const std::size_t other : {start_, length / kPageTokens * kPageTokens})
    if (other <= length && other > kept && states_at(other) != nullptr && holds(other)) kept = other;
  return kept;
}

std::size_t SequenceState::keep(std::size_t length) {
  length = can_keep(length);
  if (const Page* states = states_at(length); states != nullptr && holds(length)) {
    states_ = *states;
  } else {
    const Checkpoint& last = *last_checkpoint(length);
    states_ = last.states;
    for (std::size_t i = 0; i < tables_.size(); ++i)
      for (std::size_t n = 0; n < last.pages[i].size(); ++n)
        (shape().is_packed() ? tables_[i].packed : tables_[i].plain)
            .set(length / kPageTokens - last.pages[i].size() + n, last.pages[i][n]);
  }
  while (!checkpoints_.empty() && checkpoints_.back().length > length) checkpoints_.pop_back();
  cut(length);
  if (length <= start_) states_before_ = states_;
  start_ = std::min(start_, length);
  prompted_ = std::min(prompted_, length);
  return length_ = length;
}

void SequenceState::cut(std::size_t length) {
  in_pass_ = false;
  of_pass_.clear();
  recorded_.clear();
  states_now_ = nullptr;
  for (auto& [plain, packed] : tables_) {
    plain.resize(pages_of(length));
    if (shape().is_packed()) packed.resize(length / kPageTokens);
  }
}

void SequenceState::copy_from(const SequenceState& other) {
  require(pool_ == other.pool_, "a KV cache can be copied only to one of the same model");
  if (this == &other) return;
  tables_ = other.tables_;
  checkpoints_ = other.checkpoints_;
  length_ = start_ = other.length_;
  prompted_ = other.prompted_;
  states_ = states_before_ = other.states_;
  cut(length_);
  give_up(length_);
}

SequenceState::Spans SequenceState::save() const {
  Spans spans(tables_.size());
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    std::size_t at = pages_of(length_);
    while (at > first_kept(i, length_) && page(i, at - 1, length_) != nullptr) --at;
    for (; at < pages_of(length_); ++at)
      spans[i].push_back({page(i, at, length_).get(),
                          kind(i).page_nbytes(shape().is_packed() && at < length_ / kPageTokens)});
  }
  if (states_ != nullptr) spans.push_back({{states_.get(), shape().state_nbytes()}});
  return spans;
}

SequenceState::Spans SequenceState::restore(std::size_t length, const std::vector<std::size_t>& pages,
                                            std::size_t prompted) {
  const bool has_states = shape().state_nbytes() != 0 && length != 0;
  require(length_ == 0 && length <= shape().context() &&
              pages.size() == tables_.size() + (has_states ? 1 : 0) && (!has_states || pages.back() == 1),
          "only an empty KV cache can be restored, to one of the same model");
  for (std::size_t i = 0; i < tables_.size(); ++i)
    require(pages[i] <= pages_of(length) - first_kept(i, length) &&
                pages[i] >= pages_of(length) - kind(i).first_page(length),
            "these are not the pages of a KV cache of " + std::to_string(length) + " tokens");
  cut(0);
  cut(length);
  Spans spans(tables_.size());
  for (std::size_t i = 0; i < tables_.size(); ++i)
    for (std::size_t at = pages_of(length) - pages[i]; at < pages_of(length); ++at) {
      const bool is_packed = shape().is_packed() && at < length / kPageTokens;
      PagePool& pool = pool_->of_kind(i, is_packed);
      Pages& to = is_packed ? tables_[i].packed : tables_[i].plain;
      to.set(at, pool.take());
      spans[i].push_back({to.pages[at].get(), pool.page_nbytes()});
    }
  if (has_states) {
    states_now_ = pool_->of_states().take();
    spans.push_back({{states_now_.get(), shape().state_nbytes()}});
  }
  start_ = length;
  prompted_ = std::min(prompted, length);
  return spans;
}

}  // namespace flashllm
