// The loops of scale_planes.h over a vector type; included after row_codecs_impl.h by each
// kernels_<level>.cpp, as that file is.

namespace {

// A unit's scales, and what is added to code * scale.
struct UnitScales {
  Vec scale[kUnitVectors], minimum[kUnitVectors];
};

}  // namespace

// Fetches plane[at, at + n): the scales of a window are read at once, behind its products.
template <typename T>
__attribute__((always_inline)) inline void fetch_scales(const T* plane, std::size_t at, std::size_t n) {
  const auto* line = reinterpret_cast<const char*>(plane + at);
  for (const char* end = line + n * sizeof(T); line < end; line += kCacheLine) __builtin_prefetch(line);
}

// What all codes with scales apart have.
template <RowCodec kCodec, bool kMinimum>
struct PlaneCodes {
  static constexpr std::size_t kBits = shape_of(kCodec).bits;
  static constexpr bool kMinimums = kMinimum, kOfTable = shape_of(kCodec).of_table();
  static constexpr const CodeTable& kTable = shape_of(kCodec).table;
  static constexpr int kZero = kMinimum ? 0 : zero_of_bytes(shape_of(kCodec));

  static void decode(const std::uint8_t* unit, const UnitScales& scales, Vec* to) {
    if constexpr (kOfTable)
      look_up<kBits>(unit, kTable, Vec::set(1.0F), to);
    else
      load_codes<kBits>(unit, kZero, to);
    for (std::size_t v = 0; v < kUnitVectors; ++v) {
      if constexpr (kMinimum) {
        to[v] = fma(to[v], scales.scale[v], scales.minimum[v]);
      } else {
        to[v] = to[v] * scales.scale[v];
      }
    }
  }
};

// Where the scales of a neuron's group begin in the planes: one object for each.
template <RowCodec kCodec, bool kMinimum, bool kFactors>
struct PlaneScales : PlaneCodes<kCodec, kMinimum> {
  using Base = PlaneCodes<kCodec, kMinimum>;
  std::size_t group_row = 0, shared_row = 0;
  PlaneScales() = default;
  PlaneScales(const ScalePlane& plane, std::size_t id, std::size_t k)
      : group_row(id / plane.group * k), shared_row(kFactors ? id / kSharedFactors * k : group_row) {}

  // Of weights [j, j + n).
  __attribute__((always_inline)) void fetch(const ScalePlane& plane, std::size_t j, std::size_t n) const {
    fetch_scales(plane.scales, shared_row + j, n);
    if constexpr (kFactors) fetch_scales(plane.factors, group_row + j, n);
    if constexpr (kMinimum) fetch_scales(plane.minimums, shared_row + j, n);
    if constexpr (kMinimum && kFactors) fetch_scales(plane.minimum_factors, group_row + j, n);
  }
  // Of the unit from weight j on.
  void load(const ScalePlane& plane, std::size_t j, UnitScales& to) const {
    for (std::size_t v = 0; v < kUnitVectors; ++v) {
      const std::size_t at = j + v * Vec::kWidth;
      to.scale[v] = Vec::load_f16(plane.scales + shared_row + at);
      if constexpr (kFactors) to.scale[v] = to.scale[v] * Vec::load_i8(plane.factors + group_row + at);
      if constexpr (Base::kOfTable) to.scale[v] = to.scale[v] * Vec::set(Base::kTable.unit);
      if constexpr (kMinimum) {
        to.minimum[v] = Vec::load_f16(plane.minimums + shared_row + at);
        if constexpr (kFactors)
          to.minimum[v] = to.minimum[v] * Vec::load_i8(plane.minimum_factors + group_row + at);
      }
    }
  }
};

// Of FP4, whose scales are powers of two, or have factors in E4M3.
template <bool kQuarters>
struct Fp4Scales : PlaneCodes<RowCodec::codes_fp4, false> {
  std::size_t group_row = 0;
  float whole = 0.0F;
  Fp4Scales() = default;
  Fp4Scales(const ScalePlane& plane, std::size_t id, std::size_t k) : group_row(id / plane.group * k) {
    if constexpr (kQuarters) whole = plane.whole[id / plane.group] * kOfCodes;
  }

