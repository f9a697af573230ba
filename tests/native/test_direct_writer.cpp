// The direct writer under several callers: every byte where it belongs, no write lost, errors to who waits.
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fault.h"
#include "io/direct_writer.h"
#include "io/error.h"
#include "io/memory.h"

namespace {

using namespace flashllm;

constexpr std::size_t kPage = DirectWriter::kAlignment;

void fill(std::byte* data, std::size_t nbytes, unsigned seed) {
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(random());
}

bool holds(const std::string& path, const std::byte* data, std::size_t nbytes) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return bytes.size() == nbytes && std::memcmp(bytes.data(), data, nbytes) == 0;
}

void test_callers(const std::string& path, int threads, int scale) {
  constexpr std::size_t kCallers = 3;
  const std::size_t pages = 60 * static_cast<std::size_t>(scale);
  const HugeBuffer data(pages * kPage);
  fill(data.data(), pages * kPage, 1);
  {
    DirectWriter writer(path, pages * kPage, threads);
    inject(writer, std::make_shared<FaultPlan>(Fault{Fault::Kind::short_read, 3, 20, 5000}));
    std::vector<std::thread> callers;
    for (std::size_t caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] {
        for (std::size_t page = caller; page < pages; page += kCallers)
          writer.write({{page * kPage, data.data() + page * kPage, kPage}});
      });
    }
    for (std::thread& caller : callers) caller.join();
  }
  CHECK(holds(path, data.data(), pages * kPage));
  std::remove(path.c_str());
}

// Closing waits for what is under way; a file whose write failed can be written again.
void test_close(const std::string& path) {
  const HugeBuffer data(64 * kPage);
  fill(data.data(), 64 * kPage, 2);
  std::vector<DirectWriter::Run> runs;
  for (std::size_t page = 0; page < 64; page += 8)
    runs.push_back({page * kPage, data.data() + page * kPage, 8 * kPage});
  auto held = std::make_shared<FaultPlan>(Fault{Fault::Kind::hold, 0, 1, 0});
  DirectWriter writer(path, 64 * kPage, 2);
  inject(writer, held);
  std::thread writing([&] { writer.write(runs); });
  held->wait_until_held();
  std::thread closing([&] { writer.close(); });
  held->release();
  writing.join();
  closing.join();
  CHECK(holds(path, data.data(), 64 * kPage));
  std::remove(path.c_str());

  DirectWriter failing(path, 64 * kPage, 3);
  inject(failing, std::make_shared<FaultPlan>(Fault{Fault::Kind::error, 2, 3, EIO}));
  bool failed = false;
  try {
    failing.write(runs);
  } catch (const CoreError& error) {
    failed = error.kind() == ErrorKind::io && error.offset() != CoreError::kNoOffset;
  }
  CHECK(failed);
  for (int i = 0; i < 3 && failed; ++i) {
    try {
      failing.write(runs);
      failed = false;
    } catch (const CoreError&) {  // as many calls fail as are left of the fault
    }
  }
  CHECK(!failed);
  CHECK(holds(path, data.data(), 64 * kPage));
  std::remove(path.c_str());
}

}  // namespace

void test_direct_writer(const std::string& directory, int scale) {
  for (const int threads : {1, 4}) test_callers(directory + "/written", threads, scale);
  test_close(directory + "/closed");
}
