// Compute threads: the caller and `threads - 1` workers share the indices of a loop. Work is split over
// outputs, never over the terms of a sum, so results do not depend on the number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace flashllm {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) on disjoint ranges that cover [0, count), each a multiple of `grain` long but the
  // last. Returns when all are done. `body` must not throw. One loop at a time.
  void parallel_for(std::size_t count, std::size_t grain,
                    const std::function<void(std::size_t, std::size_t)>& body);

 private:
  void serve(int worker);
  void run_share(int share);

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> running_{0};
  bool stopping_ = false;
  const std::function<void(std::size_t, std::size_t)>* body_ = nullptr;
  std::size_t count_ = 0;
  std::size_t grain_ = 1;
};

}  // namespace flashllm