  __attribute__((always_inline)) void fetch(const ScalePlane& plane, std::size_t j, std::size_t n) const {
    if constexpr (kQuarters)
      fetch_scales(plane.quarters, group_row + j, n);
    else
      fetch_scales(plane.powers, group_row + j, n);
  }
  void load(const ScalePlane& plane, std::size_t j, UnitScales& to) const {
    for (std::size_t v = 0; v < kUnitVectors; ++v) {
      const std::size_t at = group_row + j + v * Vec::kWidth;
      if constexpr (kQuarters) {
        std::uint16_t halves[Vec::kWidth];
        for (std::size_t i = 0; i < Vec::kWidth; ++i) halves[i] = half_of_e4m3(plane.quarters[at + i]);
        to.scale[v] = Vec::load_f16(halves) * Vec::set(whole);
      } else {
        to.scale[v] = Vec::half_powers(plane.powers + at);
      }
    }
  }
};

// y[j] += the terms of R columns, in their order; neurons of one group have their scales in common. next[r]:
// what to fetch while column r is read; or nullptr.
template <typename Scales, std::size_t R>
inline void add_plane_columns(const void* const* rows, const std::int32_t* ids, const float* values,
                              const void* const* next, const ScalePlane& plane, std::size_t k,
                              std::size_t begin, std::size_t end, float* y) {
  Scales of[R];
  bool common = true;
  Vec value[R];
  for (std::size_t r = 0; r < R; ++r) {
    of[r] = Scales(plane, static_cast<std::size_t>(ids[r]), k);
    value[r] = Vec::set(values[r]);
    common = common && of[r].group_row == of[0].group_row;
  }
  for (std::size_t j = begin; j < end; j += kCodeUnit) {
    const std::size_t at = j / 8 * Scales::kBits;
    if (next != nullptr && j % kCacheLine == 0)
      for (std::size_t r = 0; r < R; ++r)
        __builtin_prefetch(static_cast<const std::uint8_t*>(next[r]) + at, 0, 2);
    UnitScales scales;
    of[0].load(plane, j, scales);
    Vec sum[kUnitVectors];
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = Vec::load_f32(y + j + v * Vec::kWidth);
    for (std::size_t r = 0; r < R; ++r) {
      if (!common && r != 0) of[r].load(plane, j, scales);
      Vec weights[kUnitVectors];
      Scales::decode(static_cast<const std::uint8_t*>(rows[r]) + at, scales, weights);
      for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v] = fma(weights[v], value[r], sum[v]);
    }
    for (std::size_t v = 0; v < kUnitVectors; ++v) sum[v].store(y + j + v * Vec::kWidth);
  }
}

template <typename Scales>
void add_plane_rows(const void* const* rows, const std::int32_t* ids, const float* values, std::size_t n,
                    const ScalePlane& plane, std::size_t k, std::size_t begin, std::size_t end, float* y) {
  constexpr std::size_t kTogether = kRows == 1 ? 1 : 4;
  std::size_t i = 0;
  for (; i + kTogether <= n; i += kTogether)
    add_plane_columns<Scales, kTogether>(rows + i, ids + i, values + i,
                                         i + 2 * kTogether <= n ? rows + i + kTogether : nullptr, plane, k,
                                         begin, end, y);
  for (; i < n; ++i)
    add_plane_columns<Scales, 1>(rows + i, ids + i, values + i, nullptr, plane, k, begin, end, y);
}

// Neurons of one group take the scales that were loaded once.
template <typename Scales>
void widen_plane_rows(const void* rows, std::size_t stride, std::size_t id, std::size_t count,
                      const ScalePlane& plane, std::size_t k, std::size_t first, std::size_t n, float* to,
                      std::size_t to_stride) {
  for (std::size_t begin = 0, end = 0; begin < count; begin = end) {
    const Scales of_group(plane, id + begin, k);
    const std::size_t left = plane.group - (id + begin) % plane.group;
    end = left < count - begin ? begin + left : count;
    for (std::size_t j = 0; j < n; j += kCodeUnit) {
      UnitScales scales;
      of_group.load(plane, first + j, scales);
      const auto* unit =
          static_cast<const std::uint8_t*>(rows) + begin * stride + (first + j) / 8 * Scales::kBits;
      for (std::size_t i = begin; i < end; ++i, unit += stride) {
        float padded[kCodeUnit];
        float* at = n - j < kCodeUnit ? padded : to + i * to_stride + j;
        Vec weights[kUnitVectors];
        Scales::decode(unit, scales, weights);
        for (std::size_t v = 0; v < kUnitVectors; ++v) weights[v].store(at + v * Vec::kWidth);
        if (at == padded) __builtin_memcpy(to + i * to_stride + j, padded, (n - j) * sizeof(float));
      }
    }
  }
}

