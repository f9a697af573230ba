// A new file of a stated size, written in large aligned runs by threads, past the page cache where the file
// system allows it. Where it does not, `direct()` says so and writes go through the page cache: the caller
// must tell the user. The file is the caller's to remove. Nothing is synced: it is for scratch.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace flashllm {

class DirectWriter {
 public:
  static constexpr std::size_t kAlignment =
      4096;  // of sizes and offsets: a page, and a whole number of sectors

  // Creates the file, readable and writable by its owner alone, with room for all of `nbytes`. Throws
  // CoreError: usage for a size that is not a positive multiple of kAlignment; io where the file exists
  // already, cannot be made, or the drive has no room (with both sizes). A file that was made is removed
  // again.
  DirectWriter(std::string path, std::uint64_t nbytes, int threads);
  // Waits as close() does; errors are lost.
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  bool direct() const { return direct_; }
  const std::string& fallback_reason() const { return fallback_reason_; }  // empty when direct
  std::size_t memory_alignment() const { return memory_alignment_; }       // what write() asks of `data`

  // Starts to write; `data` must stay as it is until the write is done. Writes that overlap have no order.
  // Returns the write's ticket. Throws CoreError (usage) for an offset, a size or memory that is not aligned,
  // for a run beyond the file, and after close().
  std::uint64_t write(std::uint64_t offset, const std::byte* data, std::size_t nbytes);

  // Whether the write is done, or failed.
  bool finished(std::uint64_t ticket);
  // Until it is. Throws its CoreError (io: path, offset, size, errno) once.
  void wait(std::uint64_t ticket);
  // The same for all; the error thrown is the earliest write's, and the others' are forgotten.
  void wait_all();
  // wait_all, then the threads end and the file is closed. A second call does nothing.
  void close();

 private:
  struct Write {
    std::uint64_t offset;
    const std::byte* data;
    std::size_t nbytes;
    std::size_t claimed, unfinished;  // bytes
    std::exception_ptr error;
  };
  struct Piece {
    std::uint64_t ticket, offset;
    const std::byte* data;
    std::size_t nbytes;
  };

  void require_room() const;
  void create();
  void allocate();
  [[noreturn]] void throw_no_room(const std::string& free, int error) const;
  std::string make_direct();  // why not; empty: writes are direct from now on
  void serve();
  Piece claim();
  void finish(const Piece& piece, std::exception_ptr error);
  void write_piece(const Piece& piece) const;
  bool is_finished(std::uint64_t ticket) const;
  void stop();

  std::string path_;
  std::uint64_t size_;
  int fd_ = -1;
  bool direct_ = false;
  std::string fallback_reason_;
  std::size_t memory_alignment_ = 1;

  std::mutex mutex_;  // guards all below
  std::condition_variable work_, done_;
  std::map<std::uint64_t, Write> writes_;  // under way, or failed and not waited for
  std::deque<std::uint64_t> unclaimed_;    // tickets with bytes that no thread has taken
  std::uint64_t next_ticket_ = 0;
  std::size_t under_way_ = 0;
  bool stopping_ = false, closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace flashllm
