// The cache policies by name.
#pragma once

#include <memory>
#include <string>

#include "cache/cache_policy.h"

namespace flashllm {

// "window": paper A's, of `window` tokens. "frequency": by estimated frequency; `popularity` [num_units] is
// the share of tokens each unit was active in before, or nullptr. Throws CoreError for another name.
std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_units,
                                               std::int32_t window, const float* popularity);

}  // namespace flashllm
