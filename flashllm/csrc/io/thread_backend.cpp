#include "io/thread_backend.h"

#include <string>
#include <system_error>
#include <utility>

#include "io/error.h"

namespace flashllm {

bool read_by_calls(ReadQueue& queue, RequestSlot& slot, ReadQueue::Work& work) {
  for (;;) {
    const ssize_t result = slot.read.call();
    if (!queue.hold(work)) return false;
    slot.read.accept(result);
    if (slot.read.finished()) return true;
    queue.let_go(work);
  }
}

ThreadBackend::ThreadBackend(ReadQueue& queue, const ReaderOptions& options)
    : queue_(queue), unpacked_(static_cast<std::size_t>(options.threads), options.max_request) {
  // All memory is taken here, where a failure can be reported; on a reader's thread it would end the process.
  const auto threads = static_cast<std::size_t>(options.threads);
  threads_.reserve(threads);
  for (std::size_t i = 0; i < threads; ++i)
    slots_.push_back(std::make_unique<RequestSlot>(options.max_request, unpacked_, i));
  try {
    for (const auto& slot : slots_) threads_.emplace_back([this, &slot] { serve(*slot); });
  } catch (const std::system_error& error) {
    stop();
    throw CoreError(ErrorKind::io, "cannot start " + std::to_string(options.threads) + " reader threads (" +
                                       error.what() + "); use fewer io_threads");
  } catch (...) {
    stop();
    throw;
  }
}

void ThreadBackend::start() noexcept {
  if (unannounced_.load(std::memory_order_relaxed) == 0) return;
  queue_.notify(unannounced_.exchange(0), threads_.size());
}

bool ThreadBackend::wait(ReadBatch& batch, std::chrono::milliseconds at_most) {
  start();
  return queue_.wait(batch, at_most);
}

void ThreadBackend::serve(RequestSlot& slot) {
  ReadQueue::Work work;
  while (queue_.take(work)) {
    RequestOutcome outcome;
    std::exception_ptr error;
    try {
      slot.begin(*work.request, work.jobs, *work.file);
      queue_.let_go(work);
      if (!read_by_calls(queue_, slot, work)) return;
      outcome = slot.finish();
    } catch (...) {
      error = std::current_exception();
    }
    queue_.finish(work, outcome, std::move(error));  // the waiting thread is its last owner
  }
}

// A thread in a read that never ends cannot be joined; the others end.
void ThreadBackend::abandon() noexcept {
  for (std::thread& thread : threads_) thread.detach();
}

void ThreadBackend::stop() {
  queue_.close();
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace flashllm
