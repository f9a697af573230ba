// The codecs of row_codecs.h whose codes have scales; included by row_codecs_impl.h, as that file is. Where
// the parts of a vector lie is a Row; scales(row, u), and later_scales of codecs with two scales a unit, give
// those of kScaled units from unit u, a multiple of kScaled, on: behind a row's last ones lie codes, at least
// 16 bytes of them. minimums are read as scales are.

constexpr std::size_t kScaled = 8;  // units whose scales are read together
static_assert(kSharedFactors == kScaled * kCodeUnit, "a shared scale is that of the units taken together");

// Sixteen bytes in one register: what is stored whole is loaded again without waiting for memory.
typedef std::uint8_t Bytes16 __attribute__((vector_size(16)));
typedef std::uint32_t Words4 __attribute__((vector_size(16)));
typedef std::uint64_t Words2 __attribute__((vector_size(16)));

// A bit of each of 32 codes, of four bytes: four codes have one of each. Two bits, of eight bytes.
inline void spread_bits(const std::uint8_t* from, Bytes16* to) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  const Words4 all = {bits, bits, bits, bits};
  to[0] = reinterpret_cast<Bytes16>(all >> Words4{0, 1, 2, 3}) & 1;
  to[1] = reinterpret_cast<Bytes16>(all >> Words4{4, 5, 6, 7}) & 1;
}
inline void spread_pairs(const std::uint8_t* from, Bytes16* to) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  to[0] = reinterpret_cast<Bytes16>(Words2{bits, bits >> 2}) & 3;
  to[1] = reinterpret_cast<Bytes16>(Words2{bits >> 4, bits >> 6}) & 3;
}

// A unit's codes, a byte each.
template <std::size_t kBits>
inline void spread_codes(const std::uint8_t* unit, std::int8_t* to) {
  Bytes16 codes[2], upper[2] = {};
  if constexpr (kBits == 8) {
    __builtin_memcpy(codes, unit, sizeof codes);
  } else if constexpr (kBits < 4) {
    spread_pairs(unit, codes);
    if constexpr (kBits == 3) {
      spread_bits(unit + 8, upper);
      for (std::size_t i = 0; i < 2; ++i) codes[i] |= upper[i] << 2;
    }
  } else {
    Bytes16 lower;
    __builtin_memcpy(&lower, unit, sizeof lower);
    if constexpr (kBits == 5) spread_bits(unit + sizeof lower, upper);
    if constexpr (kBits == 6) spread_pairs(unit + sizeof lower, upper);
    codes[0] = (lower & 15) | upper[0] << 4;
    codes[1] = lower >> 4 | upper[1] << 4;
  }
  __builtin_memcpy(to, codes, sizeof codes);
}

// A unit's codes of 3 bits as those of 4 lie.
inline Bytes16 as_nibbles(const std::uint8_t* unit) {
  Bytes16 codes[2];
  spread_codes<3>(unit, reinterpret_cast<std::int8_t*>(codes));
  return codes[0] | codes[1] << 4;
}

// A unit's codes in a table, times a scale.
template <std::size_t kBits>
inline void look_up(const std::uint8_t* unit, const CodeTable& table, Vec scale, Vec* to) {
  static_assert(kBits == 3 || kBits == 4, "no table is for other codes");
  Bytes16 nibbles;
  if constexpr (kBits == 3) {
    nibbles = as_nibbles(unit);
    unit = reinterpret_cast<const std::uint8_t*>(&nibbles);
  }
  Vec::look_up_nibbles<kUnitVectors / 2>(unit, table.values, scale, to);
}

// A unit's codes less `zero`, as floats.
template <std::size_t kBits>
inline void load_codes(const std::uint8_t* unit, float zero, Vec* to) {
  if constexpr (kBits == 4) {
    Vec::unpack_nibbles<kUnitVectors / 2>(unit, Vec::set(1.0F), Vec::set(-zero), to);
  } else if constexpr (kBits == 8) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(unit);
    for (std::size_t v = 0; v < kUnitVectors; ++v) to[v] = Vec::load_i8(codes + v * Vec::kWidth);
#if defined(__AVX2__)
  } else if constexpr (kBits == 2) {
    Vec::unpack_pairs(unit, zero, to);
#endif
  } else {
    std::int8_t codes[kCodeUnit];
    spread_codes<kBits>(unit, codes);
    for (std::size_t v = 0; v < kUnitVectors; ++v)
      to[v] = Vec::load_i8(codes + v * Vec::kWidth) + Vec::set(-zero);
  }
}