#if defined(__AVX2__) || defined(FLASHLLM_NEON)
// As PlaneKernels says. What lies beyond the neurons is multiplied by zeros: the nearest one's codes do.
template <typename Scales>
void pair_plane_rows(const void* rows, std::size_t stride, std::size_t id, std::size_t count,
                     const ScalePlane& plane, std::size_t k, std::size_t first, CodeWeights& to) {
  const std::size_t lead = id % 32, slots = (lead + count + 31) / 32 * 32;
  const auto neuron = [=](std::size_t slot) {
    return slot < lead ? 0 : slot - lead < count ? slot - lead : count - 1;
  };
  to.unit = plane.group < 32 ? 16 : 32;
  to.has_offsets = Scales::kMinimums;
  for (std::size_t slot = 0; slot < slots; slot += to.unit) {
    UnitScales scales;
    Scales(plane, id + neuron(slot), k).load(plane, first, scales);
    for (std::size_t v = 0; v < kUnitVectors; ++v) {
      scales.scale[v].store(to.scales + slot / to.unit * kCodeColumns + v * Vec::kWidth);
      if constexpr (Scales::kMinimums)
        scales.minimum[v].store(to.offsets + slot / 32 * kCodeColumns + v * Vec::kWidth);
    }
  }
  const auto* codes = static_cast<const std::uint8_t*>(rows) + first / 8 * Scales::kBits;
  const auto codes_at = [&](std::size_t slot) { return signed_codes<Scales>(codes + neuron(slot) * stride); };
  for (std::size_t slot = 0; slot < slots; slot += 2)
    Eight::put_pairs(codes_at(slot), codes_at(slot + 1), to.pairs + slot / 2 * kCodeColumns);
}

