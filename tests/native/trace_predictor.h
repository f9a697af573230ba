// Activity recorded or made up, for models whose weights are dummies: it says which neurons are active, in a
// predictor's place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ffn/ffn_layer.h"
#include "ffn/predictor.h"
#include "io/error.h"
#include "io/row_source.h"

namespace flashllm {

// A bit set over the neurons for each token of a pass. Of experts a neuron's bit is that of all.
struct ActivityTrace {
  const std::uint64_t* active = nullptr;
  const std::uint64_t* firing = nullptr;  // the neurons of `active` whose value counts; nullptr: not known
  std::size_t token_words = 0;            // from a token's set to the next one's
  std::size_t tokens = 0;                 // at hand
  RowUnits units;
};

// The real predictor, if there is one, runs as well, for the time it takes.
class TracePredictor final : public Predictor {
 public:
  // Keeps the trace's pointers, whose bits may change from pass to pass.
  TracePredictor(const ActivityTrace& trace, std::unique_ptr<Predictor> real)
      : trace_(trace), real_(std::move(real)) {}

  // Throws CoreError for a token the trace does not have.
  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& active) override {
    require(token < trace_.tokens, "the pass has more tokens than the trace at hand");
    if (real_) real_->predict(x, token, pool, level, active);
    const std::uint64_t* set = trace_.active + token * trace_.token_words;
    active.clear();
    for (std::int32_t unit = 0; unit < trace_.units.count(); ++unit)
      if (has(set, trace_.units.first(unit))) active.push_back(unit);
  }

  const float* gate_values(std::size_t token) const override {
    return real_ ? real_->gate_values(token) : nullptr;
  }

  // Of dummy weights about half of the values fire; by the trace fewer do. The arithmetic left is what a
  // trained model's would be.
  void weigh(std::size_t token, const std::int32_t* begin, const std::int32_t* end,
             float* values) const override {
    if (trace_.firing == nullptr) return;
    const std::uint64_t* set = trace_.firing + token * trace_.token_words;
    for (; begin != end; ++begin, ++values)
      if (!has(set, *begin))
        *values = 0.0F;
      else if (*values == 0.0F)
        *values = kFires;
  }

 private:
  static constexpr float kFires = 1e-3F;  // by the trace, and not by its dummy weights
  static bool has(const std::uint64_t* set, std::int32_t neuron) {
    return (set[neuron / 64] >> (neuron % 64) & 1) != 0;
  }

  ActivityTrace trace_;
  std::unique_ptr<Predictor> real_;
};

// From now on traces say what is active in the layer, and what is prefetched for it.
inline void follow(FfnLayer& layer, const ActivityTrace& active, const ActivityTrace& prefetched) {
  const auto put_before = [](std::unique_ptr<Predictor>& real, const ActivityTrace& trace) {
    real = std::make_unique<TracePredictor>(trace, std::move(real));
  };
  put_before(layer.predictor(), active);
  if (layer.can_prefetch()) put_before(layer.prefetch_predictor(), prefetched);
}

}  // namespace flashllm
