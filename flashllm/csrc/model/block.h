// What a decoder layer is made of: the options that an architecture chooses (flashllm/arch), and a
// layer's weights.
//
// A layer is h += f(h) for f the mixer and then the FFN, or, parallel, for the sum of both of the same h.
// Where the norms are (NormPlace):
//
//   input:  h += f(norm(h))           sum:  h = norm(h + f(h))
//   output: h += output_norm(f(h))    both: h += output_norm(f(norm(h)))
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "attention/attention.h"
#include "ffn/experts.h"
#include "ffn/ffn_layer.h"
#include "ffn/neuron_norm.h"
#include "kernels/kernels.h"
#include "kernels/norm.h"
#include "kernels/rows.h"

namespace flashllm {

enum class NormPlace { input, sum, output, both };
inline bool norms_input(NormPlace place) { return place == NormPlace::input || place == NormPlace::both; }
inline bool norms_output(NormPlace place) { return place == NormPlace::output || place == NormPlace::both; }

// What queries and keys are normalized by, before their rotation.
enum class HeadNorm {
  none,
  head,         // each head, one weight [head_dim] for all
  heads,        // each head, with its own weight
  projection,   // all heads together
  turned_head,  // each head as `head`, but behind its rotation
};

// What is multiplied with what attention mixes, of `out_gate`'s product.
enum class Gate {
  none,
  sigmoid,
  softplus,
  head_softplus,  // a number of each head
};

// Of multi-head latent attention (DeepSeek-AI 2024): a position keeps one key, whose first `rank` elements
// are its value, too; the others are the part that is rotated. A head's query and output are brought to that
// space, and out of it, by matrices of its own.
struct LatentSpec {
  std::size_t rank = 0;        // 0: attention is not latent
  std::size_t plain_dim = 0;   // of a head's query, before it is brought there, what is not rotated
  std::size_t value_dim = 0;   // of a head's output, after
  std::size_t query_rank = 0;  // of the query's projection, which has a norm between its halves; 0: it is one
  float norm_epsilon = 0.0F;   // of that norm, and of the one of a key's first elements
};

// Of queries, with their position (Meta AI 2025: Llama 4).
struct Growth {
  float rate = 0.0F;
  std::size_t step = 1;

  bool grows() const { return rate != 0.0F; }
  // What a query at `position` is multiplied by.
  float at(std::size_t position) const {
    return 1.0F + rate * std::log(1.0F + static_cast<float>(position / step));
  }
};

// The mixer that attends to keys and values.
struct AttentionSpec {
  std::size_t heads = 0;
  std::size_t kv_heads = 0;  // divides heads: grouped queries
  std::size_t head_dim = 0;
  HeadNorm head_norm = HeadNorm::none;
  float query_scale = 1.0F;  // of a query, before its products with the keys
  Growth growth;             // the same
  float out_scale = 1.0F;    // of the output
  int rotary = -1;           // of the model's rotary embeddings; -1: none
  std::size_t window = 0;    // positions that a query sees, its own included; 0: all before it
  float softcap = 0.0F;      // scores are cap * tanh(score / cap); 0: as they are
  Alibi alibi;
  Gate gate = Gate::none;
  std::size_t value_dim = 0;  // of a head's value as it is projected, less than head_dim; 0: head_dim
  float value_scale = 1.0F;   // of the values
  LatentSpec latent;
  bool value_norm = false;    // of each head's value, without a weight
  bool key_is_value = false;  // the key's projection is the value, too, before its norm and rotation
  int shared = -1;            // the earlier layer whose keys and values it attends to; -1: its own

