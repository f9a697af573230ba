#include "kernels/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>

#include "io/error.h"

namespace flashllm {

namespace {

// The next loop of a layer comes within microseconds: sleeping would cost more than spinning.
constexpr auto kSpin = std::chrono::microseconds(30);
// Finer shares end more evenly and advance side work more often; longer ones stream better.
constexpr std::size_t kSharesPerThread = 8;

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
  require(threads >= 1 && threads <= 1024,
          "compute threads must be 1 to 1024, got " + std::to_string(threads));
  workers_.reserve(static_cast<std::size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
  } catch (const std::system_error& error) {
    stop();
    throw CoreError(ErrorKind::io, "cannot start " + std::to_string(threads) + " compute threads (" +
                                       error.what() + "); use fewer with --threads");
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    generation_.fetch_add(1);
  }
  start_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(Loop loop) {
  if (loop.count == 0) return;
  if (loop.count <= loop.grain) return loop.call(loop.body, 0, loop.count);
  const std::lock_guard<std::mutex> turn(turn_);
  const std::size_t blocks = (loop.count + loop.grain - 1) / loop.grain;
  loop.shares = std::min(blocks, static_cast<std::size_t>(threads()) * kSharesPerThread);
  if (workers_.empty()) {
    loop_ = loop;
    next_share_.store(0);
    return claim_shares(true);
  }
  // 1. Open the loop.
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    loop_ = loop;
    next_share_.store(0);
    open_ = true;
    generation_.fetch_add(1);
  }
  start_.notify_all();
  // 2. Work until every share is claimed.
  claim_shares(true);
  // 3. Close the loop, so that workers that wake up late do not enter it, and wait for those inside.
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = false;
  }
  while (!spin_until([this] { return inside_.load() == 0; })) std::this_thread::yield();
}

void ThreadPool::claim_shares(bool is_caller) {
  const std::size_t blocks = (loop_.count + loop_.grain - 1) / loop_.grain;
  for (;;) {
    const std::size_t share = next_share_.fetch_add(1);
    if (share >= loop_.shares) return;
    const std::size_t begin = blocks * share / loop_.shares * loop_.grain;
    const std::size_t end = std::min(loop_.count, blocks * (share + 1) / loop_.shares * loop_.grain);
    loop_.call(loop_.body, begin, end);
    if (is_caller) advance_side_work();
  }
}

void ThreadPool::advance_side_work() {
  if (SideWork* work = side_work_.load(std::memory_order_acquire)) work->advance();
}

void ThreadPool::serve() {
  unsigned seen = 0;
  for (;;) {
    if (!spin_until([&] { return generation_.load() != seen; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return generation_.load() != seen; });
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      seen = generation_.load();
      if (stopping_) return;
      if (!open_) continue;
      inside_.fetch_add(1);
    }
    claim_shares(false);
    inside_.fetch_sub(1);
  }
}

}  // namespace flashllm
