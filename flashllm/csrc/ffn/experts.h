// Mixtures of experts (Shazeer et al., 2017): a layer's neurons are those of its experts, one expert after
// the other, and behind them those that every token uses. A small resident matrix, the router, says for a
// token which experts it goes to and by what weights their neurons' values count.
//
// The router is exact: as a predictor it names whole experts, each a unit that is read and kept as one, and
// misses nothing. Shared neurons are units too, as long as experts are. Where experts are of the ReLU family
// units are neurons, and another predictor may name some within the experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ffn/predictor.h"
#include "io/row_source.h"
#include "kernels/rows.h"
#include "kernels/thread_pool.h"

namespace flashllm {

// What a router makes of the products: which experts, and their weights (flashllm/arch/mixture.py).
struct RouterSpec {
  // A softmax over all experts, or over the chosen alone; a sigmoid of each; or SparseMixer's.
  enum class Score { softmax, softmax_of_chosen, sigmoid, sparse_mixer };
  Score score = Score::softmax;
  float softcap = 0.0F;  // products become cap * tanh(product / cap) first; 0: they stay
  // Experts in equal runs, of which only the highest count: by their highest expert, or the sum of two.
  std::size_t groups = 1, chosen_groups = 1;
  bool groups_by_two = false;
  bool normalized = false;  // the weights of the chosen are divided by their sum
  float epsilon = 0.0F;     // that is added to the sum
  float least_sum = 0.0F;   // the sum is no less
  float factor = 1.0F;      // of the weights, afterwards
  // Of a norm of its own over what the FFN's norm is applied to; negative: the router reads the FFN's input.
  float norm_epsilon = -1.0F;
  float jitter = 0.0F;  // of SparseMixer
};

struct ExpertsSpec {
  std::size_t count = 0;
  std::size_t chosen = 0;  // of them, for a token
  std::size_t size = 0;    // neurons of an expert
  std::size_t shared = 0;  // neurons behind the experts', which every token uses
  RouterSpec router;

  // Runs of neurons with one weight each: the experts, and the shared neurons if there are any.
  std::size_t runs() const { return count + (shared != 0 ? 1 : 0); }
  std::size_t first(std::size_t run) const { return run * size; }
  std::size_t neurons(std::size_t run) const { return run < count ? size : shared; }
};

class Router {
 public:
  // weights: [count, d_model] with its bias in it; shared_gate: [1, d_model], whose sigmoid is the weight of
  // the shared neurons, or no data, where that is 1. `dtype`: of the router, to which products and weights
  // are rounded. Keeps the pointers.
  Router(const ExpertsSpec& spec, const RowMatrix& weights, const RowMatrix& shared_gate, Dtype dtype,
         SimdLevel level);

  const ExpertsSpec& spec() const { return spec_; }
  std::size_t width() const { return weights_.columns; }
  // [count] or nullptr: is added to the experts' scores when they are chosen, and not to their weights. Kept
  // as a pointer.
  void set_choice_bias(const float* bias) { choice_bias_ = bias; }
  // [count, d_model] or nullptr: what an expert adds, times its weight, beside its neurons. Kept as a
  // pointer.
  void set_down_bias(const float* bias) { down_bias_ = bias; }
  // Of a router with a norm of its own: [d_model], and [count] or nullptr, of the weights. Kept as pointers.
  void set_scales(const float* of_input, const float* of_weights) {
    input_scale_ = of_input;
    expert_scale_ = of_weights;
  }
  bool reads_stream() const { return spec_.router.norm_epsilon >= 0.0F; }
  const float* down_bias(std::size_t run) const {
    return down_bias_ == nullptr || run >= spec_.count ? nullptr : down_bias_ + run * width();
  }

  // The weight of each run [runs()] for x [d_model]; 0 of experts that are not chosen. Of equal ones the
  // first is chosen. Throws CoreError for products that are not finite.
  void route(const float* x, ThreadPool& pool, std::vector<float>& weights);

 private:
  void round(std::vector<float>& values) const;
  const float* normalized(const float* x);
  void leave_groups_out(std::vector<float>& keys);
  void weigh_chosen(std::vector<float>& weights) const;
  float mixed_sparsely(std::size_t place) const;

  const ExpertsSpec spec_;
  const RowMatrix weights_, shared_gate_;
  const SimdLevel level_;
  const KernelTable& kernels_;
  const bool rounds_;
  const float* choice_bias_ = nullptr;
  const float *input_scale_ = nullptr, *expert_scale_ = nullptr;
  const float* down_bias_ = nullptr;
  // Scratch.
  std::vector<float> input_, logits_, keys_, scores_;
  std::vector<std::size_t> order_;
  mutable std::vector<std::byte> rounded_;
};

// Which of many tokens go to each expert.
class ExpertTokens {
 public:
  struct Run {
    std::size_t first, count;          // neurons
    std::vector<std::int32_t> tokens;  // ascending
    std::vector<float> factors;        // of what they contribute to each token
    const float* bias;                 // [d_model] or nullptr: see Router::down_bias
  };
  // No tokens yet.
  void begin(const Router& router);
  // More tokens: x [tokens, d_model], what the router reads. Throws what Router::route throws.
  void add(Router& router, const float* x, std::size_t tokens, ThreadPool& pool);
  // Drops the runs that no token goes to; the others are in the order of their neurons.
  const std::vector<Run>& end();
  const std::vector<Run>& runs() const { return runs_; }
  std::size_t tokens() const { return tokens_; }
  // Of units of `size` neurons, ascending: those of any token's experts; those of each token from `first` on.
  std::vector<std::int32_t> units(std::size_t size) const;
  std::vector<std::vector<std::int32_t>> units_of_tokens(std::size_t size, std::size_t first,
                                                         std::size_t end) const;

 private:
  std::vector<Run> runs_;
  std::size_t tokens_ = 0;
  std::vector<float> weights_;
};

// The units of the experts that the router chooses, and of the shared neurons; of these, where there is a
// predictor `inside`, those it names. `units`: the layer's, neurons or as long as an expert.
class RouterPredictor final : public Predictor {
 public:
  // Throws CoreError for other units, and where neurons are to be named within them.
  RouterPredictor(Router& router, RowUnits units, std::unique_ptr<Predictor> inside);

  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& active) override;
  // By the weight of a neuron's expert.
  void weigh(std::size_t token, const std::int32_t* begin, const std::int32_t* end,
             float* values) const override;
  void add_biases(std::size_t token, float* y) const override;

 private:
  float weight(std::size_t token, std::int32_t neuron) const;

  Router& router_;
  const RowUnits units_;
  std::unique_ptr<Predictor> inside_;
  std::vector<std::int32_t> named_;
  std::vector<std::vector<float>> weights_;  // of each token of the pass, by run
};

// The experts that a layer probably goes to, by its router on the input of the layer before (Eliseev and
// Mazur, 2023): the likeliest first. Units are experts.
class RouterGuess final : public Predictor {
 public:
  explicit RouterGuess(Router& router) : router_(router) {}

  void predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
               std::vector<std::int32_t>& probable) override;

 private:
  Router& router_;
  std::vector<float> weights_;
};

}  // namespace flashllm
