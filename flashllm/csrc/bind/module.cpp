// The extension module flashllm._core: exceptions, and the groups of bindings.
#include <exception>

#include "bind/bindings.h"

namespace flashllm {

#ifdef FLASHLLM_TESTING
void init_testing(nb::module_& m);  // tests/native/bind/bind_testing.cpp
#endif

namespace {

// Of flashllm/errors.py.
constexpr Named<ErrorKind> kErrors[] = {{"FlashIOError", ErrorKind::io},
                                        {"FormatError", ErrorKind::format},
                                        {"ChecksumError", ErrorKind::checksum},
                                        {"NonFiniteError", ErrorKind::numbers}};

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const CoreError& error) {
    if (error.kind() == ErrorKind::usage) return PyErr_SetString(PyExc_ValueError, error.what());
    const nb::object type = nb::module_::import_("flashllm.errors").attr(name_of(error.kind(), kErrors));
    const nb::object value = type(error.what());
    if (error.offset() != CoreError::kNoOffset) value.attr("offset") = error.offset();
    PyErr_SetObject(type.ptr(), value.ptr());
  }
}

}  // namespace

}  // namespace flashllm

NB_MODULE(_core, m) {
  m.doc() = "Native core of flashllm: direct reads, neuron cache, kernels";
  nanobind::register_exception_translator(flashllm::translate);
  flashllm::init_io(m);
  flashllm::init_compute(m);
  flashllm::init_ffn(m);
  flashllm::init_rows(m);
  flashllm::init_model(m);
  flashllm::init_state(m);
  flashllm::init_offload(m);
#ifdef FLASHLLM_TESTING
  flashllm::init_testing(m);
#endif
}
