// Does reading ahead on a guess pay, here and now? Decided by the clock: tokens with it against tokens
// without.
//
// Reads ahead help while the device would idle and hurt where wrong guesses keep it from what is wanted, and
// both move with the machine. Changes what is read, never what is computed. Plain bookkeeping; knows no reads
// and no clock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>

namespace flashllm {

class EarlySwitch {
 public:
  static constexpr std::size_t kTrial = 6;  // tokens of each arm before the first decision
  static constexpr std::size_t kProbe = 3;  // tokens of the losing arm at each later look: half of those kept
  // Tokens between looks: the first after a decision comes soon, because a drive's bad moment may have made
  // it.
  static constexpr std::size_t kFirstPeriod = 12, kPeriod = 50;
  static constexpr double kMargin = 1.03;  // off must win by this much: on a busy machine times scatter

  // Whether the next token reads ahead. `seconds` is how long the last one took; 0 where there was none.
  bool next(double seconds);

  bool winner() const { return winner_; }

 private:
  static constexpr std::size_t kKept = 6;
  struct Arm {
    std::array<double, kKept> times{};
    std::size_t count = 0;
    void add(double seconds) { times[count++ % kKept] = seconds; }
    double median() const;
  };

  Arm arms_[2];
  bool current_ = false;
  bool started_ = false;
  bool winner_ = true;
  std::size_t left_ = 0;  // tokens of the present stretch
  std::size_t period_ = kFirstPeriod;
  bool probing_ = false;
};

// The switch on the clock: from a token's first layer to its last.
class EarlyControl {
 public:
  bool reads_ahead() const { return on_; }

  void begin_token() {
    on_ = switch_.next(seconds_);
    seconds_ = 0;
    began_ = Clock::now();
  }
  void end_token() { seconds_ = std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  using Clock = std::chrono::steady_clock;

  EarlySwitch switch_;
  Clock::time_point began_;
  double seconds_ = 0;
  bool on_ = false;
};

}  // namespace flashllm
