// Inputs as the codes that row_codecs.h has, in loops that each level's compiler makes vectors of. The bits
// are those of every level.

namespace {

__attribute__((always_inline)) inline float largest_magnitude(const float* x, std::size_t n) {
  // Bits of floats without their signs are in the order of the floats, and integers' largest is found in any.
  std::int32_t most = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t bits = load_as<std::int32_t>(x + i) & std::numeric_limits<std::int32_t>::max();
    most = bits > most ? bits : most;
  }
  return load_as<float>(&most);
}
float largest_of(const float* x, std::size_t n) { return largest_magnitude(x, n); }

inline std::int32_t nearest(float value) {
  constexpr float kRounding = 12582912.0F;  // 1.5 * 2^23: adding it leaves no fraction
  return static_cast<std::int32_t>((value + kRounding) - kRounding);
}

// The codes of inputs of this largest magnitude, and their scale.
template <typename Code, typename To>
__attribute__((always_inline)) inline float to_codes(const float* x, std::size_t n, float largest,
                                                     To* codes) {
  constexpr float kMost = std::numeric_limits<Code>::max(),
                  kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kTiny = 1e-30F;  // below it a reciprocal may not be finite
  if (largest >= kTiny && largest < kInfinity) {
    const float by = kMost / largest;
    for (std::size_t i = 0; i < n; ++i) codes[i] = static_cast<To>(nearest(x[i] * by));
    return largest / kMost;
  }
  __builtin_memset(codes, 0, n * sizeof(To));
  return largest < kTiny ? 0.0F : std::numeric_limits<float>::quiet_NaN();
}

float to_int16(const float* x, std::size_t n, std::int16_t* codes) {
  return to_codes<std::int16_t>(x, n, largest_magnitude(x, n), codes);
}

float unit_to_int8(const float* x, const float* largest, std::int8_t* codes, std::int32_t* total) {
  std::int32_t wide[kCodeUnit], sum = 0;
  const float scale = to_codes<std::int8_t>(
      x, kCodeUnit, largest == nullptr ? largest_magnitude(x, kCodeUnit) : *largest, wide);
  for (std::size_t i = 0; i < kCodeUnit; ++i) codes[i] = static_cast<std::int8_t>(wide[i]);
  for (std::size_t i = 0; i < kCodeUnit; ++i) sum += wide[i];
  *total = sum;
  return scale;
}

// Writes a unit's codes to their places in its window, its scale and its totals.
template <typename Code>
__attribute__((always_inline)) inline void put_unit(const float* x, float largest, std::size_t unit,
                                                    const InputCodes& to) {
  constexpr std::size_t kWindow = 4, kWord = 4, kHalf = kCodeUnit / 2, kShift = 8 * (sizeof(Code) - 1);
  std::int32_t codes[kCodeUnit];
  to.scales[unit] = to_codes<Code>(x, kCodeUnit, largest, codes);
  std::int8_t* at = to.codes + unit / kWindow * kWindow * kCodeUnit * sizeof(Code) + unit % kWindow * kWord;
  for (std::size_t shift = 0; shift <= kShift; shift += 8, at += kWindow * kCodeUnit) {
    std::int8_t bytes[kCodeUnit];
    for (std::size_t i = 0; i < kCodeUnit; ++i) bytes[i] = static_cast<std::int8_t>(codes[i] >> shift);
    for (std::size_t word = 0; word < kCodeUnit; word += kWord)
      __builtin_memcpy(at + word * kWindow, bytes + word, kWord);
  }
  std::int32_t totals[2] = {0, 0};
  for (std::size_t i = 0; i < kHalf; ++i) totals[0] += codes[i] >> kShift;
  for (std::size_t i = kHalf; i < kCodeUnit; ++i) totals[1] += codes[i] >> kShift;
  for (std::size_t half = 0; half < 2; ++half) to.halves[half][unit] = totals[half];
  to.totals[unit] = totals[0] + totals[1];
}

template <typename Code>
void code_inputs(const float* x, std::size_t length, bool together, const InputCodes& to) {
  const float all = together ? largest_of(x, length) : 0.0F;
  const auto code = [&](const float* from, std::size_t unit) {
    put_unit<Code>(from, together ? all : largest_magnitude(from, kCodeUnit), unit, to);
  };
  const std::size_t whole = length / kCodeUnit;
  for (std::size_t unit = 0; unit < whole; ++unit) code(x + unit * kCodeUnit, unit);
  for (std::size_t unit = whole; unit < padded_units(length); ++unit) {
    float padded[kCodeUnit] = {};
    if (unit == whole && length % kCodeUnit != 0)
      __builtin_memcpy(padded, x + unit * kCodeUnit, length % kCodeUnit * sizeof *x);
    code(padded, unit);
  }
}

const InputKernels kInputs = {largest_of, to_int16, unit_to_int8, code_inputs<std::int8_t>,
                              code_inputs<std::int16_t>};

}  // namespace