// Two neurons' codes of some units, which lie `apart` bytes from each other, as words: four vectors of pairs.
// What their codes are more than what they stand for; and sums of such pairs as floats, the outputs in order.
#if defined(FLASHLLM_NEON)
template <typename Scales>
constexpr int kMore = 0;
constexpr std::size_t kPairUnits = 1, kBlockSteps = 2;
template <typename Scales>
inline void pair_units(const std::uint8_t* low, const std::uint8_t* high, std::size_t, Halves* to) {
  const Eight::Codes a = signed_codes<Scales>(low), b = signed_codes<Scales>(high);
  for (std::size_t i = 0; i < 4; ++i) to[i] = Eight::pair_of(a, b, i);
}
inline void put_in_order(const Ints* sums, Vec* to) {
  for (std::size_t v = 0; v < 4; ++v) to[v] = sums[v].floats();
}
#else
template <typename Scales>
constexpr int kMore = Scales::kOfTable || Scales::kBits == 8 ? 128 : Scales::kZero;
#if defined(__AVX512VNNI__)
constexpr std::size_t kPairUnits = 2, kBlockSteps = 4;
template <typename Scales>
inline void pair_units(const std::uint8_t* low, const std::uint8_t* high, std::size_t apart, Ints* to) {
  const auto codes = [apart](const std::uint8_t* at) {
    if constexpr (Scales::kOfTable)
      return _mm512_xor_si512(Sixteen::looked_up<Scales::kBits>(Scales::kTable.values, at, at + apart),
                              _mm512_set1_epi8(-128));
    else
      return Sixteen::codes_of<Scales::kBits>(at, at + apart);
  };
  const __m512i a = codes(low), b = codes(high), none = _mm512_setzero_si512();
  const __m512i even = _mm512_unpacklo_epi8(a, b), odd = _mm512_unpackhi_epi8(a, b);
  to[0] = {_mm512_unpacklo_epi8(even, none)};
  to[1] = {_mm512_unpackhi_epi8(even, none)};
  to[2] = {_mm512_unpacklo_epi8(odd, none)};
  to[3] = {_mm512_unpackhi_epi8(odd, none)};
}
inline void put_in_order(const Ints* sums, Vec* to) {
  for (std::size_t v = 0; v < 4; ++v) to[v] = sums[v].floats();
  Vec::transpose_lanes(to);
}
#else
constexpr std::size_t kPairUnits = 1, kBlockSteps = 2;
template <typename Scales>
inline void pair_units(const std::uint8_t* low, const std::uint8_t* high, std::size_t, Ints* to) {
  const auto codes = [](const std::uint8_t* at) {
    if constexpr (Scales::kOfTable || Scales::kBits == 8)
      return _mm256_xor_si256(signed_codes<Scales>(at), _mm256_set1_epi8(-128));
    else
      return byte_codes<Scales>(at);
  };
  const __m256i a = codes(low), b = codes(high), none = _mm256_setzero_si256();
  const __m256i even = _mm256_unpacklo_epi8(a, b), odd = _mm256_unpackhi_epi8(a, b);
  to[0] = {_mm256_unpacklo_epi8(even, none)};
  to[1] = {_mm256_unpackhi_epi8(even, none)};
  to[2] = {_mm256_unpacklo_epi8(odd, none)};
  to[3] = {_mm256_unpackhi_epi8(odd, none)};
}
// Lower halves are of the first sixteen outputs.
inline void put_in_order(const Ints* sums, Vec* to) {
  for (std::size_t i = 0; i < 2; ++i) {
    const __m256 first = sums[2 * i].floats().v, second = sums[2 * i + 1].floats().v;
    to[i] = {_mm256_permute2f128_ps(first, second, 0x20)};
    to[2 + i] = {_mm256_permute2f128_ps(first, second, 0x31)};
  }
}
#endif
#endif

// Neurons of a window that are multiplied, two at a time, with values of T tokens. Those whose values are all
// zero are not read; whichever come together, sums of codes are exact.
template <std::size_t T>
struct RunWindow {
  static constexpr std::size_t kNeurons = 32;
  struct Term {
    const std::uint8_t *low, *high;
    std::int16_t values[T][2];
  };
  Term terms[kNeurons / 2];
  // Of neurons that share a scale, all or each half: where their terms end, one of them, and the sums of
  // values.
  std::size_t ends[2], ids[2];
  int totals[2][T];

  RunWindow() : ends{0, 0} {}
  // From `slot` on, which counts from a multiple of kNeurons; `scaled` neurons share a scale. Of fewer tokens
  // than T the others have zeros.
  RunWindow(const PlaneRun& run, const CodeTokens* tokens, std::size_t count, std::size_t slot,
            std::size_t scaled) {
    const std::size_t lead = run.id % kNeurons;
    Term* term = terms;
    for (std::size_t first = 0; first < kNeurons; first += scaled) {
      bool is_open = false;
      ids[first / scaled] = run.id;
      int* total = totals[first / scaled];
      for (std::size_t t = 0; t < T; ++t) total[t] = 0;
      for (std::size_t at = slot + first; at < slot + first + scaled; ++at) {
        if (at < lead || at - lead >= run.count) continue;
        ids[first / scaled] = run.id + at - lead;
        std::int16_t values[T];
        bool any = false;
        for (std::size_t t = 0; t < T; ++t) {
          values[t] = t < count ? tokens[t].codes[at] : std::int16_t{0};
          total[t] += values[t];
          any = any || values[t] != 0;
        }
        if (!any) continue;
        const auto* row = static_cast<const std::uint8_t*>(run.rows) + (at - lead) * run.stride;
        if (!is_open) *term = {row, row, {}};
        for (std::size_t t = 0; t < T; ++t) term->values[t][is_open] = values[t];
        if (is_open) {
          term->high = row;
          ++term;
        }
        is_open = !is_open;
      }
      if (is_open) ++term;
      ends[first / scaled] = static_cast<std::size_t>(term - terms);
    }
    if (scaled == kNeurons) ends[1] = ends[0];
  }
  // Bytes [at, at + nbytes) of the rows of a term. Always inline: a call that only fetches changes nothing
  // that GCC knows of, and goes.
  __attribute__((always_inline)) void fetch(std::size_t term, std::size_t at, std::size_t nbytes) const {
    if (term >= ends[1]) return;
    for (std::size_t line = at / kCacheLine * kCacheLine; line < at + nbytes; line += kCacheLine) {
      __builtin_prefetch(terms[term].low + line, 0, 2);
      __builtin_prefetch(terms[term].high + line, 0, 2);
    }
  }
};

