// Members that _core_testing has and _core has not, put on the types that both have.
#pragma once

#include <utility>

#include "bind/bindings.h"

namespace flashllm {

void init_kv_attention(nb::module_& m);  // kv_attention.cpp
void init_inspection(nb::module_& m);    // inspection.cpp

template <typename Call, typename... Extra>
nb::object method_of(nb::handle type, const char* name, Call&& call, const Extra&... extra) {
  return nb::cpp_function(std::forward<Call>(call), nb::scope(type), nb::name(name), nb::is_method(),
                          extra...);
}

template <typename Call, typename... Extra>
void add_method(nb::handle type, const char* name, Call&& call, const Extra&... extra) {
  nb::setattr(type, name, method_of(type, name, std::forward<Call>(call), extra...));
}

template <typename Call>
void add_property(nb::handle type, const char* name, Call&& call) {
  const nb::object property = nb::module_::import_("builtins").attr("property");
  nb::setattr(type, name, property(method_of(type, name, std::forward<Call>(call))));
}

}  // namespace flashllm
