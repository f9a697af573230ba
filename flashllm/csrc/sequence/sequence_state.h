// What a sequence leaves behind: the keys and values of every layer, in pages of kPageTokens positions by
// kind of layer. Pages come from a pool that sequences share, and are shared by those that hold the same
// tokens until one writes. Knows neither models nor the memory plan.
//
// A page holds keys and values of each layer of its kind (page_format.h). Where the shape has bits, a full
// page is packed, and plain only until the pass after the one that filled it begins.
//
// A pass: for each stretch of its tokens, which goes through all layers, reserve(...), append(...) each
// layer's new rows, seal(...) the pages that they fill, read through view(layer); then commit(length). A pass
// that fails ends with keep(length()).
//
// A layer with a window gives up the pages behind it, but for one, while a pass goes on; those that were
// there before the pass stay until the next one begins, so that the last pass can always be undone. A
// checkpoint keeps a window's pages as they were behind a prompt, or at a mark within it: keep(n) goes back
// to one where n's own are gone.
//
// Layers with a recurrent state have that in the place of keys and values: numbers that every position
// changes, those of all such layers in one block of memory. A pass writes those that follow into another,
// which commit() makes the sequence's; a pass that fails has changed nothing. The one before the last pass
// stays until the next begins. Such a state cannot be cut: keep(n) goes back to one of these, or to a
// checkpoint, whose state is written down by each layer as the pass comes by.
#pragma once

#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/page_format.h"
#include "sequence/page_pool.h"

namespace flashllm {

// What a layer keeps: of each position, and `state_floats` of all of them together; either may be nothing.
struct LayerKv {
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;
  std::size_t window = 0;   // positions that a query sees, its own included; 0: all before it
  bool keys_alone = false;  // whose first elements are the values
  std::size_t state_floats = 0;
  int shared = -1;  // the earlier layer whose keys and values are this one's, too; -1: it has its own

  bool operator==(const LayerKv& other) const {
    return kv_heads == other.kv_heads && head_dim == other.head_dim && window == other.window &&
           keys_alone == other.keys_alone;
  }
};

class StateShape {
 public:
  struct Kind {
    LayerKv layer;
    PageFormat format;                              // of a layer's part of a page
    std::size_t layers = 0;                         // that are alike
    std::size_t page_nbytes(bool is_packed) const;  // in whole pages of the system
    // The first page that a query at `position` sees.
    std::size_t first_page(std::size_t position) const;
  };
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  struct Place {
    std::size_t kind;   // of its keys and values; kNone: it has none
    std::size_t index;  // among the layers of the kind
    std::size_t state;  // the first float of its state; kNone: it has none
  };

  // `context`: positions at most; `part_tokens`: that a pass takes at a time, at least; `bits`: of packed
  // pages, 0 where there are none. Throws CoreError (usage) for a size of zero or beyond all memory, and bits
  // there are none of.
  StateShape(const std::vector<LayerKv>& layers, std::size_t context, std::size_t part_tokens, Dtype dtype,
             int bits = 0);

  const std::vector<Kind>& kinds() const { return kinds_; }
  const std::vector<Place>& layers() const { return layers_; }
  // Of a layer with keys and values; throws CoreError for another.
  const Place& place(std::size_t layer) const;
  const LayerKv& layer(std::size_t number) const { return kinds_[place(number).kind].layer; }
  std::size_t state_nbytes() const { return state_nbytes_; }  // of all recurrent states, in whole pages
  std::size_t context() const { return context_; }
  Dtype dtype() const { return dtype_; }
  bool is_packed() const { return kinds_[0].format.is_packed(); }
  std::size_t max_pages() const { return (context_ + kPageTokens - 1) / kPageTokens; }  // of a kind
  std::size_t page_nbytes() const;  // of a plain page of each kind
  std::size_t part_tokens() const { return part_tokens_; }
  // That a sequence holds at most on its way to `length`, without marks.
  std::size_t nbytes(std::size_t length) const;
  // Of so many new pages of a kind, plain or packed, those that a pass holds at once, at most, where it takes
  // `together` tokens at a time.
  std::size_t held_pages(const Kind& kind, bool is_packed, std::size_t pages, std::size_t together) const;

 private:
  std::vector<Kind> kinds_;
  std::vector<Place> layers_;
  std::size_t context_, part_tokens_, state_nbytes_ = 0;
  Dtype dtype_;
};

// Where sequences of one shape take their pages.
class StatePool {
 public:
  explicit StatePool(const StateShape& shape);

  const StateShape& shape() const { return shape_; }
  std::size_t nbytes() const;  // of all pages in use, each once
  PagePool& of_kind(std::size_t kind, bool is_packed) const {
    return *pools_[2 * kind + (is_packed ? 1 : 0)];
  }
  PagePool& of_states() const { return *pools_.back(); }  // of shapes that have any

 private:
  StateShape shape_;
  std::vector<std::shared_ptr<PagePool>> pools_;  // [kind][plain, packed], and that of states
};

class SequenceState {
 public:
  explicit SequenceState(std::shared_ptr<const StatePool> pool);
  SequenceState(const SequenceState&) = delete;
  SequenceState& operator=(const SequenceState&) = delete;

