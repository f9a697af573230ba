#include "fault.h"

#include <chrono>
#include <map>
#include <thread>
#include <utility>

namespace flashllm {

namespace {

// The files with faults. They do not know of it: the product's files have no room for a plan.
std::mutex mutex;
std::map<const void*, std::shared_ptr<FaultPlan>> plans;

void set(const void* file, std::shared_ptr<FaultPlan> faults) {
  const std::lock_guard<std::mutex> lock(mutex);
  plans[file] = std::move(faults);
}

ssize_t distort(const void* file, const struct iovec* iov, ssize_t result) {
  std::shared_ptr<FaultPlan> plan;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = plans.find(file);
    if (found != plans.end()) plan = found->second;
  }
  return plan ? plan->distort(iov, result) : result;
}

std::atomic<std::uint64_t> refusals{0}, interrupts{0}, passes{0}, hangs{0}, losses{0};
std::atomic<bool> goes_on{true};

// Of completions, guarded by `mutex`.
WrongCompletions wrong_completions{{}, 0, 0, 0};
std::uint64_t completions = 0;
bool repeats = false;
std::uint64_t repeated_id = 0;
ssize_t repeated_result = 0;

bool take_one(std::atomic<std::uint64_t>& left) {
  std::uint64_t count = left.load();
  while (count != 0)
    if (left.compare_exchange_weak(count, count - 1)) return true;
  return false;
}

void forget(const void* file) {
  const std::lock_guard<std::mutex> lock(mutex);
  plans.erase(file);
}

}  // namespace

void inject(const DirectFile& file, std::shared_ptr<FaultPlan> faults) { set(&file, std::move(faults)); }
void inject(const DirectWriter& file, std::shared_ptr<FaultPlan> faults) { set(&file, std::move(faults)); }

void refuse_enters(std::uint64_t count) { refusals = count; }
void interrupt_probes(std::uint64_t count) { interrupts = count; }
void hang_reads(std::uint64_t count, std::uint64_t after) {
  passes = after;
  hangs = count;
  goes_on = count == 0;
}
void lose_completions(std::uint64_t count) { losses = count; }

void distort_completions(WrongCompletions wrong) {
  const std::lock_guard<std::mutex> lock(mutex);
  wrong_completions = wrong;
  completions = 0;
  repeats = false;
}

// What io_uring.cpp calls.
bool repeats_completion(std::uint64_t& id, ssize_t& result) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!repeats) return false;
  repeats = false;
  id = repeated_id;
  result = repeated_result;
  return true;
}
void distort_completion(std::uint64_t& id, ssize_t& result) {
  const std::lock_guard<std::mutex> lock(mutex);
  const std::uint64_t number = completions++;
  if (number < wrong_completions.first || number - wrong_completions.first >= wrong_completions.count) return;
  switch (wrong_completions.kind) {
    case WrongCompletions::Kind::id:
      id ^= static_cast<std::uint64_t>(wrong_completions.argument);
      break;
    case WrongCompletions::Kind::length:
      if (result > 0) result = std::max<ssize_t>(0, result + wrong_completions.argument);
      break;
    case WrongCompletions::Kind::error:
      result = -wrong_completions.argument;
      break;
    case WrongCompletions::Kind::twice:
      repeats = true;
      repeated_id = id;
      repeated_result = result;
      break;
  }
}
bool refuses_enter() { return take_one(refusals); }
bool loses_completion() { return take_one(losses); }

// What direct_file.cpp and direct_writer.cpp call.
bool interrupts_probe() { return take_one(interrupts); }
void hang_if_asked() {
  if (take_one(passes) || !take_one(hangs)) return;
  while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
ssize_t distort_read(const DirectFile& file, const struct iovec* iov, ssize_t result) {
  return distort(&file, iov, result);
}
ssize_t distort_write(const DirectWriter& file, const struct iovec* iov, ssize_t result) {
  return distort(&file, iov, result);
}
void forget_faults(const DirectFile& file) { forget(&file); }
void forget_faults(const DirectWriter& file) { forget(&file); }

}  // namespace flashllm
