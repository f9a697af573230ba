#include "io/xxh3.h"

#include <cstring>

#include "machine/processor.h"

namespace flashllm {

namespace {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "rows are stored and hashed little-endian"
#endif

constexpr std::uint64_t kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
constexpr std::uint64_t kPrime64_1 = 0x9E3779B185EBCA87U, kPrime64_2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime64_3 = 0x165667B19E3779F9U, kPrime64_4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime64_5 = 0x27D4EB2F165667C5U;
constexpr std::uint64_t kAvalanche = 0x165667919E3779F9U;

// The default secret of the specification, as little-endian words.
constexpr std::uint64_t kSecret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072, 0x78e5c0cc4ee679cb,
    0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0, 0xcb00c391bb52283c, 0xa32e531b8b65d088,
    0x4ef90da297486471, 0xd8acdea946ef1938, 0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a,
    0x647378d9c97e9fc8, 0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
constexpr std::size_t kLanes = 8;
constexpr std::size_t kStripe = 64;
constexpr std::size_t kStripesPerBlock = (sizeof(kSecret) - kStripe) / 8;
constexpr std::size_t kLastStripeSecret = sizeof(kSecret) - kStripe - 7;
constexpr std::size_t kMergeSecret = 11;

// Eight lanes as one vector; the compiler splits it where registers are narrower.
typedef std::uint64_t Vector __attribute__((vector_size(kStripe)));
struct Lanes {
  std::uint64_t acc[kLanes];
};

// Forced inline so that each caller below compiles it for its own instruction set.
inline __attribute__((always_inline)) void accumulate(Vector& acc, const unsigned char* stripe,
                                                      const unsigned char* secret) {
  Vector value, key;
  std::memcpy(&value, stripe, kStripe);
  std::memcpy(&key, secret, kStripe);
  key ^= value;
  acc += __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6) + (key & 0xFFFFFFFFU) * (key >> 32);
}

inline __attribute__((always_inline)) void hash_stripes(Lanes& lanes, const unsigned char* data,
                                                        std::size_t nbytes) {
  const auto* secret = reinterpret_cast<const unsigned char*>(kSecret);
  Vector acc, scramble;
  std::memcpy(&acc, lanes.acc, sizeof(acc));
  std::memcpy(&scramble, secret + sizeof(kSecret) - kStripe, sizeof(scramble));
  const std::size_t stripes = (nbytes - 1) / kStripe;  // the last stripe has its own rule
  std::size_t in_block = 0;
  for (std::size_t s = 0; s < stripes; ++s) {
    accumulate(acc, data + s * kStripe, secret + 8 * in_block);
    if (++in_block == kStripesPerBlock) {
      acc = ((acc ^ (acc >> 47)) ^ scramble) * kPrime32_1;
      in_block = 0;
    }
  }
  accumulate(acc, data + nbytes - kStripe, secret + kLastStripeSecret);
  std::memcpy(lanes.acc, &acc, sizeof(acc));
}

void hash_stripes_baseline(Lanes& lanes, const unsigned char* data, std::size_t nbytes) {
  hash_stripes(lanes, data, nbytes);
}

using HashStripes = void (*)(Lanes&, const unsigned char*, std::size_t);

#if defined(__x86_64__)
__attribute__((target("avx2"))) void hash_stripes_avx2(Lanes& lanes, const unsigned char* data,
                                                       std::size_t nbytes) {
  hash_stripes(lanes, data, nbytes);
}
#if defined(__clang__)  // which splits no vector that the source declares, and takes no such word here
#define FLASHLLM_WHOLE_VECTORS
#else
#define FLASHLLM_WHOLE_VECTORS ",prefer-vector-width=512"
#endif
__attribute__((target("avx512f,avx512dq" FLASHLLM_WHOLE_VECTORS))) void hash_stripes_avx512(
    Lanes& lanes, const unsigned char* data, std::size_t nbytes) {
  hash_stripes(lanes, data, nbytes);
}
HashStripes choose() {
  const Processor processor = this_processor();
  if (processor.avx512) return hash_stripes_avx512;
  return processor.avx2 ? hash_stripes_avx2 : hash_stripes_baseline;
}
#else
HashStripes choose() { return hash_stripes_baseline; }
#endif

std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
  __extension__ using uint128 = unsigned __int128;
  const uint128 product = static_cast<uint128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

std::uint64_t xxh3_64(const void* data, std::size_t nbytes) {
  static const HashStripes hash = choose();
  Lanes lanes = {
      {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1}};
  hash(lanes, static_cast<const unsigned char*>(data), nbytes);

  std::uint64_t secret[kLanes];
  std::memcpy(secret, reinterpret_cast<const unsigned char*>(kSecret) + kMergeSecret, sizeof(secret));
  std::uint64_t h = nbytes * kPrime64_1;
  for (std::size_t i = 0; i < kLanes; i += 2)
    h += fold_product(lanes.acc[i] ^ secret[i], lanes.acc[i + 1] ^ secret[i + 1]);
  h ^= h >> 37;
  h *= kAvalanche;
  return h ^ (h >> 32);
}

}  // namespace flashllm
