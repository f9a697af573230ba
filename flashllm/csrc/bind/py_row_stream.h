// A stream of rows as Python holds it, with all it refers to.
#pragma once

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "bind/py_slices.h"
#include "io/row_stream.h"

namespace flashllm {

// A layer: offset of row 0, rows, checksums, and how many rows share one.
using StreamedRows = std::tuple<std::uint64_t, std::size_t, ChecksumArray, std::size_t>;

class PyRowStream {
 public:
  PyRowStream(std::shared_ptr<Reader> reader, std::shared_ptr<DirectFile> file,
              const std::vector<StreamedRows>& layers, std::size_t stride, std::size_t block_rows,
              std::size_t ahead, LayersExperts experts);

  void begin(int layer, std::optional<int> then);
  // (first row, rows [count, stride], valid until the next call), or None after the last block
  nb::object next();
  // Whole rows of `memory`, from allocate(), keep the layer's first ones.
  void keep(std::size_t layer, const ByteArray& memory);
  RowStream& stream() { return *stream_; }

 private:
  std::shared_ptr<Reader> reader_;
  std::shared_ptr<DirectFile> file_;
  std::vector<ChecksumArray> checksums_;
  LayersExperts experts_;
  std::vector<ByteArray> kept_;
  std::unique_ptr<RowStream> stream_;
};

}  // namespace flashllm
