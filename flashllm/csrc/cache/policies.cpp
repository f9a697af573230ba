#include "cache/policies.h"

#include <algorithm>

#include "cache/frequency_policy.h"
#include "cache/window_policy.h"
#include "io/error.h"

namespace flashllm {

namespace {

// No cache at all: every active unit is read for every token (paper A, table 2, before windowing).
class NoPolicy final : public CachePolicy {
 public:
  void observe(const std::vector<std::int32_t>& /*active*/) override {}
  void choose(const SlotTable& slots, const CacheRequest& request, CacheChoice& choice) override {
    choose_evicted(slots, slots.num_used(), choice.leaving);
    const auto room = std::min(request.misses.size(), static_cast<std::size_t>(slots.capacity()));
    const auto middle = request.misses.begin() + static_cast<std::ptrdiff_t>(room);
    choice.coming.assign(request.misses.begin(), middle);
    choice.bypassing.assign(middle, request.misses.end());
  }
  bool keeps_units() const override { return false; }
  void choose_kept(const std::vector<std::int32_t>& /*candidates*/, std::int32_t /*capacity*/,
                   std::vector<std::int32_t>& kept) const override {
    kept.clear();
  }
  void choose_evicted(const SlotTable& slots, std::int32_t count,
                      std::vector<std::int32_t>& evicted) override {
    evicted.assign(slots.pointers(), slots.pointers() + count);
  }
};

}  // namespace

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, std::int32_t num_units,
                                               std::int32_t window, const float* popularity) {
  if (name == "window") return std::make_unique<WindowPolicy>(num_units, window);
  if (name == "frequency") return std::make_unique<FrequencyPolicy>(num_units, popularity);
  if (name == "none") return std::make_unique<NoPolicy>();
  throw CoreError(ErrorKind::usage, "the cache policy must be window, frequency or none, got " + name);
}

}  // namespace flashllm
