// Streams of rows.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/py_row_stream.h"
#include "io/xxh3.h"

namespace flashllm {

namespace {

using RowsView = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<2>>;

}  // namespace

PyRowStream::PyRowStream(std::shared_ptr<Reader> reader, std::shared_ptr<DirectFile> file,
                         const std::vector<StreamedRows>& layers, std::size_t stride, std::size_t block_rows,
                         std::size_t ahead, LayersExperts experts)
    : reader_(std::move(reader)), file_(std::move(file)), experts_(std::move(experts)) {
  experts_.resize(layers.size());
  std::vector<StreamedLayer> streamed;
  for (const auto& [offset, rows, checksums, checksum_rows] : layers) {
    const auto& of_layer = experts_[streamed.size()];
    const PyLyingExperts* lying = of_layer ? of_layer->get() : nullptr;
    const auto passed = static_cast<std::size_t>(lying == nullptr ? 0 : lying->experts().num_rows());
    const std::uint64_t* own = skip_experts(checksums, lying);
    const auto sums = static_cast<std::size_t>(checksums.data() + checksums.shape(0) - own);
    require(
        checksum_rows > 0 && passed <= rows && sums == (rows - passed + checksum_rows - 1) / checksum_rows,
        "a streamed layer has one checksum for every `checksum_rows` rows");
    streamed.push_back({offset, rows, own, checksum_rows, lying == nullptr ? nullptr : &lying->experts()});
    checksums_.push_back(checksums);
  }
  stream_ = std::make_unique<RowStream>(*reader_, *file_, std::move(streamed), stride, block_rows, ahead);
}

void PyRowStream::begin(int layer, std::optional<int> then) {
  const auto known = [this](int index) {
    return index >= 0 && static_cast<std::size_t>(index) < stream_->num_layers();
  };
  require(known(layer) && (!then || known(*then)), "a layer beyond those there are");
  stream_->begin(layer, then.value_or(RowStream::kNoLayer));
}

nb::object PyRowStream::next() {
  RowBlock block;
  bool more = false;
  {
    const nb::gil_scoped_release unlocked;
    more = stream_->next(block);
  }
  if (!more) return nb::none();
  const auto* rows = reinterpret_cast<const std::uint8_t*>(block.rows);
  return nb::make_tuple(block.first_row, RowsView(rows, {block.count, stream_->stride()}, nb::find(this)));
}

void PyRowStream::keep(std::size_t layer, const ByteArray& memory) {
  require(layer < stream_->num_layers(), "a layer beyond those there are");
  require(reinterpret_cast<std::uintptr_t>(memory.data()) % kHashedMultiple == 0,
          "memory that keeps rows must come from allocate()");
  stream_->keep(layer, reinterpret_cast<std::byte*>(memory.data()), memory.nbytes() / stream_->stride());
  kept_.push_back(memory);
}

void init_stream(nb::module_& m) {
  nb::class_<PyRowStream>(m, "RowStream")
      .def(nb::init<std::shared_ptr<Reader>, std::shared_ptr<DirectFile>, const std::vector<StreamedRows>&,
                    std::size_t, std::size_t, std::size_t, LayersExperts>(),
           nb::arg("reader"), nb::arg("file"), nb::arg("layers"), nb::kw_only(), nb::arg("stride"),
           nb::arg("block_rows"), nb::arg("ahead"), nb::arg("experts") = LayersExperts())
      .def("begin", &PyRowStream::begin, nb::arg("layer"), nb::arg("then").none() = nb::none())
      .def("next", &PyRowStream::next)
      .def("keep", &PyRowStream::keep, nb::arg("layer"), nb::arg("memory"))
      .def(
          "set_kept",
          [](PyRowStream& self, std::size_t layer, std::size_t rows) { self.stream().set_kept(layer, rows); },
          nb::arg("layer"), nb::arg("rows"))
      .def(
          "kept", [](PyRowStream& self, std::size_t layer) { return self.stream().kept(layer); },
          nb::arg("layer"));
}

}  // namespace flashllm
