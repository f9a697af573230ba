// A failed CHECK prints where and ends the program: a sanitizer's report and a wrong value fail alike.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

// The test functions, one a file's idea; `scale` multiplies the iterations.
void test_arithmetic(int scale);  // those that need no file
void test_request_plan(int scale);
void test_reader(const std::string& directory, int scale);
void test_prefetch(const std::string& directory, int scale);
void test_cache(int scale);
void test_thread_pool(int scale);
void test_kernels(int scale);
void test_predictor(int scale);
void test_experts(int scale);
void test_many_tokens(int scale);
void test_ffn_layer(const std::string& directory, int scale);
void test_model(const std::string& directory, int scale);
void test_norm(int scale);
void test_rotary(int scale);
void test_attention(int scale);
void test_sequence_state(int scale);
void test_direct_writer(const std::string& directory, int scale);
void test_offload(int scale);
void test_pack(int scale);
void test_recurrence(int scale);
