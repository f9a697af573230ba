// The core's own tests, without Python, so that sanitizers see nothing else: core_tests DIRECTORY [SCALE]
#include <cstdio>
#include <cstdlib>

#include "check.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: core_tests DIRECTORY [SCALE]\n");
    return 2;
  }
  const std::string directory = argv[1];
  const int scale = argc > 2 ? std::atoi(argv[2]) : 1;
  test_request_plan(scale);
  test_cache(scale);
  test_arithmetic(scale);
  test_reader(directory, scale);
  test_direct_writer(directory, scale);
  test_prefetch(directory, scale);
  test_ffn_layer(directory, scale);
  test_model(directory, scale);
  std::puts("core tests passed");
  return 0;
}
