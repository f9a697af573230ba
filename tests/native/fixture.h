// What the tests of several parts share.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "io/error.h"

namespace flashllm {

inline std::vector<float> random_floats(std::size_t n, std::mt19937& random, float scale = 1.0F) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = scale * normal(random);
  return values;
}

inline bool same_bits(const float* a, const float* b, std::size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(float)) == 0;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

// Whether the call breaks a contract, and is told so.
template <typename Call>
bool is_refused(const Call& call) {
  try {
    call();
  } catch (const CoreError& error) {
    return error.kind() == ErrorKind::usage;
  }
  return false;
}

inline void write_file(const std::string& path, const void* data, std::size_t nbytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0 && write(fd, data, nbytes) == static_cast<ssize_t>(nbytes) && fsync(fd) == 0);
  close(fd);
}

}  // namespace flashllm
