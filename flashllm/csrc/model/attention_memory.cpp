#include "model/attention_memory.h"

#include <atomic>
#include <utility>
#include <vector>

#include "io/error.h"

namespace flashllm {

void AttentionMemory::keep(const AttentionShape&, const Part&, const float*, const float*) {
  throw CoreError(ErrorKind::usage, "keys and values are kept where they are attended to");
}

void SequenceMemory::keep(const AttentionShape& shape, const Part& part, const float* keys,
                          const float* values) {
  const std::size_t cached = shape.kv_heads * shape.head_dim;
  for (std::size_t t = 0; t < part.count; ++t)
    part.tokens[t].sequence->append(part.kv_layer, part.tokens[t].position, keys + t * cached,
                                    values + t * cached);
  seal_pages(part);
}

void SequenceMemory::attend(const AttentionShape& shape, const Part& part, const float* queries,
                            const float* keys, const float* values, float* out) {
  const std::size_t attended = shape.heads * shape.head_dim;
  if (keys != nullptr) keep(shape, part, keys, values);
  if (!part.is_prompt()) {
    std::vector<AttendingToken> attending;
    for (std::size_t t = 0; t < part.count; ++t)
      attending.push_back({queries + t * attended, part.tokens[t].sequence->view(part.kv_layer),
                           part.tokens[t].position + 1, out + t * attended});
    attend_each(shape, attending.data(), attending.size(), pool_, level_);
    return;
  }
  for_each_sequence(part.tokens, part.count, [&](const Token& first, const Token& last) {
    const std::size_t at = static_cast<std::size_t>(&first - part.tokens) * attended;
    attend_many(shape, queries + at, last.position + 1 - first.position, first.position,
                first.sequence->view(part.kv_layer), out + at, pool_, level_);
  });
}

// The pages that the part's tokens fill, where they are packed.
void SequenceMemory::seal_pages(const Part& part) const {
  if (!part.tokens[0].sequence->shape().is_packed()) return;
  std::vector<std::pair<SequenceState*, std::size_t>> full;
  for (std::size_t t = 0; t < part.count; ++t)
    if ((part.tokens[t].position + 1) % kPageTokens == 0)
      full.emplace_back(part.tokens[t].sequence, part.tokens[t].position / kPageTokens);
  std::atomic<bool> is_finite{true};
  pool_.parallel_for(full.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i)
      if (!full[i].first->seal(part.kv_layer, full[i].second)) is_finite = false;
  });
  if (!is_finite)
    throw CoreError(ErrorKind::numbers,
                    "a layer computed keys or values that are not finite: an overflow, or "
                    "damaged weights; check the model with `flashllm verify`");
}

}  // namespace flashllm
