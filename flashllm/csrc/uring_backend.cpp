#include "uring_backend.h"

#if defined(__linux__)
#include <sys/eventfd.h>
#endif
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "error.h"

namespace flashllm {

namespace {

constexpr std::uint64_t kWake = ~std::uint64_t{0};  // the id of the read of the eventfd

int make_wake() {
#if defined(__linux__)
  const int wake = eventfd(0, EFD_CLOEXEC);
  if (wake >= 0) return wake;
#endif
  throw CoreError(ErrorKind::io, "cannot make an eventfd: " + std::generic_category().message(errno));
}

}  // namespace

UringBackend::UringBackend(ReadQueue& queue, const ReaderOptions& options)
    : queue_(queue), verify_(options.verify), ring_(static_cast<unsigned>(options.queue_depth) + 1) {
  const auto depth = static_cast<std::size_t>(options.queue_depth);
  for (std::size_t i = 0; i < depth; ++i) {
    active_.push_back(std::make_unique<Active>(options));
    free_.push_back(i);
  }
  wake_ = make_wake();
  wake_iov_ = {&wake_value_, sizeof wake_value_};
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    close(wake_);
    throw CoreError(ErrorKind::io, std::string("cannot start the reader thread (") + error.what() + ")");
  }
}

UringBackend::~UringBackend() {
  queue_.close();
  stopping_ = true;
  wake();
  thread_.join();
  close(wake_);
}

// The token's thread calls this for every batch: it makes no system call where the thread is up, or has its
// hands full and comes back of itself.
void UringBackend::work_arrived(std::size_t) {
  if (idle_.exchange(false)) wake();
}

void UringBackend::wake() {
  const std::uint64_t one = 1;
  while (write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void UringBackend::serve() {
  ring_.enable();
  listen();
  while (!stopping_ || free_.size() != active_.size()) {
    start_requests();
    if (!free_.empty()) {
      idle_ = true;
      start_requests();  // what arrived before it was
    }
    ring_.submit_and_wait();
    idle_ = false;
    std::uint64_t id = 0;
    ssize_t result = 0;
    while (ring_.reap(id, result)) {
      if (id == kWake) {
        listen();
      } else {
        answer(id, result);
      }
    }
  }
}

void UringBackend::listen() { ring_.read(kWake, wake_, &wake_iov_, 1, 0); }

void UringBackend::start_requests() {
  while (!free_.empty()) {
    const std::size_t index = free_.back();
    Active& active = *active_[index];
    if (!queue_.try_take(active.work)) return;
    free_.pop_back();
    try {
      active.slot.begin(*active.work.request, active.work.jobs, *active.work.file);
      ask(index);
    } catch (...) {
      finish(index, {}, std::current_exception());
    }
  }
}

void UringBackend::ask(std::size_t index) {
  const DirectRead& read = active_[index]->slot.read;
  ring_.read(index, read.descriptor(), read.iov(), read.iovcnt(), read.offset());
}

void UringBackend::answer(std::size_t index, ssize_t result) {
  RequestOutcome outcome;
  std::exception_ptr error;
  try {
    RequestSlot& slot = active_[index]->slot;
    slot.read.accept(result);
    if (!slot.read.finished()) return ask(index);
    outcome = slot.finish(verify_);
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