  bool is_latent() const { return latent.rank != 0; }
  // Of queries and outputs where they meet keys and values.
  std::size_t query_dim() const { return heads * head_dim; }
  std::size_t kv_dim() const { return kv_heads * head_dim; }
  // Of a head's query as it is projected, and of its output as it goes into the output projection.
  std::size_t projected_dim() const {
    return is_latent() ? latent.plain_dim + head_dim - latent.rank : head_dim;
  }
  std::size_t query_inputs(std::size_t d_model) const {
    return latent.query_rank == 0 ? d_model : latent.query_rank;
  }
  std::size_t value_width() const { return value_dim == 0 ? head_dim : value_dim; }
  std::size_t mixed_dim() const { return heads * (is_latent() ? latent.value_dim : value_width()); }
  // Of scores and values, for states of a dtype. It refers to this.
  AttentionShape shape(Dtype dtype) const {
    AttentionShape made;
    made.heads = heads;
    made.kv_heads = kv_heads;
    made.head_dim = head_dim;
    made.value_dim = latent.rank;
    made.dtype = dtype;
    made.softcap = softcap;
    made.window = window;
    if (!alibi.slopes.empty()) made.alibi = &alibi;
    return made;
  }
  std::size_t gates() const {
    return gate == Gate::none ? 0 : gate == Gate::head_softplus ? heads : mixed_dim();
  }
};

// The mixer that keeps a state: of heads, by the gated delta rule or of a state-space model, or of a
// convolution alone (state_mixer.h).
struct StateSpec {
  std::size_t key_heads = 0;    // 0: a convolution alone, of [value_dim] channels
  std::size_t value_heads = 0;  // 0: the layer has none
  std::size_t key_dim = 0, value_dim = 0;
  std::size_t kernel = 0;      // tokens that a convolution sees, its own included
  bool tiled = false;          // value head i has key head i % key_heads, not i / (value heads a key head)
  bool by_delta_rule = false;  // otherwise it is a state-space model
  // Of a delta rule whose decays are a key channel's each, and whose gate is a sigmoid: numbers between the
  // two halves of the projections of both. 0: a decay a head, silu.
  std::size_t channel_rank = 0;
  float beta_scale = 1.0F;    // of a delta rule's sigmoid(beta)
  float norm_epsilon = 0.0F;  // of the norm of what is mixed; 0: the model's
  bool gate_first = false;    // what is mixed is multiplied by its gate before its norm, not after
  // Of the products: what they are multiplied by before they are used, and the output.
  float gate_scale = 1.0F, query_scale = 1.0F, key_scale = 1.0F, value_scale = 1.0F, decay_scale = 1.0F;
  float out_scale = 1.0F;

  bool convolves_alone() const { return key_heads == 0; }
  std::size_t keys() const { return key_heads * key_dim; }
  std::size_t values() const { return value_heads * value_dim; }
  // Of the products that are queries, and keys: of a convolution alone they are gates.
  std::size_t key_rows() const { return convolves_alone() ? values() : keys(); }
  std::size_t channels() const { return 2 * keys() + values(); }
  std::size_t decays() const { return channel_rank == 0 ? value_heads : keys(); }
  std::size_t gate_inputs(std::size_t d_model) const { return channel_rank == 0 ? d_model : channel_rank; }
  std::size_t norm_width() const { return by_delta_rule ? value_dim : values() / key_heads; }
  std::size_t state_floats() const {
    return value_heads == 0 ? 0 : key_dim * values() + (kernel - 1) * channels();
  }
};

struct LayerSpec {
  AttentionSpec attention;  // of 0 heads: none
  StateSpec state;          // the same; of both, their outputs are added
  NormPlace norms = NormPlace::input;
  bool parallel = false;
  bool shared_norm = false;  // of a parallel layer: the FFN reads what the attention reads
  std::size_t neurons = 0;   // of the FFN; 0: there is none
  float ffn_scale = 1.0F;    // of the FFN's output
  ExpertsSpec experts;       // that they belong to; of none where the FFN is dense
  // Neurons of a dense part beside the experts, which is resident: with norms of its own, or a shared expert.
  std::size_t beside = 0;
  bool beside_norms = false;
  Activation activation;
  std::optional<float> gate_deviations;  // see NeuronNorm::cuts_gates

