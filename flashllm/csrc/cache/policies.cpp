#include "cache/policies.h"

#include "cache/frequency_policy.h"
#include "cache/window_policy.h"
#include "io/error.h"

namespace flashllm {

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_units,
                                               std::int32_t window, const float* popularity) {
  if (name == "window") return std::make_unique<WindowPolicy>(num_units, window);
  if (name == "frequency") return std::make_unique<FrequencyPolicy>(num_units, popularity);
  throw CoreError(ErrorKind::usage, "the cache policy must be window or frequency, got " + name);
}

}  // namespace flashllm
