// The FFN layer: the same bits whatever is cached, and a cache that is right after failures of every kind.
#include "model/ffn_layer.h"

#include <cerrno>
#include <cstring>

#include "io/error.h"
#include "ffn_fixture.h"

namespace {

using namespace ffn_tests;

std::vector<std::int32_t> random_active(std::mt19937& random) {
  std::vector<std::int32_t> active;
  const unsigned rarity = 1 + random() % 6;
  for (std::int32_t n = 0; n < kNeurons; ++n)
    if (random() % rarity == 0) active.push_back(n);
  return active;
}

void bits_depend_on_the_active_set_alone(const Flash& flash, int tokens) {
  Layer whole(flash, kNeurons, 3, 1, 1), narrow(flash, 3, 2, 2, 4), middle(flash, 17, 5, 3, 2);
  Layer frequency(flash, 11, 1, 2, 3, 5), scarce(flash, 2, 1, 1, 2, 1);
  Layer placed(flash, 9, 2, 1, 3, 0, true);
  std::mt19937 random(2);
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = whole.forward(flash, active);
    for (Layer* layer : {&narrow, &middle, &frequency, &scarce, &placed}) {
      const std::vector<float> y = layer->forward(flash, active);
      CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
    }
  }
  for (const Layer* layer : {&whole, &narrow, &middle, &frequency, &scarce, &placed})
    CHECK(layer->counters.hits + layer->counters.misses == layer->counters.active);
  CHECK(narrow.counters.parts > static_cast<std::uint64_t>(tokens));
}

void failures_leave_a_right_cache(Flash& flash, int tokens, std::int32_t bypass) {
  Layer right(flash, kNeurons, 3, 1, 1), faulty(flash, 12, 3, 2, 3, bypass);
  std::mt19937 random(3);
  int failed = 0;
  for (int token = 0; token < tokens; ++token) {
    const std::vector<std::int32_t> active = random_active(random);
    const std::vector<float> expected = right.forward(flash, active);
    Fault fault;
    fault.kind = token % 2 == 0 ? Fault::Kind::error : Fault::Kind::flip;
    fault.first = random() % 4;
    fault.count = 50;
    fault.argument = token % 2 == 0 ? EIO : random() % 4096;
    flash.file->inject(std::make_shared<FaultPlan>(fault));
    try {
      const std::vector<float> y = faulty.forward(flash, active);
      CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
    } catch (const CoreError& error) {
      ++failed;
      CHECK(error.kind() == (token % 2 == 0 ? ErrorKind::io : ErrorKind::checksum));
      CHECK(std::string(error.what()).find("layer 5, neuron ") == 0);
    }
    flash.file->inject(nullptr);
    const std::vector<float> y = faulty.forward(flash, active);
    CHECK(std::memcmp(y.data(), expected.data(), 4 * kWidth) == 0);
  }
  CHECK(failed > tokens / 4);
}

}  // namespace

void test_ffn_layer(const std::string& directory, int scale) {
  ffn_tests::Flash flash(directory + "/ffn.bin");
  bits_depend_on_the_active_set_alone(flash, 60 * scale);
  for (const std::int32_t bypass : {0, 6}) failures_leave_a_right_cache(flash, 60 * scale, bypass);
}
