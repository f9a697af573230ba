#include "io/uring_backend.h"

#include <cerrno>
#include <thread>
#include <utility>

#include "io/error.h"
#include "io/thread_backend.h"

namespace flashllm {

UringBackend::UringBackend(ReadQueue& queue, const ReaderOptions& options)
    : queue_(queue),
      ring_(static_cast<unsigned>(options.queue_depth)),
      unpacked_(static_cast<std::size_t>(options.queue_depth), options.max_request) {
  const auto depth = static_cast<std::size_t>(options.queue_depth);
  for (std::size_t i = 0; i < depth; ++i) {
    active_.push_back(std::make_unique<Active>(options.max_request, unpacked_, i));
    free_.push_back(i);
  }
}

UringBackend::~UringBackend() {
  queue_.close();
  for (take_in(); free_.size() != active_.size(); take_in()) submit(1);
}

void UringBackend::start() noexcept {
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (turn.owns_lock()) step();  // else its holder does the same
}

void UringBackend::advance() noexcept {
  const auto now = Clock::now().time_since_epoch().count();
  if (now < next_look_.load(std::memory_order_relaxed)) return;
  const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
  if (!turn.owns_lock()) return;
  step();
  next_look_.store(now + kBetweenLooks.count(), std::memory_order_relaxed);
}

void UringBackend::step() {
  if (queue_.is_lost()) return;
  if (ring_.has_work()) submit(0);
  take_in();
  start_requests();
  if (ring_.has_work()) submit(0);
}

void UringBackend::submit(unsigned wait_for, std::chrono::milliseconds at_most) {
  if (ring_.submit(wait_for, at_most)) {
    refusals_ = 0;
    return;
  }
  if (++refusals_ < kPatience) return std::this_thread::yield();  // what is under way will end, and make room
  refusals_ = 0;
  for (const std::uint64_t id : ring_.take_back()) read_here(id % kIndices);
}

bool UringBackend::wait(ReadBatch& batch, std::chrono::milliseconds at_most) {
  const auto end = Clock::now() + at_most;
  while (!queue_.poll(batch)) {
    const std::lock_guard<std::mutex> turn(turn_);
    if (queue_.is_lost()) return false;
    take_in();
    if (queue_.poll(batch)) return true;
    if (Clock::now() >= end) return false;
    start_requests();
    // With nothing under way, all requests failed before they reached the kernel: no completion would come.
    if (free_.size() != active_.size()) submit(1, at_most);
  }
  return true;
}

void UringBackend::take_in() {
  std::uint64_t id = 0;
  ssize_t result = 0;
  while (ring_.reap(id, result)) {
    const std::size_t index = id % kIndices;
    // What belongs to no read under way (a second completion, one of a read that nobody asked for) says
    // nothing. Where it is in the place of another, that one never ends.
    if (index < active_.size() && active_[index]->id == id) answer(index, result);
  }
}

void UringBackend::start_requests() {
  while (!free_.empty()) {
    const std::size_t index = free_.back();
    Active& active = *active_[index];
    if (!queue_.try_take(active.work)) return;
    free_.pop_back();
    active.cancellations = 0;
    try {
      active.slot.begin(*active.work.request, active.work.jobs, *active.work.file);
      queue_.let_go(active.work);
      ask(index);
    } catch (...) {
      finish(index, {}, std::current_exception());
    }
  }
}

void UringBackend::ask(std::size_t index) {
  const DirectRead& read = active_[index]->slot.read;
  active_[index]->id = ++num_asked_ * kIndices + index;
  ring_.read(active_[index]->id, read.descriptor(), read.iov(), read.iovcnt(), read.offset());
}

void UringBackend::answer(std::size_t index, ssize_t result) {
  active_[index]->id = 0;
  if (result == -ECANCELED && ++active_[index]->cancellations < kPatience)
    return ask(index);  // the submitting thread has ended
  ReadQueue::Work& work = active_[index]->work;
  if (!queue_.hold(work)) return;
  RequestOutcome outcome;
  std::exception_ptr error;
  try {
    RequestSlot& slot = active_[index]->slot;
    slot.read.accept(result);
    if (!slot.read.finished()) {
      queue_.let_go(work);
      return ask(index);
    }
    outcome = slot.finish();
  } catch (...) {
    error = std::current_exception();
  }
  finish(index, outcome, std::move(error));
}

// A request that the kernel does not take: by plain reads, on this thread.
void UringBackend::read_here(std::size_t index) {
  RequestOutcome outcome;
  std::exception_ptr error;
  Active& active = *active_[index];
  active.id = 0;
  try {
    if (!read_by_calls(queue_, active.slot, active.work)) return;
    outcome = active.slot.finish();
  } catch (...) {
    error = std::current_exception();
  }
  finish(index, outcome, std::move(error));
}

void UringBackend::finish(std::size_t index, const RequestOutcome& outcome, std::exception_ptr error) {
  free_.push_back(index);
  queue_.finish(active_[index]->work, outcome, std::move(error));
}

}  // namespace flashllm
