// What can go wrong below Python. The binding turns each kind into the exception of flashllm.errors it names.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace flashllm {

enum class ErrorKind {
  io,        // the operating system failed a call: FlashIOError
  format,    // a file is shorter than it must be: FormatError
  checksum,  // a row read from flash has the wrong bytes: ChecksumError
  usage,     // the caller broke a contract: ValueError
};

class CoreError : public std::runtime_error {
 public:
  CoreError(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace flashllm
