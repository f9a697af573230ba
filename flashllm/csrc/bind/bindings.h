// Shared by the binding files: what crosses from Python, and the pieces of the module. No logic lives in
// them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ffn/ffn_layer.h"
#include "io/direct_writer.h"
#include "io/error.h"
#include "kernels/kernels.h"
#include "kernels/rows.h"
#include "kernels/tensor.h"
#include "model/weights.h"

namespace flashllm {

namespace nb = nanobind;
using namespace nb::literals;

// An array taken as it is or not at all. nanobind would hand over a converted copy of one with another dtype
// or with gaps: reads would land in the copy, and weights would be held twice. (`noconvert` did not prevent
// it in nanobind 3.1.)
template <typename Taken>
struct Exact : Taken {
  Exact() = default;
  explicit Exact(Taken array) : Taken(std::move(array)) {}
};

// `Of`: a type of values, their number of dimensions; none: any.
template <typename... Of>
using Array = Exact<nb::ndarray<Of..., nb::device::cpu, nb::c_contig>>;
using One = nb::ndim<1>;
using Two = nb::ndim<2>;

// Handed to Python.
template <typename T, typename Dimensions>
using Given = nb::ndarray<nb::numpy, T, Dimensions>;
using Bytes = Given<std::uint8_t, One>;

// An array [rows, width] that Python may use as long as `owner` is there, by default during the call.
template <typename T>
Given<T, Two> given_rows(T* data, std::size_t rows, std::size_t width, nb::handle owner = nb::none()) {
  return {data, {rows, width}, owner};
}

using AnyArray = Array<>;
using ByteArray = Array<std::uint8_t>;
using ByteRows = Array<std::uint8_t, Two>;
using ConstBytes = Array<const std::uint8_t>;
using ConstRows = Array<const std::uint8_t, Two>;
using ChecksumArray = Array<const std::uint64_t, One>;
using FloatArray = Array<const float, One>;
using FloatRows = Array<const float, Two>;
using IdArray = Array<const std::int32_t, One>;

template <typename Array>
auto bytes_of(const Array& array) {
  if constexpr (std::is_const_v<std::remove_pointer_t<decltype(array.data())>>) {
    return reinterpret_cast<const std::byte*>(array.data());
  } else {
    return reinterpret_cast<std::byte*>(array.data());
  }
}

// Throws CoreError for another array than [rows, width].
template <typename Array>
void require_rows(const Array& array, std::size_t rows, std::size_t width, const char* what) {
  require(array.ndim() == 2 && array.shape(0) == rows && array.shape(1) == width,
          std::string(what) + " must be [" + std::to_string(rows) + ", " + std::to_string(width) + "]");
}

// Throws CoreError for memory that begins elsewhere than at a multiple of so many bytes.
template <typename Array>
void require_aligned(const Array& array, std::uintptr_t multiple, const std::string& what) {
  require(reinterpret_cast<std::uintptr_t>(array.data()) % multiple == 0,
          what + " must start at a multiple of " + std::to_string(multiple) +
              " bytes; take the memory from allocate()");
}

template <typename T>
struct Named {
  const char* name;
  T value;
};
// A value under its own name: an enumerator, or a member of a struct.
#define NAMED(of, name) {#name, of::name}
#define NAMED_MEMBER(of, name) {#name, (of).name}

// Throws CoreError, which says the names there are, for another one.
template <typename T, std::size_t kCount>
T by_name(const char* what, const std::string& name, const Named<T> (&values)[kCount]) {
  std::string known;
  for (const Named<T>& each : values) {
    if (name == each.name) return each.value;
    known += (known.empty() ? "" : ", ") + std::string(each.name);
  }
  throw CoreError(ErrorKind::usage, std::string(what) + " must be one of " + known + ", not " + name);
}

template <typename T, std::size_t kCount>
const char* name_of(T value, const Named<T> (&values)[kCount]) {
  const Named<T>* each = values;
  while (each->value != value) ++each;
  return each->name;
}

inline constexpr Named<Dtype> kDtypes[] = {
    {"float32", Dtype::f32}, {"float16", Dtype::f16}, {"bfloat16", Dtype::bf16}};
inline constexpr Named<SimdLevel> kSimdLevels[] = {
    NAMED(SimdLevel, scalar),      NAMED(SimdLevel, neon),      NAMED(SimdLevel, neon_dot),
    NAMED(SimdLevel, avx2),        NAMED(SimdLevel, avx2_vnni), NAMED(SimdLevel, avx512),
    NAMED(SimdLevel, avx512_bf16), NAMED(SimdLevel, avx512_amx)};

// Throws CoreError for an array of another dtype; bf16 comes as uint16 from numpy, which has no such type.
template <typename Array>
void require_dtype(const Array& array, Dtype dtype, const char* what) {
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == 8 * dtype_nbytes(dtype);
  };
  require(dtype == Dtype::bf16 ? is(nb::dlpack::dtype_code::Bfloat) || is(nb::dlpack::dtype_code::UInt)
                               : is(nb::dlpack::dtype_code::Float),
          std::string(what) + " must be of dtype " + name_of(dtype, kDtypes));
}

