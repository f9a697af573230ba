// Shared by the binding files: what crosses from Python, and the pieces of the module. No logic lives in
// them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>

#include "error.h"
#include "kernels.h"

namespace flashllm {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::device::cpu, nb::c_contig>;
using ByteArray = nb::ndarray<std::uint8_t, nb::device::cpu, nb::c_contig>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::device::cpu, nb::c_contig>;
using ChecksumArray = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::device::cpu, nb::c_contig>;
using IdArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::device::cpu, nb::c_contig>;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw CoreError(ErrorKind::usage, message);
}

// Hot calls take addresses (a tensor's data_ptr) checked by the one Python wrapper; everything else takes
// arrays.
template <typename T>
T* at_address(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Dtype parse_dtype(const std::string& name);
SimdLevel parse_simd(const std::string& name);  // "auto", "scalar", "avx2" or "avx512"
Dtype dtype_of(const AnyArray& array);

void init_io(nb::module_& m);
void init_compute(nb::module_& m);
void init_ffn(nb::module_& m);

}  // namespace flashllm
