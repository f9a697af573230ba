// A new file of a stated size, written in large aligned runs by threads, past the page cache where the file
// system allows it. Where it does not, `direct()` says so and writes go through the page cache: the caller
// must tell the user. The file is the caller's to remove. Nothing is synced: it is for scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <shared_mutex>
#include <string>
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
  ~DirectWriter() { close(); }
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  bool direct() const { return direct_; }
  const std::string& fallback_reason() const { return fallback_reason_; }  // empty when direct
  std::size_t memory_alignment() const { return memory_alignment_; }       // what write() asks of `data`

  struct Run {
    std::uint64_t offset;
    const std::byte* data;
    std::size_t nbytes;
  };
  // Writes the runs, in no order, and returns when all are written; several threads may write at once. Throws
  // CoreError: usage for an offset, a size or memory that is not aligned, for a run beyond the file, and
  // after close(), and nothing is written; io (path, offset, size, errno) for the first write that failed,
  // and what was not begun by then is not written.
  void write(const std::vector<Run>& runs);
  // Waits for the writes under way and closes the file. A second call does nothing.
  void close();

 private:
  void require_room() const;
  void create();
  void allocate();
  [[noreturn]] void throw_no_room(const std::string& free, int error) const;
  std::string make_direct();  // why not; empty: writes are direct from now on
  void require_run(const Run& run) const;
  void write_piece(const Run& piece) const;

  std::string path_;
  std::uint64_t size_;
  std::size_t threads_;
  int fd_ = -1;
  bool direct_ = false;
  std::string fallback_reason_;
  std::size_t memory_alignment_ = 1;
  std::shared_mutex open_;  // held by writers; alone by who closes the file
};

}  // namespace flashllm
