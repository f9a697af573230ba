// The keyword arguments of an FFN layer: taken by name, each checked, none unknown.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bind/bindings.h"

namespace flashllm {

class FfnArguments {
 public:
  explicit FfnArguments(const nb::kwargs& arguments) : arguments_(arguments) {}

  // Throw CoreError for an argument that is missing, nb::type_error for one of another type.
  template <typename T>
  T get(const char* name) {
    if (!arguments_.contains(name))
      throw CoreError(ErrorKind::usage, std::string("an FFN layer needs the argument ") + name);
    ++taken_;
    return cast<T>(name);
  }
  template <typename T>
  T get_or(const char* name, T otherwise) {
    return arguments_.contains(name) ? get<T>(name) : std::move(otherwise);
  }

  // What a layer is made of, and where its rows lie on flash; not the memory for them. Points into the
  // arguments, which keep what they refer to alive. `dtype`: of the rows, where no encoding is named.
  FfnLayerOptions options(const std::string& dtype);

  void require_all_taken() const {
    require(taken_ == arguments_.size(), "an FFN layer got an argument it does not know");
  }
  // The layer has what it wants of it.
  void release(const char* name) { nb::del(arguments_[name]); }

 private:
  template <typename T>
  T cast(const char* name) {
    try {
      return nb::cast<T>(arguments_[name]);
    } catch (const nb::cast_error&) {
      throw nb::type_error((std::string("an FFN layer cannot use its argument ") + name).c_str());
    }
  }
  const float* get_floats(const char* name, std::size_t length);

  nb::dict arguments_;
  std::size_t taken_ = 0;
};

}  // namespace flashllm
