// What _core_testing has and _core has not: reads and writes that fail on demand, attention by itself, the
// bits of a level, and what lies inside (inspection.cpp).
#include "bind_testing.h"
#include "bind/bindings.h"
#include "digest.h"
#include "fault.h"
#include "kernels/levels/levels.h"

namespace flashllm {

namespace {

constexpr Named<Fault::Kind> kFaults[] = {NAMED(Fault::Kind, error),  NAMED(Fault::Kind, short_read),
                                          NAMED(Fault::Kind, flip),   NAMED(Fault::Kind, end_of_file),
                                          NAMED(Fault::Kind, random), NAMED(Fault::Kind, interrupt)};
constexpr Named<WrongCompletions::Kind> kWrong[] = {
    NAMED(WrongCompletions::Kind, length), NAMED(WrongCompletions::Kind, error),
    NAMED(WrongCompletions::Kind, twice), NAMED(WrongCompletions::Kind, id)};

void inject_fault(DirectFile& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                  std::uint64_t argument) {
  inject(file, std::make_shared<FaultPlan>(Fault{by_name("a fault", kind, kFaults), first, count, argument}));
}

void inject_write_fault(DirectWriter& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                        std::uint64_t argument) {
  require(kind != "flip", "what is written cannot be flipped: it is the caller's");
  inject(file, std::make_shared<FaultPlan>(Fault{by_name("a fault", kind, kFaults), first, count, argument}));
}

// A block of codes and inputs that lies in the first cache, multiplied `times` times: the inner loop alone of
// weights in bytes, with `offsets` a unit, or, in words, of those whose scales `unit` codes share. Operations
// a time.
std::size_t multiply_in_cache(std::size_t unit, std::size_t offsets, bool in_bytes, std::size_t times,
                              const std::string& simd) {
  const SimdLevel level = parse_simd(simd);
  const TileKernels* tiles = level_kernels(level).tiles;
  require(level_kernels(level).multiply_codes != nullptr && (unit == 16 || unit == 32),
          "this processor has no products of codes");
  const std::size_t rows = tiles == nullptr ? 12 : TileKernels::kRows, tokens = tiles == nullptr ? 32 : 16;
  const std::vector<std::int16_t> codes(rows * 2 * kCodeTerms, 3);
  const std::vector<std::uint32_t> words(kCodeTerms * tokens, 0x00050007);
  const std::vector<std::int32_t> totals(kCodeTerms / 32 * tokens, 100);
  const std::vector<float> scales(rows * kCodeTerms / 16, 0.5F), of_tokens(kCodeTerms / 32 * tokens, 1.0F);
  std::vector<float> out(rows * tokens);
  const CodeRows a{codes.data(), scales.data(), unit, false};
  const WeightBytes bytes{
      reinterpret_cast<const std::uint8_t*>(codes.data()), scales.data(), scales.data(), offsets, 0,
      offsets == 2 ? kLargestProduct : kLargestNibble};
  if (tiles != nullptr) tiles->open();
  for (std::size_t i = 0; i < times; ++i)
    if (in_bytes)
      (tiles == nullptr ? level_kernels(level).multiply_bytes : tiles->multiply_bytes)(
          bytes, rows, {words.data(), totals.data(), totals.data(), of_tokens.data(), tokens}, tokens,
          kCodeTerms, out.data(), tokens);
    else
      (tiles == nullptr ? level_kernels(level).multiply_codes : tiles->multiply_codes)(
          a, rows, {words.data(), tokens, of_tokens.data()}, tokens, kCodeTerms, out.data(), tokens);
  if (tiles != nullptr) tiles->close();
  return 2 * rows * tokens * kCodeTerms;
}

}  // namespace

void init_testing(nb::module_& m) {
  init_kv_attention(m);
  init_inspection(m);
  bound<DirectFile>(m, "DirectFile")
      .def("inject", &inject_fault, "kind"_a, "first"_a, "count"_a = 1, "argument"_a = 0);
  bound<DirectWriter>(m, "DirectWriter")
      .def_prop_ro("path", &DirectWriter::path)
      .def_prop_ro("size", &DirectWriter::size)
      .def_prop_ro("fallback_reason", &DirectWriter::fallback_reason)
      .def("inject", &inject_write_fault, "kind"_a, "first"_a, "count"_a = 1, "argument"_a = 0);

  m.def("digest", [](const std::string& simd) { return digest_of(parse_simd(simd)); }, "simd"_a);

  m.def("multiply_in_cache", &multiply_in_cache, "unit"_a, "offsets"_a, "in_bytes"_a, "times"_a,
        "simd"_a = "auto");

  m.def("refuse_enters", &refuse_enters, "count"_a);
  m.def("hang_reads", &hang_reads, "count"_a, "after"_a = 0);
  m.def("lose_completions", &lose_completions, "count"_a);
  m.def(
      "distort_completions",
      [](const std::string& kind, std::uint64_t first, std::uint64_t count, std::int64_t argument) {
        distort_completions({by_name("a fault", kind, kWrong), first, count, argument});
      },
      "kind"_a, "first"_a, "count"_a = 1, "argument"_a = 0);
  m.def("interrupt_probes", &interrupt_probes, "count"_a);
}

}  // namespace flashllm
