// Experts that lie in a file of another layout, as Python holds them, with all they refer to.
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "bind/bindings.h"
#include "planes/block_rows.h"

namespace flashllm {

// A matrix: its file, the first expert's offset, an expert's bytes, those of a piece, how they are unpacked.
using PySlices = std::tuple<std::shared_ptr<DirectFile>, std::uint64_t, std::uint64_t, std::uint64_t,
                            std::shared_ptr<BlockRows>>;

class PyLyingExperts {
 public:
  // The first of `checksums`, which may be more, are those of the experts. Throws CoreError for what does
  // not fit.
  PyLyingExperts(std::vector<PySlices> matrices, std::int32_t count, std::int32_t size,
                 const ChecksumArray& checksums);

  const LyingExperts& experts() const { return experts_; }

 private:
  std::vector<PySlices> matrices_;
  ChecksumArray checksums_;
  LyingExperts experts_;
};

// Of each layer, or of none where there are fewer.
using LayersExperts = std::vector<std::optional<std::shared_ptr<PyLyingExperts>>>;

// The checksums of the rows behind `experts` (nullptr: all). Throws CoreError where there are too few.
inline const std::uint64_t* skip_experts(const ChecksumArray& checksums, const PyLyingExperts* experts) {
  const std::size_t passed =
      experts == nullptr ? 0
                         : static_cast<std::size_t>(experts->experts().count) * experts->experts().pieces();
  require(passed <= checksums.shape(0), "too few checksums");
  return checksums.data() + passed;
}

}  // namespace flashllm