inline Dtype parse_dtype(const std::string& name) { return by_name("a dtype", name, kDtypes); }
RowCodec parse_codec(const std::string& name);  // a dtype's name, or a grouped codec's
std::map<std::string, RowCodec> parse_codecs(const std::map<std::string, std::string>& names);
InputForm parse_inputs(const std::string& name);
SimdLevel parse_simd(const std::string& name);  // "auto", or a level's name
Activation parse_activation(const std::string& name, float threshold = 0.0F, float cut = 0.0F);
// A BlockSpec of flashllm/arch as the core has it (py_spec.cpp). Throws CoreError where an option has a value
// that is none, and what Python throws where there is none of a name.
Architecture read_architecture(nb::handle block, Dtype dtype = Dtype::f32);
// Of an Attention, but for its rotary embedding, which is one of a model's.
AttentionSpec read_mixer(nb::handle mixer);
// The arrays of a dict.
TensorSource tensors_of(nb::dict arrays);

inline nb::dict dict_of(std::initializer_list<Named<std::uint64_t>> counts) {
  nb::dict result;
  for (const Named<std::uint64_t>& each : counts) result[each.name] = each.value;
  return result;
}

// An array of what `holder` holds, which goes with it.
template <typename Array, typename Holder>
Array owned(std::unique_ptr<Holder> holder, std::initializer_list<std::size_t> shape) {
  auto* data = holder->data();
  const nb::capsule owner(holder.get(), [](void* held) noexcept { delete static_cast<Holder*>(held); });
  holder.release();
  return Array(data, shape, owner);
}

// `kept` lives at least as long as `owner`.
template <typename Kept>
void keep(nb::handle owner, const Kept& kept) {
  nb::keep_alive_obj(owner, nb::cast(kept));
}

// Where rows lie in a file: a layer's, or a table's.
struct FileRows {
  std::uint64_t offset = 0;  // of row 0, or of the first behind the experts
  std::size_t count = 0;     // of rows
  ChecksumArray checksums;   // of the experts' pieces, then of every `checksum_rows` rows behind them
  std::size_t checksum_rows = 1;
  std::shared_ptr<LyingExperts> experts;  // whose rows are the first ones

  // Points to what this holds. Throws CoreError where the checksums are not those of the rows.
  RowSource source(std::uint32_t stride) const;
};

void init_io(nb::module_& m);
void init_compute(nb::module_& m);
void init_ffn(nb::module_& m);
void init_rows(nb::module_& m);
void init_model(nb::module_& m);
void init_state(nb::module_& m);
void init_offload(nb::module_& m);

}  // namespace flashllm

template <typename Taken>
struct nanobind::detail::type_caster<flashllm::Exact<Taken>> {
  NB_TYPE_CASTER(flashllm::Exact<Taken>, make_caster<Taken>::Name)

  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    make_caster<Taken> caster;
    if (!caster.from_python(source, flags & ~static_cast<std::uint32_t>(cast_flags::convert), cleanup))
      return false;
    value = flashllm::Exact<Taken>(std::move(caster.value));
    return true;
  }
  static handle from_cpp(const flashllm::Exact<Taken>& array, rv_policy policy, cleanup_list* cleanup) {
    return make_caster<Taken>::from_cpp(array, policy, cleanup);
  }
};
