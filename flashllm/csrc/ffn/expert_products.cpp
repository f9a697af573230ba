#include "ffn/expert_products.h"

#include <cstdint>
#include <numeric>

#include "ffn/dense_ffn.h"
#include "ffn/token_ffn.h"
#include "io/error.h"

namespace flashllm {

ExpertProducts::ExpertProducts(const FfnLayerOptions& options, ThreadPool& pool)
    : options_(options),
      units_(options.units()),
      pool_(pool),
      chunks_(static_cast<std::size_t>(units_.size)) {
  require(units_.size == 1 || options.gate == nullptr, "the gates of experts lie in their rows");
}

void ExpertProducts::multiply(const std::vector<ExpertRun>& runs, const FfnGroup& group, const RowInputs& x) {
  const std::size_t chunks = chunks_.count(static_cast<std::size_t>(units_.size));
  pool_.parallel_for(runs.size() * chunks, 1, [&](std::size_t begin, std::size_t end) {
    std::vector<float> together;  // the sums of several tokens, side by side while they are added to
    for (std::size_t i = begin; i < end; ++i)
      multiply_chunk(runs[i / chunks], i % chunks, group, x, together);
  });
}

void ExpertProducts::multiply_chunk(const ExpertRun& run, std::size_t chunk, const FfnGroup& group,
                                    const RowInputs& x, std::vector<float>& together) const {
  const std::int32_t unit = run.shares[0].unit, neuron = units_.first(unit);
  const RowFormat format = options_.format_of(unit);
  const auto rows = static_cast<std::size_t>(units_.rows(unit));
  const std::size_t first = chunk * chunks_.size, width = format.d_model,
                    end = std::min(first + chunks_.size, rows);
  if (first >= end) return;  // of the layer's last unit, which may be shorter
  if (run.tokens > 1) together.resize(std::max(together.size(), run.tokens * width));
  float* sums = run.tokens > 1 ? together.data() : run.shares[0].values + chunk * width;
  std::fill_n(sums, run.tokens * width, 0.0F);
  const RowMatrix down = format.matrix(run.rows, rows, format.down);
  float values[FfnTokens::kMost * ExpertChunks::kApart];
  const std::size_t block = format.unit == 1 ? ExpertChunks::kRows : ExpertChunks::kApart;
  for (std::size_t row = first; row < end; row += block) {
    RowMatrix columns = down;
    columns.data += row * down.stride;
    columns.rows = std::min(block, end - row);
    find_values(run, format, row, columns.rows, group, x, values);
    add_columns(columns, neuron + static_cast<std::int32_t>(row),
                has_plane(format.down_codec) ? &options_.plane : nullptr, {values, ExpertChunks::kApart, 1},
                run.tokens, 0, width, sums, options_.simd);
  }
  for (std::size_t t = 0; t < run.tokens && run.tokens > 1; ++t)
    std::copy_n(sums + t * width, width, run.shares[t].values + chunk * width);
}

// values[t * kApart + i] of `count` neurons from the run's `first` on.
void ExpertProducts::find_values(const ExpertRun& run, const RowFormat& format, std::size_t first,
                                 std::size_t count, const FfnGroup& group, const RowInputs& x,
                                 float* values) const {
  const auto rows = static_cast<std::size_t>(units_.rows(run.shares[0].unit));
  const auto neuron = static_cast<std::size_t>(units_.first(run.shares[0].unit));
  std::size_t members[FfnTokens::kMost];
  for (std::size_t t = 0; t < run.tokens; ++t) members[t] = run.shares[t].member;
  const auto finish = [&](const float* bias, Activation activation, float* to) {
    for (std::size_t t = 0; t < run.tokens * ExpertChunks::kApart; t += ExpertChunks::kApart) {
      for (std::size_t i = 0; bias != nullptr && i < count; ++i) to[t + i] += bias[neuron + first + i];
      activate(activation, 0.0F, to + t, count, options_.simd);
    }
  };
  float ups[FfnTokens::kMost * ExpertChunks::kApart];
  const auto multiply = [&](std::uint32_t offset, float* to) {
    dot_listed(format.matrix(run.rows, rows, offset), first, count, x, members, run.tokens, to,
               ExpertChunks::kApart, options_.simd);
  };
  if (format.unit == 1 && format.gated() && run.tokens == 1 && x.has_codes()) {
    multiply_rows(run.rows + first * format.stride, count, x.codes(members[0]), x.form(), values, ups);
  } else {
    multiply(format.driver(), values);
    if (format.gated()) multiply(format.up, ups);
  }
  finish(format.gated() ? options_.gate_bias : options_.up_bias, options_.activation, values);
  if (format.gated()) {
    finish(options_.up_bias, options_.activation.of_up(), ups);
    for (std::size_t t = 0; t < run.tokens * ExpertChunks::kApart; t += ExpertChunks::kApart)
      for (std::size_t i = t; i < t + count; ++i) values[i] *= ups[i];
  }
  std::int32_t neurons[ExpertChunks::kApart];
  std::iota(neurons, neurons + count, static_cast<std::int32_t>(neuron + first));
  for (std::size_t t = 0; t < run.tokens; ++t) {
    const FfnMember& member = group[members[t]];
    if (member.named_by != nullptr)
      member.named_by->weigh(member.number, neurons, neurons + count, values + t * ExpertChunks::kApart);
  }
}

// Gates and ups of `count` neurons and one token, row after row: all gates before all ups would go from page
// to page, where the processor fetches little ahead: AVX2 gains by it, AVX-512 neither gains nor loses.
void ExpertProducts::multiply_rows(const std::byte* row, std::size_t count, const CodedInputs& x,
                                   InputForm form, float* gates, float* ups) const {
  const RowFormat& format = options_.format;
  const void* vectors[2 * ExpertChunks::kRows];
  float products[2 * ExpertChunks::kRows];
  for (std::size_t i = 0; i < count; ++i, row += format.stride) {
    vectors[2 * i] = row + format.up;
    vectors[2 * i + 1] = row + format.driver();
  }
  coded_input_kernels(options_.simd, format.codec, form)
      .dot_rows(vectors, 2 * count, 2 * count, x, format.d_model, products);
  for (std::size_t i = 0; i < count; ++i) {
    ups[i] = products[2 * i];
    gates[i] = products[2 * i + 1];
  }
}

void ExpertProducts::add(const FfnMember& member, float* y) {
  const std::size_t width = options_.format.d_model;
  sums_.clear();
  for (std::ptrdiff_t p = 0; p < member.part_size(); ++p) {
    const float* sums = member.values + p * static_cast<std::ptrdiff_t>(num_sums());
    const std::size_t chunks = chunks_.count(static_cast<std::size_t>(units_.rows(member.begin[p])));
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) sums_.push_back(sums + chunk * width);
  }
  ones_.resize(std::max(ones_.size(), sums_.size()), 1.0F);
  sum_scattered({sums_.data(), sums_.size(), width, RowCodec::f32}, ones_.data(), y, pool_, options_.simd);
}

}  // namespace flashllm
