// Streams of rows.
#include "bind/bindings.h"
#include "io/row_stream.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

using Self = nb::pointer_and_handle<RowStream>;

void make_stream(Self self, Reader& reader, const DirectFile& file, const std::vector<FileRows>& layers,
                 const std::vector<std::uint32_t>& strides, std::size_t block_rows, std::size_t ahead) {
  std::vector<RowSource> sources;
  require(strides.size() == layers.size(), "every layer's rows need a stride");
  for (std::size_t i = 0; i < layers.size(); ++i) sources.push_back(layers[i].source(strides[i]));
  new (self.p) RowStream(reader, file, std::move(sources), block_rows, ahead);
  for (const FileRows& each : layers) keep(self.h, each);
}

void begin(RowStream& self, int layer, std::optional<int> then) {
  const auto known = [&](int index) {
    return index >= 0 && static_cast<std::size_t>(index) < self.num_layers();
  };
  require(known(layer) && (!then || known(*then)), "a layer beyond those there are");
  self.begin(layer, then.value_or(RowStream::kNoLayer));
}

// (first row, rows [count, stride], valid until the next call), or None after the last block
nb::object next(Self self) {
  RowRun block;
  bool more = false;
  {
    const nb::gil_scoped_release unlocked;
    more = self.p->next(block);
  }
  if (!more) return nb::none();
  const auto* rows = reinterpret_cast<const std::uint8_t*>(block.rows);
  return nb::make_tuple(block.first_row, given_rows(rows, block.count, block.stride, self.h));
}

// Whole rows of `memory`, from allocate(), keep the layer's first ones.
void keep_rows(RowStream& self, std::size_t layer, const ByteArray& memory) {
  require(layer < self.num_layers(), "a layer beyond those there are");
  require_aligned(memory, kHashedMultiple, "memory that keeps rows");
  self.keep(layer, bytes_of(memory), memory.nbytes() / self.stride(layer));
}

}  // namespace

RowSource FileRows::source(std::uint32_t stride) const {
  std::size_t of_experts = 0, sums = 0;  // rows, and their checksums
  if (experts) {
    of_experts = static_cast<std::size_t>(experts->num_rows());
    sums = static_cast<std::size_t>(experts->count) * experts->pieces();
  }
  require(checksum_rows > 0 && of_experts <= count &&
              checksums.shape(0) == sums + (count - of_experts + checksum_rows - 1) / checksum_rows,
          "there must be one checksum for every `checksum_rows` rows");
  return {{static_cast<std::int32_t>(count), 1},    offset, stride,       checksums.data(),
          static_cast<std::int32_t>(checksum_rows), 0,      experts.get()};
}

void init_stream(nb::module_& m) {
  nb::class_<FileRows>(m, "FileRows")
      .def(nb::init<std::uint64_t, std::size_t, ChecksumArray, std::size_t, std::shared_ptr<LyingExperts>>(),
           nb::kw_only(), "offset"_a, "count"_a, "checksums"_a, "checksum_rows"_a = 1,
           "experts"_a.none() = nb::none());
  nb::class_<RowStream>(m, "RowStream")
      .def("__init__", &make_stream, "reader"_a, "file"_a, "layers"_a, nb::kw_only(), "strides"_a,
           "block_rows"_a, "ahead"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("begin", &begin, "layer"_a, "then"_a.none() = nb::none())
      .def("next", &next)
      .def("keep", &keep_rows, "layer"_a, "memory"_a, nb::keep_alive<1, 3>())
      .def("set_kept", &RowStream::set_kept, "layer"_a, "rows"_a)
      .def("kept", &RowStream::kept, "layer"_a);
}

}  // namespace flashllm
