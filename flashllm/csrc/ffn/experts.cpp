#include "ffn/experts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "io/error.h"
#include "kernels/norm.h"

namespace flashllm {

namespace {

// values = e^(value - largest), and their sum
float exponentials(std::vector<float>& values) {
  const float largest = *std::max_element(values.begin(), values.end());
  float sum = 0.0F;
  for (float& value : values) sum += value = std::exp(value - largest);
  return sum;
}

// Adds the units of `size` neurons that `count` neurons from `first` on are.
void add_units(std::size_t first, std::size_t count, std::size_t size, std::vector<std::int32_t>& units) {
  for (std::size_t row = 0; row < count; row += size)
    units.push_back(static_cast<std::int32_t>((first + row) / size));
}

}  // namespace

Router::Router(const ExpertsSpec& spec, const RowMatrix& weights, const RowMatrix& shared_gate, Dtype dtype,
               SimdLevel level)
    : spec_(spec),
      weights_(weights),
      shared_gate_(shared_gate),
      level_(level),
      kernels_(kernel_table(level, dtype)),
      rounds_(dtype != Dtype::f32),
      order_(spec.count) {}

void Router::route(const float* x, ThreadPool& pool, std::vector<float>& weights) {
  logits_.resize(spec_.count);
  dot_all(weights_, reads_stream() ? normalized(x) : x, logits_.data(), pool, level_);
  round(logits_);
  for (const float logit : logits_)
    if (!std::isfinite(logit))
      throw CoreError(ErrorKind::numbers,
                      "a router computed a number that is not finite: an overflow, or damaged weights; check "
                      "the model with `flashllm verify`, or convert it with --dtype float32");
  // 1. The experts with the highest products, or scores where others count besides them.
  const RouterSpec& router = spec_.router;
  if (router.softcap != 0.0F)
    for (float& logit : logits_) logit = router.softcap * std::tanh(logit / router.softcap);
  keys_ = logits_;
  if (router.score == RouterSpec::Score::softmax) {
    const float sum = exponentials(logits_);
    for (float& score : logits_) score /= sum;
  } else if (router.score == RouterSpec::Score::sigmoid) {
    for (float& score : logits_) score = sigmoid(score);
  }
  if (choice_bias_ != nullptr || router.groups > 1) {
    keys_ = logits_;
    for (std::size_t e = 0; choice_bias_ != nullptr && e < keys_.size(); ++e) keys_[e] += choice_bias_[e];
    if (router.groups > 1) leave_groups_out(keys_);
  }
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  const auto chosen = order_.begin() + static_cast<std::ptrdiff_t>(spec_.chosen);
  std::partial_sort(order_.begin(), chosen, order_.end(), [this](std::size_t a, std::size_t b) {
    return keys_[a] != keys_[b] ? keys_[a] > keys_[b] : a < b;
  });
  // 2. Their weights.
  scores_.clear();
  for (std::size_t i = 0; i < spec_.chosen; ++i)
    scores_.push_back(router.score == RouterSpec::Score::sparse_mixer ? mixed_sparsely(i)
                                                                      : logits_[order_[i]]);
  weigh_chosen(scores_);
  if (expert_scale_ == nullptr) round(scores_);  // else they stay in fp32
  for (std::size_t i = 0; expert_scale_ != nullptr && i < spec_.chosen; ++i)
    scores_[i] *= expert_scale_[order_[i]];
  weights.assign(spec_.runs(), 0.0F);
  for (std::size_t i = 0; i < spec_.chosen; ++i) weights[order_[i]] = scores_[i];
  // 3. The shared neurons.
  if (spec_.shared == 0) return;
  scores_.assign(1, 1.0F);
  if (shared_gate_.data != nullptr) {
    dot_all(shared_gate_, x, scores_.data(), pool, level_);
    round(scores_);
    scores_[0] = sigmoid(scores_[0]);
    round(scores_);
  }
  weights[spec_.count] = scores_[0];
}

// What a router with a norm of its own reads.
const float* Router::normalized(const float* x) {
  const std::size_t n = width();
  Norm norm{Norm::Kind::rms, n, spec_.router.norm_epsilon};
  input_.resize(n);
  normalize(norm, x, input_.data());
  round(input_);
  for (std::size_t i = 0; i < n; ++i) input_[i] *= input_scale_[i];
  round(input_);
  const float root = 1.0F / std::sqrt(static_cast<float>(n));
  for (float& value : input_) value *= root;
  round(input_);
  return input_.data();
}

// Sets the keys of all experts to minus infinity but those of the groups that count.
void Router::leave_groups_out(std::vector<float>& keys) {
  const RouterSpec& router = spec_.router;
  const auto size = static_cast<std::ptrdiff_t>(keys.size() / router.groups);
  scores_.clear();
  for (auto group = keys.begin(); group != keys.end(); group += size) {
    const auto first = std::max_element(group, group + size);
    float score = *first;
    if (router.groups_by_two && size > 1) {
      const auto other = std::max_element(group, first);
      const auto behind = std::max_element(first + 1, group + size);
      score += other == first ? *behind : behind == group + size ? *other : std::max(*other, *behind);
    }
    scores_.push_back(score);
  }
  for (std::size_t g = 0; g < router.groups; ++g) {
    const auto before = std::count_if(scores_.begin(), scores_.end(), [&](const float& score) {
      return score > scores_[g] || (score == scores_[g] && &score < &scores_[g]);
    });
    const auto first = keys.begin() + static_cast<std::ptrdiff_t>(g) * size;
    if (static_cast<std::size_t>(before) >= router.chosen_groups)
      std::fill(first, first + size, -std::numeric_limits<float>::infinity());
  }
}

// The chosen experts' weights, in place of their scores.
void Router::weigh_chosen(std::vector<float>& weights) const {
  const RouterSpec& router = spec_.router;
  if (router.score == RouterSpec::Score::softmax_of_chosen) {
    const float sum = exponentials(weights);
    for (float& weight : weights) weight /= sum;
  }
  if (router.normalized) {
    const float sum = std::accumulate(weights.begin(), weights.end(), 0.0F) + router.epsilon;
    for (float& weight : weights) weight /= std::max(sum, router.least_sum);
  }
  for (float& weight : weights) weight *= router.factor;
}

// SparseMixer's weight (Liu et al. 2023) of the `place`-th chosen expert: its part of a softmax over the
// experts that are not chosen before it and whose products are almost as high, by a measure of all products.
float Router::mixed_sparsely(std::size_t place) const {
  const float best = logits_[order_[place]];
  float sum = 0.0F;
  for (std::size_t e = 0; e < logits_.size(); ++e) {
    const auto before = order_.begin() + static_cast<std::ptrdiff_t>(place);
    if (std::find(order_.begin(), before, e) != before) continue;
    const float distance = (best - logits_[e]) / std::max(std::fabs(logits_[e]), best);
    if (!(distance > 2.0F * spec_.router.jitter)) sum += std::exp(logits_[e] - best);
  }
  return 1.0F / sum;
}

void Router::round(std::vector<float>& values) const {
  if (!rounds_) return;
  rounded_.resize(values.size() * sizeof(float));
  kernels_.from_f32(values.data(), values.size(), rounded_.data());
  kernels_.to_f32(rounded_.data(), values.size(), values.data());
}

void ExpertTokens::begin(const Router& router) {
  const ExpertsSpec& spec = router.spec();
  runs_.clear();
  tokens_ = 0;
  for (std::size_t run = 0; run < spec.runs(); ++run)
    runs_.push_back({spec.first(run), spec.neurons(run), {}, {}, router.down_bias(run)});
}

void ExpertTokens::add(Router& router, const float* x, std::size_t tokens, ThreadPool& pool) {
  for (std::size_t t = 0; t < tokens; ++t, ++tokens_) {
    router.route(x + t * router.width(), pool, weights_);
    for (std::size_t run = 0; run < runs_.size(); ++run) {
      if (weights_[run] == 0.0F) continue;
      runs_[run].tokens.push_back(static_cast<std::int32_t>(tokens_));
      runs_[run].factors.push_back(weights_[run]);
    }
  }
}

const std::vector<ExpertTokens::Run>& ExpertTokens::end() {
  runs_.erase(std::remove_if(runs_.begin(), runs_.end(), [](const Run& run) { return run.tokens.empty(); }),
              runs_.end());
  return runs_;
}

std::vector<std::int32_t> ExpertTokens::units(std::size_t size) const {
  std::vector<std::int32_t> units;
  for (const Run& run : runs_)
    if (!run.tokens.empty()) add_units(run.first, run.count, size, units);
  return units;
}

std::vector<std::vector<std::int32_t>> ExpertTokens::units_of_tokens(std::size_t size, std::size_t first,
                                                                     std::size_t end) const {
  std::vector<std::vector<std::int32_t>> units(end - first);
  for (const Run& run : runs_)
    for (auto t = std::lower_bound(run.tokens.begin(), run.tokens.end(), static_cast<std::int32_t>(first));
         t != run.tokens.end() && static_cast<std::size_t>(*t) < end; ++t)
      add_units(run.first, run.count, size, units[static_cast<std::size_t>(*t) - first]);
  return units;
}

RouterPredictor::RouterPredictor(Router& router, RowUnits units, std::unique_ptr<Predictor> inside)
    : router_(router), units_(units), inside_(std::move(inside)) {
  require(units.size == 1 || static_cast<std::size_t>(units.size) == router.spec().size,
          "the units of a mixture's layer are its experts, or neurons");
  require(units.size == 1 || inside_ == nullptr,
          "a predictor cannot name neurons of experts that are read as one");
}

void RouterPredictor::predict(const float* x, std::size_t token, ThreadPool& pool, SimdLevel level,
                              std::vector<std::int32_t>& active) {
  if (weights_.size() <= token) weights_.resize(token + 1);
  std::vector<float>& weights = weights_[token];
  router_.route(x, pool, weights);
  const ExpertsSpec& spec = router_.spec();
  active.clear();
  if (inside_ == nullptr) {
    const auto size = static_cast<std::size_t>(units_.size);
    for (std::size_t run = 0; run < spec.runs(); ++run)
      if (weights[run] != 0.0F) add_units(spec.first(run), spec.neurons(run), size, active);
    return;
  }
  inside_->predict(x, token, pool, level, named_);
  for (const std::int32_t neuron : named_)
    if (weight(token, neuron) != 0.0F) active.push_back(neuron);
}

float RouterPredictor::weight(std::size_t token, std::int32_t neuron) const {
  const ExpertsSpec& spec = router_.spec();
  return weights_.at(token)[std::min(static_cast<std::size_t>(neuron) / spec.size, spec.runs() - 1)];
}

void RouterPredictor::weigh(std::size_t token, const std::int32_t* begin, const std::int32_t* end,
                            float* values) const {
  for (; begin != end; ++begin) *values++ *= weight(token, *begin);
}

void RouterPredictor::add_biases(std::size_t token, float* y) const {
  for (std::size_t run = 0; run < router_.spec().runs(); ++run) {
    const float weight = weights_.at(token)[run];
    const float* bias = router_.down_bias(run);
    if (weight == 0.0F || bias == nullptr) continue;
    for (std::size_t j = 0; j < router_.width(); ++j) y[j] += weight * bias[j];
  }
}

void RouterGuess::predict(const float* x, std::size_t /*token*/, ThreadPool& pool, SimdLevel /*level*/,
                          std::vector<std::int32_t>& probable) {
  router_.route(x, pool, weights_);
  const ExpertsSpec& spec = router_.spec();
  probable.clear();
  for (std::size_t expert = 0; expert < spec.count; ++expert)
    if (weights_[expert] != 0.0F) probable.push_back(static_cast<std::int32_t>(expert));
  std::sort(probable.begin(), probable.end(), [this](std::int32_t a, std::int32_t b) {
    return weights_[static_cast<std::size_t>(a)] > weights_[static_cast<std::size_t>(b)];
  });
}

}  // namespace flashllm
