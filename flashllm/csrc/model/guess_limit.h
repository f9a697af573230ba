// How far down a list of guesses, the likeliest first, reading pays.
//
// A guess names neurons that are next to never active as readily as others; by their place in a list sorted
// by how often neurons are active the two are told apart. What became of the guesses at each place is
// counted, read or not, and lists are cut where too few come true: a row read in vain costs a request, and
// delays those that are wanted. Changes what is read, never what is computed. Plain bookkeeping.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace flashllm {

class GuessLimit {
 public:
  static constexpr std::size_t kPlaces = 16;  // counted together
  static constexpr float kWorth = 0.5F;       // share that must come true (bench/LOG.md)
  static constexpr float kMemory = 0.95F;     // of the counts, from list to list

  // For lists of which no more than `most` are read.
  explicit GuessLimit(std::size_t most) : classes_((most + kPlaces - 1) / kPlaces) {}

  // How many guesses of the next list to read: those up to the place where reading has paid most.
  std::size_t worth_reading() const {
    float gain = 0.0F, best = 0.0F;
    std::size_t end = 0;
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      gain += classes_[c].known() ? classes_[c].came_true - kWorth * classes_[c].guesses : 1.0F;
      if (gain <= best) continue;
      best = gain;
      end = c + 1;
    }
    return end * kPlaces;
  }

  // What became of a list: `came_true(place)` for each of its `count` places.
  template <typename CameTrue>
  void judge(std::size_t count, const CameTrue& came_true) {
    for (Class& one : classes_) one = {one.guesses * kMemory, one.came_true * kMemory};
    for (std::size_t place = 0; place < std::min(count, classes_.size() * kPlaces); ++place) {
      Class& one = classes_[place / kPlaces];
      one.guesses += 1.0F;
      one.came_true += came_true(place) ? 1.0F : 0.0F;
    }
  }

 private:
  struct Class {
    float guesses = 0.0F, came_true = 0.0F;
    bool known() const { return guesses >= static_cast<float>(kPlaces); }
  };
  std::vector<Class> classes_;
};

}  // namespace flashllm
