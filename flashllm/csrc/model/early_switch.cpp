#include "model/early_switch.h"

#include <algorithm>

namespace flashllm {

double EarlySwitch::Arm::median() const {
  auto sorted = times;
  const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(count, kKept));
  const auto middle = sorted.begin() + (end - sorted.begin() - 1) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

bool EarlySwitch::next(double seconds) {
  if (seconds > 0 && started_) arms_[current_ ? 1 : 0].add(seconds);
  started_ = true;
  if (left_ > 0) {
    --left_;
    return current_;
  }
  const bool tried = arms_[0].count >= kTrial && arms_[1].count >= kTrial;
  if (!tried) {
    // The trial alternates, so that a drifting machine drifts for both.
    current_ = !current_;
    return current_;
  }
  const bool before = winner_;
  winner_ = arms_[1].median() < kMargin * arms_[0].median();
  if (winner_ != before) period_ = kFirstPeriod;
  probing_ = !probing_;
  current_ = probing_ ? winner_ : !winner_;
  left_ = (probing_ ? period_ : kProbe) - 1;
  if (probing_) period_ = std::min(2 * period_, kPeriod);
  return current_;
}

}  // namespace flashllm