// What all of them have: bits a code, scales a unit, the code of 0 where there are no minimums, and what
// codes that are no integers stand for. kLines: cache lines of codes fetched together.
template <RowCodec kCodec>
struct Codes {
  static constexpr bool kReorders = false;
  static constexpr const CodecShape& kShape = shape_of(kCodec);
  static constexpr std::size_t kBits = kShape.bits, kGroup = kShape.group,
                               kScales = kCodeUnit / code_unit(kCodec);
  static constexpr bool kMinimums = kShape.has_minimum, kOfTable = kShape.of_table();
  static constexpr const CodeTable& kTable = kShape.table;
  static constexpr int kZero = zero_of_bytes(kShape);
  static constexpr bool kFactorsAlong = takes_factors_along(kCodec);

  // A unit's weights by its scales and, where kOffsets, what is added: minimums, or scale * -kZero.
  static constexpr bool kOffsets = kMinimums || (kBits == 4 && !kOfTable);
  static void decode(const std::uint8_t* unit, const float* scales, const float* offsets, Vec* to) {
    const Vec scale = Vec::set(scales[0]);
    if constexpr (kOfTable && kScales == 1) {
      look_up<kBits>(unit, kTable, scale, to);
    } else if constexpr (kBits == 4 && !kOfTable && kScales == 1) {  // its sixteen weights are looked up
      Vec::unpack_nibbles<kUnitVectors / 2>(unit, scale, Vec::set(offsets[0]), to);
    } else {
      if constexpr (kOfTable)
        look_up<kBits>(unit, kTable, Vec::set(1.0F), to);
      else
        load_codes<kBits>(unit, kZero, to);
      for (std::size_t v = 0; v < kUnitVectors; ++v) {
        const std::size_t group = v * Vec::kWidth / kGroup;
        const Vec own = Vec::set(scales[group]);
        to[v] = kMinimums ? fma(to[v], own, Vec::set(offsets[group])) : to[v] * own;
      }
    }
  }

  // What lies as far on in another vector.
  template <typename Row>
  static void prefetch_codes(const Row& row, std::size_t j) {
    constexpr std::size_t kLine = kShape.scales == Scales::floats ? 4 : kBits > 4 ? 1 : 2;
    if (j % (kLine * kCacheLine) == 0) __builtin_prefetch(row.codes + j / 8 * kBits, 0, 2);
  }
  template <typename Row>
  static void prefetch_groups(const Row& row) {
    const auto* first = reinterpret_cast<const std::uint8_t*>(row.scales);
    for (const std::uint8_t* line = first; line < row.codes; line += kCacheLine)
      __builtin_prefetch(line, 0, 2);
  }
};

// Groups of 4 and 8 bits, with a scale each.
template <RowCodec kCodec>
struct Grouped : Codes<kCodec> {
  using Codes<kCodec>::kBits, Codes<kCodec>::kGroup, Codes<kCodec>::kMinimums;
  static_assert(kGroup % kCodeUnit == 0, "groups must be whole units");

  // Where the parts of a vector are.
  struct Row {
    const std::uint16_t *scales, *minimums;
    const std::uint8_t* codes;
  };
  static Row at(const void* vector, std::size_t k) {
    const std::size_t groups = (k + kGroup - 1) / kGroup;
    const auto* scales = static_cast<const std::uint16_t*>(vector);
    const std::uint16_t* minimums = scales + groups;
    return {scales, minimums, reinterpret_cast<const std::uint8_t*>(minimums + (kMinimums ? groups : 0))};
  }

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, u); }
  static Eight minimums(const Row& row, std::size_t u) { return of_units(row.minimums, u); }

 private:
  static constexpr std::size_t kRepeat = kGroup / kCodeUnit;  // units that share a scale
  static Eight of_units(const std::uint16_t* halves, std::size_t u) {
    return Eight::template load_halves<kRepeat>(halves + u / kRepeat);
  }
};

// Groups of other codecs with a scale each, and those of a checkpoint whose scales are products: kGroup
// weights to a factor, kSharedFactors weights to what it multiplies.
template <RowCodec kCodec>
struct Carried : Codes<kCodec> {
  using Base = Codes<kCodec>;
  using Base::kBits, Base::kGroup, Base::kMinimums, Base::kOfTable, Base::kTable, Base::kZero;
  static constexpr bool kFactors = Base::kShape.scales == Scales::factors;
  static constexpr std::size_t kShared = kFactors ? kSharedFactors : kGroup;
  static constexpr float kOne = kOfTable ? kTable.unit : 1.0F;
  static_assert(kCodeUnit % kGroup == 0 && kGroup % Vec::kWidth == 0, "a vector is of one group");

