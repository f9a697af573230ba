// What can go wrong below Python. The binding turns each kind into the exception of flashllm.errors it names.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace flashllm {

enum class ErrorKind {
  io,        // the operating system failed a call: FlashIOError
  format,    // a file is shorter than it must be: FormatError
  checksum,  // a row read from flash has the wrong bytes: ChecksumError
  numbers,   // a result is not finite: NonFiniteError
  usage,     // the caller broke a contract: ValueError
};

class CoreError : public std::runtime_error {
 public:
  static constexpr std::uint64_t kNoOffset = ~std::uint64_t{0};

  CoreError(ErrorKind kind, const std::string& message, std::uint64_t offset = kNoOffset)
      : std::runtime_error(message), kind_(kind), offset_(offset) {}
  ErrorKind kind() const { return kind_; }
  std::uint64_t offset() const { return offset_; }  // in the file, where there is one

 private:
  ErrorKind kind_;
  std::uint64_t offset_;
};

// What the system says of an errno.
inline std::string described(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

// Of what a caller must see to.
inline void require(bool condition, const char* message) {
  if (!condition) throw CoreError(ErrorKind::usage, message);
}
inline void require(bool condition, const std::string& message) { require(condition, message.c_str()); }

}  // namespace flashllm
