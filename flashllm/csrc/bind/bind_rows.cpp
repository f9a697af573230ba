// Rows in files: streams of them, blocks of a file of another layout, and experts where they lie in it.
#include "bind/bindings.h"
#include "io/row_stream.h"
#include "io/xxh3.h"
#include "planes/block_rows.h"
#include "planes/blocks.h"

namespace flashllm {

namespace {

constexpr Named<RowMatrixName> kMatrices[] = {NAMED(RowMatrixName, up), NAMED(RowMatrixName, gate),
                                              NAMED(RowMatrixName, down)};

using OwnedBytes = Given<std::uint8_t, Two>;

// Blocks [n, bytes of one]: codes [n, weights of one], and [n, bytes] of BlockScales, whose fields are those
// of _SCALES in flashllm/convert/kept/blocks.py.
std::pair<OwnedBytes, OwnedBytes> block_codes(const std::string& name, const ConstRows& blocks) {
  static_assert(sizeof(BlockScales) == 38);
  const BlockKind& kind = block_kind(name);
  const std::size_t n = blocks.shape(0);
  require(!kind.is_plain() && blocks.shape(1) == kind.nbytes, "these are no blocks of " + name);
  auto codes = std::make_unique<std::vector<std::uint8_t>>(n * kind.weights);
  auto scales = std::make_unique<std::vector<BlockScales>>(n);
  {
    const nb::gil_scoped_release unlocked;
    take_apart(kind, blocks.data(), n, codes->data(), scales->data());
  }
  return {owned<OwnedBytes>(std::move(codes), {n, kind.weights}),
          owned<OwnedBytes>(std::move(scales), {n, sizeof(BlockScales)})};
}

// As BlockRows::unpack of a piece that begins at byte `first` of a slice, into the rows [neurons, stride] of
// the slice.
void unpack(const BlockRows& self, const ConstBytes& stored, std::uint64_t first, const ByteRows& rows) {
  const std::size_t grain = self.row_nbytes() * self.grain(), nbytes = stored.nbytes();
  const RowFormat& format = self.format();
  require(nbytes % grain == 0 && first % grain == 0 && rows.shape(1) == format.stride &&
              rows.shape(0) >=
                  std::max<std::size_t>(format.unit, self.neurons((first + nbytes) / self.row_nbytes())) &&
              self.outputs_fit((first + nbytes) / self.row_nbytes()),
          "a piece must be whole stored rows, and fit the rows it goes to");
  const nb::gil_scoped_release unlocked;
  self.unpack(bytes_of(stored), first, nbytes, bytes_of(rows));
}

// A matrix: file and offset of each expert's, an expert's bytes, those of a piece, how they are unpacked.
using Place = std::pair<std::shared_ptr<DirectFile>, std::uint64_t>;
using Slices = std::tuple<std::vector<Place>, std::uint64_t, std::uint64_t, std::shared_ptr<BlockRows>>;

void make_experts(nb::pointer_and_handle<LyingExperts> self, const std::vector<Slices>& matrices,
                  std::int32_t count, std::int32_t size) {
  require(count > 0 && size > 0, "experts need rows");
  LyingExperts made;
  made.count = count;
  made.size = size;
  for (const auto& [places, nbytes, piece, rows] : matrices) {
    const std::size_t row = rows->row_nbytes(), stored = nbytes / row;
    require(nbytes != 0 && nbytes % row == 0 && piece != 0 && piece % (row * rows->grain()) == 0 &&
                piece % kHashedMultiple == 0 && nbytes % kHashedMultiple == 0 && piece >= kMinHashed &&
                rows->neurons(stored) == static_cast<std::size_t>(size) && rows->outputs_fit(stored) &&
                places.size() == static_cast<std::size_t>(count),
            "an expert's slices do not fit its rows");
    made.matrices.push_back({{}, nbytes, piece, rows.get()});
    for (const Place& place : places)
      made.matrices.back().places.push_back({place.first.get(), place.second});
  }
  new (self.p) LyingExperts(std::move(made));
  for (const Slices& each : matrices) {
    for (const Place& place : std::get<std::vector<Place>>(each)) keep(self.h, place.first);
    keep(self.h, std::get<std::shared_ptr<BlockRows>>(each));
  }
}

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
  return {{static_cast<std::int32_t>(count), 1},    offset,       stride, checksums.data(),
          static_cast<std::int32_t>(checksum_rows), experts.get()};
}

void init_rows(nb::module_& m) {
  m.def("block_codes", &block_codes, "kind"_a, "blocks"_a);
  nb::class_<BlockRows>(m, "BlockRows")
      .def(
          "__init__",
          [](BlockRows* self, const std::string& kind, std::size_t length, const RowFormat& format,
             const std::string& matrix) {
            new (self) BlockRows(kind, length, format, by_name("a matrix", matrix, kMatrices));
          },
          "kind"_a, "length"_a, "row_format"_a, "matrix"_a)
      .def("unpack", &unpack, "stored"_a, "first"_a, "rows"_a);
  nb::class_<LyingExperts>(m, "LyingExperts")
      .def("__init__", &make_experts, "matrices"_a, nb::kw_only(), "count"_a, "size"_a);
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
