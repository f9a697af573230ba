#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "error.h"

namespace flashllm {

namespace {

// Between the loops of one layer the next one comes within microseconds; sleeping would cost more than the
// wait.
constexpr auto kSpin = std::chrono::microseconds(30);

template <typename Ready>
bool spin_until(Ready ready) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    if (std::chrono::steady_clock::now() >= deadline) return ready();
  }
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1 || threads > 1024)
    throw CoreError(ErrorKind::usage, "compute threads must be 1 to 1024, got " + std::to_string(threads));
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    generation_.fetch_add(1);
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, std::size_t grain,
                              const std::function<void(std::size_t, std::size_t)>& body) {
  if (workers_.empty() || count <= grain) {
    if (count != 0) body(0, count);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    count_ = count;
    grain_ = grain;
    running_.store(static_cast<int>(workers_.size()));
    generation_.fetch_add(1);
  }
  start_.notify_all();
  run_share(0);
  const auto finished = [this] { return running_.load() == 0; };
  while (!spin_until(finished)) std::this_thread::yield();
}

void ThreadPool::run_share(int share) {
  const std::size_t blocks = (count_ + grain_ - 1) / grain_;
  const auto shares = static_cast<std::size_t>(threads());
  const auto s = static_cast<std::size_t>(share);
  const std::size_t begin = blocks * s / shares * grain_;
  const std::size_t end = std::min(count_, blocks * (s + 1) / shares * grain_);
  if (begin < end) (*body_)(begin, end);
}

void ThreadPool::serve(int worker) {
  unsigned seen = 0;
  for (;;) {
    if (!spin_until([&] { return generation_.load() != seen; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return generation_.load() != seen; });
    }
    {
      // The loop's arguments were written under the lock.
      const std::lock_guard<std::mutex> lock(mutex_);
      seen = generation_.load();
      if (stopping_) return;
    }
    run_share(worker);
    running_.fetch_sub(1);
  }
}

}  // namespace flashllm