  struct Row {
    const std::uint16_t *scales, *minimums;
    const std::int8_t *factors, *minimum_factors;
    const std::uint8_t* codes;
  };
  static Row at(const void* vector, std::size_t k) {
    const std::size_t shared = (k + kShared - 1) / kShared;
    const std::size_t factors = kFactors ? shared * (kShared / kGroup) : 0;
    const auto* scales = static_cast<const std::uint16_t*>(vector);
    const std::uint16_t* minimums = scales + shared;
    const auto* first = reinterpret_cast<const std::int8_t*>(minimums + (kMinimums ? shared : 0));
    const std::int8_t* second = first + factors;
    return {scales, minimums, first, second,
            reinterpret_cast<const std::uint8_t*>(second + (kMinimums ? factors : 0))};
  }

  static Eight scales(const Row& row, std::size_t u) { return of_units(row.scales, row.factors, u); }
  // Of two scales a unit: those of its last kScaled / 2 units.
  static Eight later_scales(const Row& row, std::size_t u) {
    return of_units(row.scales, row.factors + kScaled, u);
  }
  // What factors of kScaled units from u on multiply.
  static Eight shared(const Row& row, std::size_t u) {
    return Eight::set(Vec::half(row.scales[u / kScaled]));
  }
  static Eight minimums(const Row& row, std::size_t u) {
    return of_units(row.minimums, row.minimum_factors, u);
  }
  static Eight later_minimums(const Row& row, std::size_t u) {
    return of_units(row.minimums, row.minimum_factors + kScaled, u);
  }

 private:
  static Eight of_units(const std::uint16_t* halves, const std::int8_t* factors, std::size_t u) {
    if constexpr (!kFactors) return Eight::template load_halves<1>(halves + u);
    return Eight::set(Vec::half(halves[u / kScaled]) * kOne) * Eight::load_i8(factors + Base::kScales * u);
  }
};

// As row_codecs.h says of mxfp4.
struct Mxfp4 : Codes<RowCodec::mxfp4> {
  struct Row {
    const std::uint8_t *scales, *codes;
  };
  static Row at(const void* vector, std::size_t k) {
    const auto* powers = static_cast<const std::uint8_t*>(vector);
    return {powers, powers + (k + kCodeUnit - 1) / kCodeUnit};
  }

  static Eight scales(const Row& row, std::size_t u) { return Eight::half_powers(row.scales + u); }
};

// As row_codecs.h says of nvfp4.
struct Nvfp4 : Codes<RowCodec::nvfp4> {
  struct Row {
    const std::uint8_t *scales, *factors, *codes;
    // By which groups' factors, as fp16, are multiplied.
    float scale() const {
      float found;
      __builtin_memcpy(&found, scales, sizeof found);
      return found * kOfCodes;
    }
  };
  static Row at(const void* vector, std::size_t k) {
    const auto* first = static_cast<const std::uint8_t*>(vector);
    const std::uint8_t* factors = first + sizeof(float);
    return {first, factors, factors + (k + kCodeUnit - 1) / kCodeUnit * kScales};
  }

  static Eight scales(const Row& row, std::size_t u) { return of_groups(row, kScales * u); }
  static Eight later_scales(const Row& row, std::size_t u) { return of_groups(row, kScales * u + kScaled); }

 private:
  static Eight of_groups(const Row& row, std::size_t group) {
    std::uint16_t halves[kScaled];
    for (std::size_t i = 0; i < kScaled; ++i) halves[i] = half_of_e4m3(row.factors[group + i]);
    return Eight::load_halves<1>(halves) * Eight::set(row.scale());
  }
};

// As row_codecs.h says of ternary; a vector may begin anywhere.
struct Ternary : Codes<RowCodec::ternary> {
  struct Row {
    const std::uint8_t *scales, *codes;
    float scale(std::size_t j) const {
      float found;
      __builtin_memcpy(&found, scales + j / kSharedFactors * sizeof found, sizeof found);
      return found;
    }
  };
  static Row at(const void* vector, std::size_t k) {
    const auto* scales = static_cast<const std::uint8_t*>(vector);
    return {scales, scales + (k + kSharedFactors - 1) / kSharedFactors * sizeof(float)};
  }

  static Eight scales(const Row& row, std::size_t u) { return Eight::set(row.scale(u * kCodeUnit)); }
};
