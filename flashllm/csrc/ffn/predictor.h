// Predictors: which neurons of a layer will fire, from the input of its FFN or of the FFN before. They name
// units (io/row_source.h): neurons, or of a mixture's router experts.
//
// A trained map of low rank, or the gate itself: one interface. What a predictor names is computed exactly;
// what it does not name is left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/rows.h"
#include "kernels/thread_pool.h"

namespace flashllm {

class Predictor {
 public:
  virtual ~Predictor() = default;

  // The active units for x [d_model], token number `token` of its pass; ascending. The same for any number
  // of threads.
  virtual void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
                       std::vector<std::int32_t>& active) = 0;

  // The gate's activation of every neuron for the x last predicted for under this number, where naming them
  // took it; else nullptr. Those of the neurons not named are zero.
  virtual const float* gate_values(std::size_t /*token*/) const { return nullptr; }

  // Weighs the values of some neurons of the units last named under this number. Threads may call it
  // together.
  virtual void weigh(std::size_t /*token*/, const std::int32_t* /*begin*/, const std::int32_t* /*end*/,
                     float* /*values*/) const {}

  // Adds to y [d_model] what comes with the units last named under this number, beside their neurons.
  virtual void add_biases(std::size_t /*token*/, float* /*y*/) const {}
};

// A low-rank map (paper A, section 3.1): active where b (a x) + bias > threshold. With `relu` it is
// PowerInfer's (Song et al., 2024, section 5.1): active where b relu(a x) >= threshold.
class LowRankPredictor final : public Predictor {
 public:
  // a [rank, d_model]; b [d_ff, rank] with the bias in it. Keeps the pointers.
  LowRankPredictor(const RowMatrix& a, const RowMatrix& b, float threshold, bool relu = false);

  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& active) override;

 private:
  RowMatrix a_, b_;
  float threshold_;
  bool relu_;
  std::vector<float> projected_, logits_;
};

// The gate of a gated FFN, resident: the neurons whose activation is not zero, no more and no fewer.
class GatePredictor final : public Predictor {
 public:
  // gate [d_ff, d_model] with its bias in it. Keeps the pointers.
  GatePredictor(const RowMatrix& gate, Activation activation) : gate_(gate), activation_(activation) {}

  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& active) override;
  const float* gate_values(std::size_t token) const override { return values_.at(token).data(); }

 private:
  RowMatrix gate_;
  Activation activation_;
  std::vector<std::vector<float>> values_;  // of each token of the pass, [d_ff]
};

// The inputs for which an activation is not zero: all above one number, and those between two below it.
struct FiringRange {
  float above = 0.0F;
  float low = 0.0F, high = 0.0F;  // nothing lies between them where high <= low
};
FiringRange firing_range(Activation activation);

// The same gate in few bits: names the neurons that fire for some gate value within `margin` of its product.
// The exact gate, in the neuron's row, decides.
class CodedGatePredictor final : public Predictor {
 public:
  // gate [d_ff, d_model] with its bias in it. Keeps the pointers.
  CodedGatePredictor(const RowMatrix& gate, Activation activation, float margin);

  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& active) override;

 private:
  RowMatrix gate_;
  FiringRange named_;  // widened by the margin
  std::vector<float> products_;
};

}  // namespace flashllm
