// The loops of scale_planes.h over a vector type; included after row_codecs_impl.h by each
// kernels_<level>.cpp, as that file is.

// The scales of the unit from weight j on of neuron `id`, and what is added to code * scale.
template <bool kMinimum, bool kFactors>
struct PlaneScales {
  std::size_t group_row, shared_row;  // where the neuron's group begins in the planes
  PlaneScales(const ScalePlane& plane, std::size_t id, std::size_t k)
      : group_row(id / plane.group * k), shared_row(kFactors ? id / kSharedFactors * k : group_row) {}

  void load(const ScalePlane& plane, std::size_t j, Vec& scale, Vec& minimum) const {
    scale = Vec::load_f16(plane.scales + shared_row + j);
    if constexpr (kFactors) scale = scale * Vec::load_i8(plane.factors + group_row + j);
    if constexpr (kMinimum) {
      minimum = Vec::load_f16(plane.minimums + shared_row + j);
      if constexpr (kFactors) minimum = minimum * Vec::load_i8(plane.minimum_factors + group_row + j);
    }
  }
};

template <std::size_t kCodeBits, bool kMinimum, bool kFactors>
struct PlaneColumn {
  static constexpr std::size_t kBits = kCodeBits;
  const std::uint8_t* codes;
  PlaneScales<kMinimum, kFactors> scales;
  PlaneColumn(const void* row, const ScalePlane& plane, std::size_t id, std::size_t k)
      : codes(static_cast<const std::uint8_t*>(row)), scales(plane, id, k) {}

  void decode(const ScalePlane& plane, std::size_t j, Vec* to) const {
    load_codes<kBits>(codes + j / 8 * kBits, kMinimum ? 0.0F : zero_code<kBits>(), to);
    for (std::size_t v = 0; v < kUnitVectors; ++v) {
      Vec scale = Vec::zero(), minimum = Vec::zero();
      scales.load(plane, j + v * Vec::kWidth, scale, minimum);
      to[v] = kMinimum ? fma(to[v], scale, minimum) : to[v] * scale;
    }
  }
};

// Of FP4, whose scales are powers of two.
struct Fp4Column {
  static constexpr std::size_t kBits = 4;
  const std::uint8_t* codes;
  std::size_t group_row;
  Fp4Column(const void* row, const ScalePlane& plane, std::size_t id, std::size_t k)
      : codes(static_cast<const std::uint8_t*>(row)), group_row(id / plane.group * k) {}

  void decode(const ScalePlane& plane, std::size_t j, Vec* to) const {
    Vec::look_up_nibbles<kUnitVectors / 2>(codes + j / 2, kFp4, Vec::set(1.0F), to);
    for (std::size_t v = 0; v < kUnitVectors; ++v)
      to[v] = to[v] * Vec::half_powers(plane.powers + group_row + j + v * Vec::kWidth);
  }
};

template <typename Column>
void add_plane_rows(const void* const* rows, const std::int32_t* ids, const float* values, std::size_t n,
                    const ScalePlane& plane, std::size_t k, std::size_t begin, std::size_t end, float* y) {
  constexpr std::size_t kBits = Column::kBits;
  for (std::size_t i = 0; i < n; ++i) {
    const Column column(rows[i], plane, static_cast<std::size_t>(ids[i]), k);
    const Vec value = Vec::set(values[i]);
    const std::uint8_t* next =
        i + 1 < n ? static_cast<const std::uint8_t*>(rows[i + 1]) + begin / 8 * kBits : nullptr;
    for (std::size_t j = begin; j < end; j += kCodeUnit) {
      if (next != nullptr) __builtin_prefetch(next + (j - begin) / 8 * kBits, 0, 2);
      Vec weights[kUnitVectors];
      column.decode(plane, j, weights);
      for (std::size_t v = 0; v < kUnitVectors; ++v) {
        float* at = y + j + v * Vec::kWidth;
        fma(weights[v], value, Vec::load_f32(at)).store(at);
      }
    }
  }
}

template <typename Column>
void widen_plane_row(const void* row, std::size_t id, const ScalePlane& plane, std::size_t k,
                     std::size_t first, std::size_t n, float* to) {
  const Column column(row, plane, id, k);
  for (std::size_t j = 0; j < n; j += kCodeUnit) {
    float padded[kCodeUnit];
    float* at = n - j < kCodeUnit ? padded : to + j;
    Vec weights[kUnitVectors];
    column.decode(plane, first + j, weights);
    for (std::size_t v = 0; v < kUnitVectors; ++v) weights[v].store(at + v * Vec::kWidth);
    if (at == padded) __builtin_memcpy(to + j, padded, (n - j) * sizeof(float));
  }
}

template <typename Column>
constexpr PlaneKernels plane_kernels_of() {
  return {add_plane_rows<Column>, widen_plane_row<Column>};
}

const PlaneKernels kPlanes[kPlaneCodecs][kPlaneForms] = {
// in the order of RowCodec; scales, with minimums, with factors, with both
#define FLASHLLM_PLANES(bits)                                                                               \
  {plane_kernels_of<PlaneColumn<bits, false, false>>(), plane_kernels_of<PlaneColumn<bits, true, false>>(), \
   plane_kernels_of<PlaneColumn<bits, false, true>>(), plane_kernels_of<PlaneColumn<bits, true, true>>()}
    FLASHLLM_PLANES(4),
    FLASHLLM_PLANES(5),
    FLASHLLM_PLANES(6),
    FLASHLLM_PLANES(8),
#undef FLASHLLM_PLANES
    {plane_kernels_of<Fp4Column>(), {}, {}, {}},
};