// The terms of a window of some tokens, of outputs [j, j + kSteps * kPairUnits * kCodeUnit), or, where
// `units` is less than kPairUnits, of so many units. While a term is multiplied, one of the next window is
// fetched.
template <typename Scales, std::size_t kSteps, std::size_t T>
inline void add_window(const RunWindow<T>& window, const RunWindow<T>& next, const Scales* of,
                       std::size_t scaled, const ScalePlane& plane, std::size_t j, std::size_t units,
                       const CodeTokens* tokens, std::size_t count, std::size_t slot, float* y,
                       std::size_t y_stride) {
  constexpr std::size_t kNeurons = RunWindow<T>::kNeurons;
  constexpr std::size_t kUnitNbytes = kCodeUnit / 8 * Scales::kBits, kStep = kPairUnits * kCodeUnit;
  const std::size_t at = j / kCodeUnit * kUnitNbytes, apart = units == kPairUnits ? kUnitNbytes : 0;
  for (std::size_t u = 0; u * scaled < kNeurons; ++u) of[u].fetch(plane, j, kSteps * kStep);
  std::size_t term_at = 0;
  for (std::size_t u = 0; u * scaled < kNeurons; ++u) {
    Ints sum[T][kSteps][4];
    for (std::size_t t = 0; t < T; ++t)
      for (auto& step : sum[t])
        for (Ints& each : step) each = Ints::set(-kMore<Scales> * window.totals[u][t]);
    for (; term_at != window.ends[u]; ++term_at) {
      const auto& term = window.terms[term_at];
      next.fetch(term_at, at, kSteps * kPairUnits * kUnitNbytes);
      for (std::size_t s = 0; s < kSteps; ++s) {
        Words::Column codes[4];
        const std::size_t from = at + s * kPairUnits * kUnitNbytes;
        pair_units<Scales>(term.low + from, term.high + from, apart, codes);
        for (std::size_t t = 0; t < T; ++t) {
          const auto by = Words::Column::everywhere(term.values[t]);
          for (std::size_t v = 0; v < 4; ++v) sum[t][s][v] = Words::add(by, codes[v], sum[t][s][v]);
        }
      }
    }
    for (std::size_t s = 0; s < kSteps; ++s) {
      Vec found[T][4];
      for (std::size_t t = 0; t < T; ++t) put_in_order(sum[t][s], found[t]);
      for (std::size_t i = 0; i < units; ++i) {
        const std::size_t first = j + s * kStep + i * kCodeUnit;
        UnitScales scales;
        of[u].load(plane, first, scales);
        for (std::size_t t = 0; t < (T == 1 ? 1 : count); ++t) {
          const Vec scale = Vec::set(tokens[t].scales[slot / kNeurons]);
          for (std::size_t v = 0; v < kUnitVectors; ++v) {
            float* to = y + t * y_stride + first + v * Vec::kWidth;
            Vec total = Vec::load_f32(to);
            if constexpr (Scales::kMinimums)
              total =
                  u == 0 ? fma(scales.minimum[v], Vec::set(tokens[t].sums[slot / kNeurons]), total) : total;
            fma(found[t][i * kUnitVectors + v] * scales.scale[v], scale, total).store(to);
          }
        }
      }
    }
  }
}

