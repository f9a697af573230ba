// What _core_testing has and _core has not: reads and writes that fail on demand, attention by itself, and
// the bits of a level.
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "bind/bindings.h"
#include "digest.h"
#include "fault.h"

namespace flashllm {

void init_kv_attention(nb::module_& m);  // kv_attention.cpp

namespace {

Fault::Kind parse_fault(const std::string& kind) {
  if (kind == "error") return Fault::Kind::error;
  if (kind == "short_read") return Fault::Kind::short_read;
  if (kind == "end_of_file") return Fault::Kind::end_of_file;
  if (kind == "random") return Fault::Kind::random;
  if (kind == "interrupt") return Fault::Kind::interrupt;
  require(kind == "flip", "unknown fault " + kind);
  return Fault::Kind::flip;
}

void inject_fault(DirectFile& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                  std::uint64_t argument) {
  inject(file, std::make_shared<FaultPlan>(Fault{parse_fault(kind), first, count, argument}));
}

void inject_write_fault(DirectWriter& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                        std::uint64_t argument) {
  require(kind != "flip", "what is written cannot be flipped: it is the caller's");
  inject(file, std::make_shared<FaultPlan>(Fault{parse_fault(kind), first, count, argument}));
}

WrongCompletions::Kind parse_wrong(const std::string& kind) {
  if (kind == "length") return WrongCompletions::Kind::length;
  if (kind == "error") return WrongCompletions::Kind::error;
  if (kind == "twice") return WrongCompletions::Kind::twice;
  require(kind == "id", "unknown fault " + kind);
  return WrongCompletions::Kind::id;
}

}  // namespace

void init_testing(nb::module_& m) {
  init_kv_attention(m);
  const nb::object file = m.attr("DirectFile");
  nb::setattr(
      file, "inject",
      nb::cpp_function(&inject_fault, nb::scope(file), nb::name("inject"), nb::is_method(), nb::arg("kind"),
                       nb::arg("first"), nb::arg("count") = 1, nb::arg("argument") = 0));

  m.def("digest", [](const std::string& simd) { return digest_of(parse_simd(simd)); }, nb::arg("simd"));

  m.def("refuse_enters", &refuse_enters, nb::arg("count"));
  m.def("hang_reads", &hang_reads, nb::arg("count"), nb::arg("after") = 0);
  m.def("lose_completions", &lose_completions, nb::arg("count"));
  m.def(
      "distort_completions",
      [](const std::string& kind, std::uint64_t first, std::uint64_t count, std::int64_t argument) {
        distort_completions({parse_wrong(kind), first, count, argument});
      },
      nb::arg("kind"), nb::arg("first"), nb::arg("count") = 1, nb::arg("argument") = 0);
  m.def("interrupt_probes", &interrupt_probes, nb::arg("count"));

  // Of a bound writer: its native one.
  m.def(
      "inject_write_fault",
      [](nb::handle writer, const std::string& kind, std::uint64_t first, std::uint64_t count,
         std::uint64_t argument) {
        inject_write_fault(direct_writer_of(writer), kind, first, count, argument);
      },
      nb::arg("writer"), nb::arg("kind"), nb::arg("first"), nb::arg("count") = 1, nb::arg("argument") = 0);
}

}  // namespace flashllm
