// The extension module flashllm._core: exceptions, and the groups of bindings.
#include <exception>

#include "bind/bindings.h"

namespace flashllm {

#ifdef FLASHLLM_TESTING
void init_testing(nb::module_& m);  // tests/native/bind/bind_testing.cpp
#endif

namespace {

const char* exception_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::io:
      return "FlashIOError";
    case ErrorKind::format:
      return "FormatError";
    case ErrorKind::checksum:
      return "ChecksumError";
    case ErrorKind::numbers:
      return "NonFiniteError";
    case ErrorKind::usage:
      break;
  }
  return nullptr;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const CoreError& error) {
    const char* name = exception_name(error.kind());
    if (name == nullptr) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } else {
      const nb::object type = nb::module_::import_("flashllm.errors").attr(name);
      const nb::object value = type(error.what());
      if (error.offset() != CoreError::kNoOffset) value.attr("offset") = error.offset();
      PyErr_SetObject(type.ptr(), value.ptr());
    }
  }
}

}  // namespace

}  // namespace flashllm

NB_MODULE(_core, m) {
  m.doc() = "Native core of flashllm: direct reads, neuron cache, kernels";
  nanobind::register_exception_translator(flashllm::translate);
  flashllm::init_io(m);
  flashllm::init_compute(m);
  flashllm::init_slices(m);
  flashllm::init_ffn(m);
  flashllm::init_stream(m);
  flashllm::init_model(m);
  flashllm::init_state(m);
  flashllm::init_offload(m);
#ifdef FLASHLLM_TESTING
  flashllm::init_testing(m);
#endif
}
