// Members that _core_testing has and _core has not, put on the types that both have.
#pragma once

#include "bind/bindings.h"

namespace flashllm {

void init_kv_attention(nb::module_& m);  // kv_attention.cpp
void init_inspection(nb::module_& m);    // inspection.cpp

// A type that is bound already, to be given more members.
template <typename Bound>
nb::class_<Bound> bound(nb::module_& m, const char* name) {
  return nb::borrow<nb::class_<Bound>>(m.attr(name));
}

}  // namespace flashllm
