// What _core_testing has and _core has not: reads and writes that fail on demand, attention by itself, the
// bits of a level, and what lies inside (inspection.cpp).
#include "bind_testing.h"
#include "bind/bindings.h"
#include "digest.h"
#include "fault.h"

namespace flashllm {

namespace {

constexpr Named<Fault::Kind> kFaults[] = {
    {"error", Fault::Kind::error},   {"short_read", Fault::Kind::short_read},
    {"flip", Fault::Kind::flip},     {"end_of_file", Fault::Kind::end_of_file},
    {"random", Fault::Kind::random}, {"interrupt", Fault::Kind::interrupt}};
constexpr Named<WrongCompletions::Kind> kWrong[] = {{"length", WrongCompletions::Kind::length},
                                                    {"error", WrongCompletions::Kind::error},
                                                    {"twice", WrongCompletions::Kind::twice},
                                                    {"id", WrongCompletions::Kind::id}};

void inject_fault(DirectFile& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                  std::uint64_t argument) {
  inject(file, std::make_shared<FaultPlan>(Fault{by_name("a fault", kind, kFaults), first, count, argument}));
}

void inject_write_fault(DirectWriter& file, const std::string& kind, std::uint64_t first, std::uint64_t count,
                        std::uint64_t argument) {
  require(kind != "flip", "what is written cannot be flipped: it is the caller's");
  inject(file, std::make_shared<FaultPlan>(Fault{by_name("a fault", kind, kFaults), first, count, argument}));
}

}  // namespace

void init_testing(nb::module_& m) {
  init_kv_attention(m);
  init_inspection(m);
  bound<DirectFile>(m, "DirectFile")
      .def("inject", &inject_fault, nb::arg("kind"), nb::arg("first"), nb::arg("count") = 1,
           nb::arg("argument") = 0);

  m.def("digest", [](const std::string& simd) { return digest_of(parse_simd(simd)); }, nb::arg("simd"));

  m.def("refuse_enters", &refuse_enters, nb::arg("count"));
  m.def("hang_reads", &hang_reads, nb::arg("count"), nb::arg("after") = 0);
  m.def("lose_completions", &lose_completions, nb::arg("count"));
  m.def(
      "distort_completions",
      [](const std::string& kind, std::uint64_t first, std::uint64_t count, std::int64_t argument) {
        distort_completions({by_name("a fault", kind, kWrong), first, count, argument});
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
