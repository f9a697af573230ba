#include "fault.h"

#include <map>
#include <utility>

namespace flashllm {

namespace {

// The files with faults. They do not know of it: the product's files have no room for a plan.
std::mutex mutex;
std::map<const DirectFile*, std::shared_ptr<FaultPlan>> plans;

}  // namespace

void inject(const DirectFile& file, std::shared_ptr<FaultPlan> faults) {
  const std::lock_guard<std::mutex> lock(mutex);
  plans[&file] = std::move(faults);
}

// What direct_file.cpp calls.
ssize_t distort_read(const DirectFile& file, const struct iovec* iov, ssize_t result) {
  std::shared_ptr<FaultPlan> plan;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = plans.find(&file);
    if (found != plans.end()) plan = found->second;
  }
  return plan ? plan->distort(iov, result) : result;
}

void forget_faults(const DirectFile& file) {
  const std::lock_guard<std::mutex> lock(mutex);
  plans.erase(&file);
}

}  // namespace flashllm