  bool mixes() const { return attention.heads != 0 || state.value_heads != 0; }
};

// What all layers have in common.
struct BlockSpec {
  Dtype dtype = Dtype::f32;
  std::size_t d_model = 0;
  float residual_scale = 1.0F;  // of what is added to h
  bool rounded_inputs = false;  // of a layer's products: to 8 bits (round_to_8_bits); NormPlace::input alone
  // Per-layer embeddings (Gemma 3n): what each of the layers takes of a token's row; 0: there are none.
  std::size_t per_layer = 0, layers = 0;

  // Alternating updates (Baykal et al. 2023): a token has so many states, of which the layers compute on what
  // they predict of the first, and correct all of them by what comes of it; 0: one, which they change.
  std::size_t streams = 0;
  std::size_t laurel = 0;  // rank of the map around each mixer; 0: there is none

  std::size_t row_width() const { return layers * per_layer; }
  // Of a token: where there are streams, the state that a layer computes on lies before them.
  std::size_t state_width() const { return d_model * (streams == 0 ? 1 : streams + 1); }
};

// Of a layer's state.
struct StateWeights {
  RowMatrix query, key, value, out;
  RowMatrix out_gate;  // of heads alone, as what follows the convolution
  RowMatrix beta;      // of a delta rule alone
  RowMatrix decay;
  RowMatrix decay_down, gate_down;  // [channel_rank, d_model]: what decay and out_gate read
  // [channels, kernel] of the three matrices that are convolved, in its order; [channels] or nullptr.
  std::array<const float*, 3> convolution = {};
  const float* convolution_bias = nullptr;
  const float *decay_log = nullptr, *decay_bias = nullptr;  // [value_heads]; [decays]
  const float* skip = nullptr;  // [value_heads] or nullptr: what of a value goes by the state
  // Of each head with one weight, or, of a state-space model, of all heads that share a key, each such group
  // with its own; width 0: none.
  Norm mixed_norm;
};

// Its parts must live as long as the layer.
struct BlockWeights : NeuronWeights {
  LayerSpec spec;
  Norm attention_norm, ffn_norm;                              // those that NormPlace wants
  Norm attention_output_norm, ffn_output_norm;                // the same
  Norm beside_norm, beside_output_norm, experts_output_norm;  // around a dense part beside experts
  RowMatrix beside_up, beside_gate, beside_down;              // the same; beside_gate: of gated FFNs
  RowMatrix shared_gate;  // [1, d_model]: its sigmoid weighs what is beside; no data: nothing does
  // Of one head, or of the projection; of latent attention of the query between its two projections, and of a
  // key's first elements.
  Norm query_norm, key_norm;
  Norm value_norm;  // of each head; width 0: none
  Norm mixed_norm;  // of all heads' outputs, before `out`; width 0: none
  RowMatrix query, key, value, out;
  RowMatrix query_down,
      key_up;  // of latent attention, whose heads have rows of their own in key_up and value
  RowMatrix per_layer_gate, per_layer_out;  // of per-layer embeddings, with
  Norm per_layer_norm;
  Norm stream_router_norm;  // of streams:
  RowMatrix stream_router;  // [streams, d_model]
  // [streams^2, streams], [streams, streams], [d_model]
  const float *stream_predict = nullptr, *stream_correct = nullptr, *stream_scale = nullptr;
  RowMatrix laurel_in, laurel_out;
  Norm laurel_norm;
  RowMatrix out_gate;  // where the mixer has a gate
  StateWeights state;
  float scale = 1.0F;            // of the states that leave the layer
  const float* sinks = nullptr;  // [heads] or nullptr: see AttentionShape
  FfnLayer* ffn = nullptr;       // nullptr: this layer has no neuron cache and runs dense

  AttentionShape attention_shape(Dtype dtype) const {
    AttentionShape shape = spec.attention.shape(dtype);
    shape.sinks = sinks;
    return shape;
  }
};

}  // namespace flashllm