  const StateShape& shape() const { return pool_->shape(); }
  std::size_t length() const { return length_; }  // committed positions
  // Of them, those from the first on that were computed as a prompt's after nothing but such.
  std::size_t prompted() const { return prompted_; }
  // Bytes that a pass up to `length` takes from the pool at most, less what it gives up when it begins.
  // `together`: tokens that it takes at a time; 0: the shape's.
  std::ptrdiff_t nbytes_to_add(std::size_t length, std::size_t together = 0) const;

  // What would go back to the pool without this sequence.
  std::size_t nbytes_alone() const;

  // Passes that go beyond these positions leave a checkpoint before each, of whole pages.
  void mark(std::vector<std::size_t> positions);

  // Makes the positions from `from` to `length` writable, those before being written; queries that follow are
  // at `from` or behind it. Throws CoreError (usage) beyond the context.
  void reserve(std::size_t length, std::size_t from);
  void reserve(std::size_t length) { reserve(length, length_); }

  // Writes the key and the value [kv_heads, head_dim] of one reserved position, rounded to the dtype. Threads
  // may write different positions, layers or both.
  void append(std::size_t layer, std::size_t position, const float* key, const float* value);

  // Packs what a layer has of a full page. Returns whether all of it is finite; the pass must fail otherwise.
  [[nodiscard]] bool seal(std::size_t layer, std::size_t page);

  // Keys and values of a layer; valid until the next call that is not append or view.
  KvView view(std::size_t layer) const;

  // A layer's recurrent state before a position of the pass under way, and where the one behind it is to be:
  // elsewhere, where the pass begins there.
  struct Recurrent {
    const float* before;
    float* now;
  };
  Recurrent recurrent(std::size_t layer, std::size_t position) const;
  // The first position behind `from`, or `end`, at which a checkpoint wants the states as they are when the
  // positions before it have come by; and so many floats of a layer's, which are that now. Threads may record
  // different ones.
  std::size_t next_recorded(std::size_t from, std::size_t end) const;
  void record(std::size_t layer, std::size_t position, std::size_t offset, std::size_t floats);

  // The positions below `length`, all reserved and written, belong to the sequence from now on.
  void commit(std::size_t length, bool as_prompt = false);

  // How many of the first `length` committed positions can be kept: all where every window's pages are there,
  // the last one plain or full, and recurrent states are theirs; else those of whole pages, those before the
  // last pass or those of the last checkpoint, or none.
  std::size_t can_keep(std::size_t length) const;
  // Keeps those, and gives up all pages beyond them, reserved ones included. Returns can_keep(length).
  std::size_t keep(std::size_t length);

  // Becomes a copy of the committed positions of `other`, of the same pool. It takes no memory until one of
  // the two writes.
  void copy_from(const SequenceState& other);

  // The last pages of each kind up to the committed positions, and behind these the recurrent states, if any,
  // for whoever keeps their bytes elsewhere; what lies in pages behind those positions means nothing.
  struct Span {
    std::byte* data;
    std::size_t nbytes;
  };
  using Spans = std::vector<std::vector<Span>>;  // [kind][page]
  Spans save() const;

  // Empty, it gets so many last pages of each kind for `length` positions, whose bytes, as save() gave them,
  // are the caller's to write before commit(length). `prompted`: as it was. Throws CoreError (usage) where
  // that cannot be.
  Spans restore(std::size_t length, const std::vector<std::size_t>& pages, std::size_t prompted = 0);

 private:
  struct Pages {              // by number
    std::vector<Page> pages;  // nullptr: given up
    std::vector<const std::byte*> addresses;

    std::size_t size() const { return pages.size(); }
    void set(std::size_t index, Page page);
    void resize(std::size_t count);
    std::size_t held_alone(std::size_t end) const;  // of the pages before `end`
  };
  struct Table {  // of a kind
    Pages plain, packed;
  };
  struct Checkpoint {
    std::size_t length;  // whole pages
    std::vector<std::vector<Page>>
        pages;  // [kind]: those that a query at `length` sees, of kinds with a window
    Page states;
  };
  const StateShape::Kind& kind(std::size_t index) const { return shape().kinds()[index]; }
  std::size_t first_kept(std::size_t kind, std::size_t position) const;
  std::size_t first_plain(std::size_t kind, std::size_t position) const;
  const Page& page(std::size_t kind, std::size_t index, std::size_t length) const;
  bool must_copy(const Pages& plain, std::size_t length) const;
  bool holds(std::size_t length) const;
  const Page* states_at(std::size_t length) const;
  std::vector<std::size_t> recorded_of(std::size_t length, std::size_t from) const;
  bool has_spare_states() const;
  void reserve_states(std::size_t length, std::size_t from, bool begins);
  const Checkpoint* last_checkpoint(std::size_t length) const;
  void give_up(std::size_t from);
  void cut(std::size_t length);
  void take_checkpoints(std::size_t from);
  void take_checkpoint(std::size_t length);

  std::shared_ptr<const StatePool> pool_;
  std::vector<Table> tables_;            // by kind
  std::vector<Checkpoint> checkpoints_;  // by length
  std::vector<Checkpoint> of_pass_;      // those that the pass has taken
  std::vector<std::size_t> marks_;
  // All recurrent states, nullptr while they are zero: at the committed positions, before the last pass, in
  // the pass under way, and at the positions that this records.
  Page states_, states_before_, states_now_;
  std::map<std::size_t, Page> recorded_;
  std::size_t length_ = 0, prompted_ = 0;
  std::size_t start_ = 0;  // committed positions when the last pass began
  bool in_pass_ = false;
};

}  // namespace flashllm
