// A layer's FFN in a pass of any kind: which neurons are computed for its tokens, and where their rows come
// from.
//
//   sparse: what the predictor names, from each layer's neuron cache and flash (ffn/ffn_layer.h)
//   oracle: what really fires, found by reading every row, then as in a sparse pass
//   dense:  every neuron as the rows stream by, token by token (ffn/token_ffn.h); of experts, those chosen,
//           as in a sparse pass
//   prompt: the same in products of many tokens (ffn/dense_ffn.h, ffn/expert_ffn.h), once for all parts of a
//           stretch; its last tokens fill the neuron caches
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ffn/counters.h"
#include "ffn/dense_ffn.h"
#include "ffn/expert_ffn.h"
#include "ffn/ffn_layer.h"
#include "ffn/token_ffn.h"
#include "io/row_stream.h"
#include "io/stopwatch.h"
#include "model/arithmetic.h"
#include "model/block.h"
#include "model/layer.h"
#include "model/pass.h"
#include "model/spec.h"

namespace flashllm {

// What a prompt's stretch has at a layer's FFN while its parts come, and the rows.
struct FfnStretch {
  DenseFfn dense;
  ExpertFfn experts;
  std::size_t blocks = 0;   // of rows that have passed
  bool is_applied = false;  // the norm between the neurons: the rows pass again

  void rest() noexcept { dense.rest(), experts.rest(); }
  void clear() noexcept { dense.clear(), experts.clear(); }
};

class FeedForward final : public FfnPart {
 public:
  // Keeps references. `watch`: of the pass.
  FeedForward(const ModelSpec& spec, const std::vector<BlockWeights>& blocks, RowStream& stream,
              FfnCounters& counters, Stopwatch& watch, Arithmetic& arithmetic);

  // Throws CoreError.
  void run(const FfnTurn& turn) override;

  // A prompt's stretch at a layer: its parts are taken in turn, then the rows stream by once for all of them,
  // block by block until there are none, then each part is given its y. Between any two of these calls
  // another pass may come: then the rows go on with `resume_rows`. `last`: part of the stretch. `look` is
  // called every few products, and may throw.
  FfnStretch new_stretch() const;
  void take(FfnStretch& stretch, const FfnTurn& turn);
  void begin_rows(FfnStretch& stretch, std::size_t layer, const Part& last);
  void resume_rows(FfnStretch& stretch, std::size_t layer, const Part& last);
  bool next_rows(FfnStretch& stretch, std::size_t layer, const Part& last, const std::function<void()>& look);
  void give(FfnStretch& stretch, const FfnTurn& turn);

  // As FfnLayer::accept, of every layer.
  void accept(std::size_t count);
  // A pass is to end: reads that never end do not hold up `give_up`.
  void interrupt() noexcept;
  // After a pass that did not finish: no read stays under way, and no row counts that did not come.
  void give_up() noexcept;

 private:
  void run_active(const FfnTurn& turn);
  void run_firing(const FfnTurn& turn);
  void run_every(const FfnTurn& turn);
  void load_behind(const FfnTurn& turn);
  void stream_rows(const FfnStretch& stretch, std::size_t layer, const Part& last);
  void add_neurons(FfnStretch& stretch, std::size_t layer, const Part& last, const RowRun& block,
                   const std::function<void()>& look);

  void find_firing(const FfnTurn& turn);
  void run_sets(const FfnTurn& turn, bool predicted, FfnLayer* next);
  void begin_fill(const FfnStretch& stretch, std::size_t layer, const Part& last, const float* x,
                  std::size_t recent);
  static void add_units(const FfnLayer& ffn, const RowRun& run, std::vector<RowRun>& runs);
  void fill_from(FfnLayer& ffn, const RowRun& block, std::size_t count);
  template <typename Body>
  void each_block(std::size_t layer, int then, const Body& body);
  void charge_stream();

  const float* seen(const FfnTurn& turn) const;
  const std::byte* gate_rows(const BlockWeights& weights, std::size_t first) const;
  const ScalePlane* plane(const BlockWeights& weights) const;  // nullptr: columns have their own scales
  bool is_routed(std::size_t layer) const;
  int layer_after(std::size_t layer, const Part& part) const;

  const ModelSpec& spec_;
  const std::vector<BlockWeights>& blocks_;
  RowStream& stream_;
  FfnCounters& counters_;
  Stopwatch& watch_;
  Arithmetic& arithmetic_;
  TokenFfn few_;
  FfnStretch alone_;                               // of a part that passes one layer
  std::vector<std::vector<std::int32_t>> active_;  // of tokens that go through an FFN together
  FfnLayer* loading_ = nullptr;                    // the last one to load
};

}  // namespace flashllm
