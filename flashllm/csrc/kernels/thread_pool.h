// Compute threads: the caller and `threads - 1` workers share the indices of a loop. Work is split over
// outputs, never over the terms of a sum, so results do not depend on the number of threads.
//
// Workers claim shares; none is dealt to them. A worker that sleeps, or that the scheduler has put aside,
// does not help, but the loop never waits for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "io/side_work.h"

namespace flashllm {

class ThreadPool {
 public:
  // Throws CoreError when the threads cannot be started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Callers of loops advance it between two shares; nullptr: none. Must outlive its use here.
  void set_side_work(SideWork* work) { side_work_.store(work); }

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) on disjoint ranges that cover [0, count), each a multiple of `grain` long but the
  // last. Returns when all are done. `body` must not throw nor loop itself. Loops of several callers take
  // turns.
  template <typename Body>
  void parallel_for(std::size_t count, std::size_t grain, const Body& body) {
    // A plain pointer pair: std::function would allocate for each loop.
    run({[](const void* b, std::size_t begin, std::size_t end) {
           (*static_cast<const Body*>(b))(begin, end);
         },
         &body, count, grain, 0});
  }

 private:
  struct Loop {
    void (*call)(const void* body, std::size_t begin, std::size_t end);
    const void* body;
    std::size_t count, grain, shares;
  };

  void run(Loop loop);
  void claim_shares(bool is_caller);
  void advance_side_work();
  void serve();
  void stop();

  std::vector<std::thread> workers_;
  std::mutex turn_;  // held for a whole loop
  std::mutex mutex_;
  std::condition_variable start_;
  std::atomic<SideWork*> side_work_{nullptr};
  std::atomic<unsigned> generation_{0};
  std::atomic<std::size_t> next_share_{0};
  std::atomic<int> inside_{0};  // workers that entered the loop and have not left it
  bool open_ = false;           // workers may enter the loop; with stopping_ guarded by mutex_
  bool stopping_ = false;
  Loop loop_{};
};

}  // namespace flashllm
