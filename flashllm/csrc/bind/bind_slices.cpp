// Blocks of a file of another layout, and experts where they lie in it.
#include "bind/bindings.h"
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
  require(nbytes % grain == 0 && first % grain == 0 && rows.shape(1) == self.stride() &&
              rows.shape(0) >= self.neurons((first + nbytes) / self.row_nbytes()) &&
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

}  // namespace

void init_slices(nb::module_& m) {
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
}

}  // namespace flashllm
