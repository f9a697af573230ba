// What a step did and where its time went. Times are exposed wall time: each instant of a call is in exactly
// one of the first three.
#pragma once

#include <cstdint>

namespace flashllm {

struct FfnCounters {
  // Of finished reads: ReadStats, or StreamTimes.
  template <typename Stats>
  void add(const Stats& reads) {
    bytes_read += reads.bytes;
    requests += reads.requests;
    retries += reads.retries;
  }

  std::uint64_t io_ns = 0;       // waiting for the reader
  std::uint64_t memory_ns = 0;   // cache bookkeeping, row moves, planning and handing over requests
  std::uint64_t compute_ns = 0;  // predictor and products
  std::uint64_t io_busy_ns = 0;  // reads under way, behind compute or not; those that overlap count once
  std::uint64_t bytes_read = 0, requests = 0, retries = 0;
  // Of tokens that go through a layer together, a row that is missing is a miss of the first that wants it.
  std::uint64_t active = 0, hits = 0, misses = 0, parts = 0;
  std::uint64_t united = 0;          // active neurons, each once for tokens that go through a layer together
  std::uint64_t rejected_bytes = 0;  // rows that only drafted tokens wanted which turned out wrong
  std::uint64_t prefetched = 0, prefetch_used = 0;  // rows prefetched, and the misses that found theirs there
  std::uint64_t behind_bytes = 0;  // read behind the tokens (FfnLayer::load), in no other count
};

}  // namespace flashllm