// Of a window, all neurons are read for a block of outputs before the next block; of more tokens the blocks
// are narrower, so that their sums stay in registers.
template <typename Scales, std::size_t T>
void add_run_of_tokens(const PlaneRun& run, const CodeTokens* tokens, std::size_t count,
                       const ScalePlane& plane, std::size_t k, std::size_t begin, std::size_t end, float* y,
                       std::size_t y_stride) {
  constexpr std::size_t kNeurons = RunWindow<T>::kNeurons, kStep = kPairUnits * kCodeUnit;
  constexpr std::size_t kBlock = kBlockSteps / T;
  const std::size_t scaled = plane.group < kNeurons ? 16 : kNeurons, slots = run.id % kNeurons + run.count;
  RunWindow<T> next(run, tokens, count, 0, scaled);
  for (std::size_t slot = 0; slot < slots; slot += kNeurons) {
    const RunWindow<T> window = next;
    next =
        slot + kNeurons < slots ? RunWindow<T>(run, tokens, count, slot + kNeurons, scaled) : RunWindow<T>();
    Scales of[2];
    for (std::size_t u = 0; u * scaled < kNeurons; ++u) of[u] = Scales(plane, window.ids[u], k);
    std::size_t j = begin;
    for (; j + kBlock * kStep <= end; j += kBlock * kStep)
      add_window<Scales, kBlock, T>(window, next, of, scaled, plane, j, kPairUnits, tokens, count, slot, y,
                                    y_stride);
    for (; j < end; j += kStep)
      add_window<Scales, 1, T>(window, next, of, scaled, plane, j, end - j < kStep ? 1 : kPairUnits, tokens,
                               count, slot, y, y_stride);
  }
}

// As PlaneKernels says.
template <typename Scales>
void add_plane_run(const PlaneRun& run, const CodeTokens* tokens, std::size_t count, const ScalePlane& plane,
                   std::size_t k, std::size_t begin, std::size_t end, float* y, std::size_t y_stride) {
  for (std::size_t t = 0; t < count; t += kBlockSteps) {
    const std::size_t left = count - t < kBlockSteps ? count - t : kBlockSteps;
    const auto add = left == 1 ? add_run_of_tokens<Scales, 1> : add_run_of_tokens<Scales, kBlockSteps>;
    add(run, tokens + t, left, plane, k, begin, end, y + t * y_stride, y_stride);
  }
}
#define FLASHLLM_PAIR_ROWS pair_plane_rows<Scales>, add_plane_run<Scales>
#else
#define FLASHLLM_PAIR_ROWS nullptr, nullptr
#endif

template <typename Scales>
constexpr PlaneKernels plane_kernels_of() {
  return {add_plane_rows<Scales>, widen_plane_rows<Scales>, FLASHLLM_PAIR_ROWS};
}
#undef FLASHLLM_PAIR_ROWS

const PlaneKernels kPlanes[kPlaneCodecs][kPlaneForms] = {
// in the order of RowCodec; scales, with minimums, with factors, with both
#define FLASHLLM_PLANE(codec, minimum, factors) \
  plane_kernels_of<PlaneScales<RowCodec::codec, minimum, factors>>()
#define FLASHLLM_PLANES(codec)                                              \
  {FLASHLLM_PLANE(codec, false, false), FLASHLLM_PLANE(codec, true, false), \
   FLASHLLM_PLANE(codec, false, true), FLASHLLM_PLANE(codec, true, true)}
    FLASHLLM_PLANES(codes2),
    FLASHLLM_PLANES(codes4),
    FLASHLLM_PLANES(codes5),
    FLASHLLM_PLANES(codes6),
    FLASHLLM_PLANES(codes8),
    {plane_kernels_of<Fp4Scales<false>>(), {}, plane_kernels_of<Fp4Scales<true>>(), {}},
    {FLASHLLM_PLANE(codes_iq4, false, false), {}, FLASHLLM_PLANE(codes_iq4, false, true), {}},
    {{}, {}, FLASHLLM_PLANE(codes_iq3_s, false, true), {}},
    {{}, {}, FLASHLLM_PLANE(codes_iq3_xxs, false, true), {}},
    {{}, {}, FLASHLLM_PLANE(codes_iq2, false, true), {}},
    {{}, {}, FLASHLLM_PLANE(codes_iq1, false, true), {}},
#undef FLASHLLM_PLANES
#undef FLASHLLM_PLANE
};
