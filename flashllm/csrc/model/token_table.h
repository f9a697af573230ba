// A table that lies on flash with a row for every token's id. Rows are asked for before they are needed;
// those of the ids that come most often stay in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cache/neuron_cache.h"
#include "ffn/counters.h"
#include "io/reader.h"
#include "io/row_source.h"
#include "kernels/rows.h"
#include "model/pass.h"

namespace flashllm {

class TokenTable {
 public:
  // `rows`: units of one row, of `columns` values of the codec; `memory`: for as many as stay. Keeps
  // references.
  TokenTable(const RowSource& rows, RowCodec codec, std::size_t columns, std::int32_t kept, std::byte* memory,
             Reader& reader, const DirectFile& file, SimdLevel level);
  TokenTable(const TokenTable&) = delete;
  TokenTable& operator=(const TokenTable&) = delete;
  ~TokenTable() { give_up(); }

  std::size_t columns() const { return columns_; }
  // These tokens' rows begin to be read; that of an id beyond the table is its first.
  void request(const Token* tokens, std::size_t count);
  // Calls with each of those tokens, by number, and its row, once that is there. Throws CoreError.
  void take(const std::function<void(std::size_t token, float* row)>& call, FfnCounters& counters);
  // What was asked for is not taken.
  void give_up() noexcept;

 private:
  void admit();

  const RowSource rows_;
  const RowCodec codec_;
  const std::size_t columns_;
  NeuronCache cache_;
  Reader& reader_;
  const DirectFile& file_;
  const SimdLevel level_;
  ReadBatch batch_;
  std::vector<std::int32_t> ids_, wanted_;  // of each token; the same, ascending, each once
  std::size_t first_ = 0, end_ = 0;         // of `wanted_`: those that have a place now
  bool is_open_ = false;                    // they have
};

}  // namespace flashllm
