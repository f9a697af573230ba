// Requests and reads against the file's bytes in memory, with faults, many threads and batches in flight.
#include "io/reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>

#include "fault.h"
#include "fixture.h"
#include "io/memory.h"
#include "io/request_plan.h"
#include "io/xxh3.h"
#include "kernels/thread_pool.h"

namespace {

using namespace flashllm;
using Bytes = std::vector<unsigned char>;

ReadBackendKind tested_backend = ReadBackendKind::threads;

ReaderOptions reading(int at_a_time) {
  ReaderOptions options;
  options.backend = tested_backend;
  options.threads = options.queue_depth = at_a_time;
  return options;
}

Bytes random_bytes(std::size_t nbytes, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(nbytes);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// Jobs of one batch with memory of their own, and the comparison with the file.
struct Jobs {
  explicit Jobs(std::size_t nbytes) : memory(nbytes) {}

  void add(ReadBatch& batch, std::uint64_t offset, std::size_t nbytes, std::size_t skew) {
    used = (used + 511) / 512 * 512 + skew;
    CHECK(used + nbytes <= memory.size());
    ReadJob job;
    job.offset = offset;
    job.nbytes = nbytes;
    job.destination = memory.data() + used;
    batch.jobs.push_back(job);
    expected.push_back(job);
    used += nbytes;
  }
  void check(const Bytes& file) const {
    for (const ReadJob& job : expected)
      CHECK(std::memcmp(job.destination, file.data() + job.offset, job.nbytes) == 0);
  }

  HugeBuffer memory;
  std::size_t used = 0;
  std::vector<ReadJob> expected;
};

void fill_random(Jobs& jobs, ReadBatch& batch, const Bytes& file, std::mt19937& random, int count) {
  for (int i = 0; i < count; ++i) {
    const bool aligned = random() % 3 != 0;
    const std::size_t unit = aligned ? 512 : 1;
    const std::size_t nbytes = unit * (1 + random() % (aligned ? 40 : 9000));
    const std::uint64_t offset = random() % (file.size() - nbytes) / unit * unit;
    jobs.add(batch, offset, nbytes, random() % 4 == 0 ? 1 + random() % 60 : 0);
  }
}

enum class Outcome { done, io, format, checksum };

Outcome run(Reader& reader, ReadBatch& batch, const DirectFile& file) {
  try {
    reader.read(batch, file);
  } catch (const CoreError& error) {
    CHECK(std::string(error.what()).find(file.path()) != std::string::npos);
    CHECK(error.offset() != CoreError::kNoOffset);
    if (error.kind() == ErrorKind::io) return Outcome::io;
    if (error.kind() == ErrorKind::format) return Outcome::format;
    CHECK(error.kind() == ErrorKind::checksum);
    return Outcome::checksum;
  }
  return Outcome::done;
}

void random_batches_equal_the_file(const std::string& path, const Bytes& bytes, int threads, bool direct,
                                   std::uint64_t max_gap, int rounds) {
  const DirectFile file(path, direct);
  ReaderOptions options = reading(threads);
  options.max_gap = max_gap;
  options.max_request = 64 << 10;
  Reader reader(options);
  std::mt19937 random(static_cast<unsigned>(threads) * 7 + direct);
  for (int round = 0; round < rounds; ++round) {
    // Two batches in flight; the second is waited for first.
    ReadBatch one, two;
    Jobs jobs_one(2 << 20), jobs_two(2 << 20);
    fill_random(jobs_one, one, bytes, random, 60);
    fill_random(jobs_two, two, bytes, random, 1 + static_cast<int>(random() % 5));
    reader.submit(one, file);
    reader.submit(two, file);
    reader.wait(two);
    reader.wait(one);
    jobs_one.check(bytes);
    jobs_two.check(bytes);
    CHECK(one.stats().jobs == 60);
  }
}

// A thread that computes beside the reads: they move on while nobody waits for them.
class Beside {
 public:
  explicit Beside(Reader& reader)
      : thread_([this, &reader] {
          for (; !done_; std::this_thread::yield()) reader.advance();
        }) {}
  ~Beside() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void many_callers_share_a_reader(const std::string& path, const Bytes& bytes, int rounds) {
  const DirectFile file(path, true);
  ReaderOptions options = reading(5);
  Reader reader(options);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(caller);
      ReadBatch batch;
      for (int round = 0; round < rounds; ++round) {
        Jobs jobs(1 << 20);
        batch.jobs.clear();
        fill_random(jobs, batch, bytes, random, 1 + static_cast<int>(random() % 12));
        reader.read(batch, file);
        jobs.check(bytes);
      }
    });
  }
  const Beside beside(reader);
  for (std::thread& caller : callers) caller.join();
}

// Reads begun by a thread that ends before they do.
void a_thread_may_end_with_reads_under_way(const std::string& path, const Bytes& bytes, int rounds) {
  const DirectFile file(path, true);
  Reader reader(reading(8));
  std::mt19937 random(4);
  for (int round = 0; round < rounds; ++round) {
    Jobs jobs(1 << 20);
    ReadBatch batch;
    fill_random(jobs, batch, bytes, random, 30);
    std::thread([&] {
      reader.submit(batch, file);
      reader.start();
    }).join();
    reader.wait(batch);
    jobs.check(bytes);
  }
}

// Nobody waits: a batch is read by those who compute beside it.
void reads_move_on_beside_a_loop(const std::string& path, const Bytes& bytes) {
  const DirectFile file(path, true);
  Reader reader(reading(2));  // far fewer than the batch has requests
  ThreadPool pool(2);
  pool.set_side_work(&reader);
  std::mt19937 random(5);
  Jobs jobs(1 << 20);
  ReadBatch batch;
  fill_random(jobs, batch, bytes, random, 20);
  reader.submit(batch, file);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  bool landed = false;
  while (!landed && std::chrono::steady_clock::now() < deadline) {
    pool.parallel_for(
        8, 1, [](std::size_t, std::size_t) { std::this_thread::sleep_for(std::chrono::microseconds(50)); });
    landed = reader.poll(batch);
  }
  CHECK(landed);
  reader.wait(batch);
  jobs.check(bytes);
}

// Every N-th system call fails, once or for ever: right bytes or a typed error, and a clean rerun is right.
void every_fault_is_met(const std::string& path, const Bytes& bytes, bool direct) {
  constexpr std::uint64_t kForEver = std::uint64_t{1} << 60;
  DirectFile file(path, direct);
  ReaderOptions options = reading(3);
  options.max_gap = 1024;
  options.max_request = 8192;
  Reader reader(options);
  const std::uint64_t sector = std::max<std::uint64_t>(512, file.offset_alignment());
  const std::vector<Fault> faults = {
      {Fault::Kind::error, 0, 1, EIO},           {Fault::Kind::error, 0, kForEver, EIO},
      {Fault::Kind::error, 0, 3, EINTR},         {Fault::Kind::error, 0, 5, EAGAIN},
      {Fault::Kind::error, 0, kForEver, EAGAIN}, {Fault::Kind::short_read, 0, kForEver, sector},
      {Fault::Kind::short_read, 0, 1, sector},   {Fault::Kind::end_of_file, 0, 1, 0},
  };
  ReadBatch batch;
  for (const Fault& kind : faults) {
    for (std::uint64_t n = 0; n < 12; ++n) {
      Fault this_one = kind;
      this_one.first = n;
      inject(file, std::make_shared<FaultPlan>(this_one));
      for (int attempt = 0; attempt < 2; ++attempt) {
        std::mt19937 random(99);
        Jobs jobs(1 << 20);
        batch.jobs.clear();
        fill_random(jobs, batch, bytes, random, 10);
        const Outcome outcome = run(reader, batch, file);
        const bool must_pass = attempt == 1 || (kind.count != kForEver && kind.kind == Fault::Kind::error) ||
                               kind.kind == Fault::Kind::short_read;
        if (must_pass) CHECK(outcome == Outcome::done);
        if (outcome == Outcome::done) jobs.check(bytes);
        CHECK(outcome != Outcome::checksum);
        if (kind.kind == Fault::Kind::end_of_file && attempt == 0) CHECK(outcome != Outcome::io);
        inject(file, nullptr);
      }
    }
  }
}

void flipped_bits_are_found(const std::string& path, const Bytes& bytes) {
  constexpr std::uint32_t kRow = 1024;
  constexpr std::size_t kRows = 8;
  std::vector<std::uint64_t> sums(kRows);
  for (std::size_t r = 0; r < kRows; ++r) sums[r] = xxh3_64(bytes.data() + r * kRow, kRow);
  DirectFile file(path, true);
  ReaderOptions options = reading(2);
  options.max_request = 4096;  // the job is split between rows
  Reader reader(options);
  HugeBuffer memory(kRows * kRow + 64);
  for (const std::size_t skew : {0, 8}) {
    for (std::uint64_t bit = 0; bit < 8 * 4096; bit += 997) {
      for (const bool flip : {true, false}) {
        inject(file, flip ? std::make_shared<FaultPlan>(Fault{Fault::Kind::flip, 0, 1, bit}) : nullptr);
        ReadBatch batch;
        ReadJob job;
        job.nbytes = kRows * kRow;
        job.destination = memory.data() + skew;
        job.checksums = sums.data();
        job.row_nbytes = kRow;
        batch.jobs.push_back(job);
        CHECK(run(reader, batch, file) == (flip ? Outcome::checksum : Outcome::done));
      }
    }
  }
}

std::shared_ptr<FaultPlan> inject(DirectFile& file, Fault::Kind kind, std::uint64_t first,
                                  std::uint64_t count = 1, std::uint64_t argument = 0) {
  auto plan = std::make_shared<FaultPlan>(Fault{kind, first, count, argument});
  inject(file, plan);
  return plan;
}

// A reader that reads one request at a time, and cannot go on before `release`.
struct HeldReader {
  explicit HeldReader(const std::string& path)
      : file(path, true), reader(reading(1)), jobs(4096), beside(reader) {
    plan = inject(file, Fault::Kind::hold, 0);
    jobs.add(batch, 0, 512, 0);
    reader.submit(batch, file);
    plan->wait_until_held();
  }
  void release() {
    plan->release();
    reader.wait(batch);
  }

  DirectFile file;
  Reader reader;
  Jobs jobs;
  ReadBatch batch;
  std::shared_ptr<FaultPlan> plan;
  Beside beside;
};

void add_scattered(Jobs& jobs, ReadBatch& batch, std::uint64_t first, int count) {
  for (int i = 0; i < count; ++i) jobs.add(batch, 8192 * (first + static_cast<std::uint64_t>(i)), 4096, 0);
}

int landed(const ReadBatch& batch) {
  return static_cast<int>(
      std::count_if(batch.jobs.begin(), batch.jobs.end(), [](const ReadJob& job) { return job.landed; }));
}

// Whatever the longest request is: all pieces of the memory that it is unpacked from are aligned for direct
// reads.
void what_lies_elsewhere_is_unpacked(const std::string& path, const Bytes& bytes) {
  struct Copied final : Unpacking {
    void unpack(const std::byte* stored, std::uint64_t, std::uint64_t nbytes,
                std::byte* rows) const override {
      std::memcpy(rows, stored, nbytes);
    }
  } copied;
  const DirectFile file(path, true);
  ReaderOptions options = reading(4);
  options.max_request = 10001;
  Reader reader(options);
  ReadBatch batch;
  Jobs jobs(1 << 20);
  for (std::size_t i = 0; i < 20; ++i) jobs.add(batch, 10007 * i, i == 7 ? 40000 : 10001 - i, 0);
  for (ReadJob& job : batch.jobs) {
    job.unpacking = &copied;
    job.file = &file;
  }
  reader.read(batch, file);
  jobs.check(bytes);
}

// The first reads of a file are flipped: whose bits are wrong tells who was read first.
void demand_is_read_before_prefetch(const std::string& path, const Bytes& bytes) {
  DirectFile file(path, true);
  for (const bool promoted : {false, true}) {
    HeldReader held(path);
    ReadBatch prefetched, needed;
    Jobs prefetched_jobs(1 << 20), needed_jobs(1 << 20);
    add_scattered(prefetched_jobs, prefetched, 0, 6);
    add_scattered(needed_jobs, needed, 10, 4);
    inject(file, Fault::Kind::flip, 0, promoted ? 6 : 4, 5);
    held.reader.submit(prefetched, file, ReadPriority::prefetch);
    if (promoted) held.reader.keep(prefetched, [](const ReadJob&) { return true; });
    held.reader.submit(needed, file);
    CHECK(!held.reader.poll(prefetched) && !held.reader.poll(needed));
    held.release();
    held.reader.wait(needed);
    held.reader.wait(prefetched);
    CHECK(landed(needed) == 4 && landed(prefetched) == 6);
    Jobs& flipped = promoted ? prefetched_jobs : needed_jobs;
    (promoted ? needed_jobs : prefetched_jobs).check(bytes);
    for (const ReadJob& job : flipped.expected)
      CHECK(std::memcmp(job.destination, bytes.data() + job.offset, job.nbytes) != 0);
  }
}

// Batches under way at the same time count once, and time in which none is counts nothing.
void busy_time_is_counted_once(const std::string& path) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  DirectFile file(path, true);
  Reader reader(reading(4));
  const Beside beside(reader);
  std::uint64_t walls = 0;
  const auto started = now();
  {
    const auto plan = inject(file, Fault::Kind::hold, 0);
    ReadBatch one, other;
    Jobs jobs(1 << 20);
    add_scattered(jobs, one, 0, 5);
    add_scattered(jobs, other, 10, 5);
    reader.submit(one, file);
    reader.submit(other, file, ReadPriority::prefetch);
    plan->wait_until_held();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    plan->release();
    reader.wait(one);
    reader.wait(other);
    walls = std::max(one.stats().wall_ns, other.stats().wall_ns);
  }
  const std::uint64_t busy = reader.take_busy_ns();
  const auto elapsed = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(now() - started).count());
  CHECK(busy >= walls && busy >= 20'000'000 && busy <= elapsed);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(reader.take_busy_ns() == 0);
}

void prefetches_are_dropped(const std::string& path, const Bytes& bytes) {
  // 1. Nothing was started: nothing is read.
  {
    HeldReader held(path);
    DirectFile file(path, true);
    const auto plan = inject(file, Fault::Kind::error, 0, 1000, EIO);
    ReadBatch batch;
    Jobs jobs(1 << 20);
    add_scattered(jobs, batch, 0, 10);
    held.reader.submit(batch, file, ReadPriority::prefetch);
    held.reader.cancel(batch);
    CHECK(held.reader.poll(batch));
    held.reader.wait(batch);
    CHECK(batch.stats().dropped == 10 && batch.stats().requests == 0 && landed(batch) == 0);
    held.release();
    CHECK(plan->calls() == 0);
  }
  // 2. Three were started: they and those wanted are read, and the batch says which.
  DirectFile file(path, true);
  Reader reader(reading(1));
  const Beside beside(reader);
  const auto plan = inject(file, Fault::Kind::hold, 2);
  ReadBatch batch;
  Jobs jobs(1 << 20);
  add_scattered(jobs, batch, 0, 10);
  reader.submit(batch, file, ReadPriority::prefetch);
  plan->wait_until_held();
  CHECK(!reader.poll(batch) && landed(batch) == 2);
  const auto wanted = [](const ReadJob& job) { return job.offset == 8192 * 7 || job.offset == 8192 * 9; };
  reader.keep(batch, wanted);
  CHECK(!reader.poll(batch));
  plan->release();
  reader.wait(batch);
  CHECK(batch.stats().dropped == 5 && batch.stats().requests == 5 && batch.stats().jobs == 10);
  CHECK(batch.stats().bytes == 5 * 4096 && plan->calls() == 5);
  for (const ReadJob& job : batch.jobs) {
    CHECK(job.landed == (job.offset <= 8192 * 2 || wanted(job)));
    CHECK((std::memcmp(job.destination, bytes.data() + job.offset, job.nbytes) == 0) == job.landed);
  }
  // 3. Too late: everything has landed, and the batch can be used again.
  inject(file, nullptr);
  reader.submit(batch, file, ReadPriority::prefetch);
  CHECK(landed(batch) == 0 || reader.poll(batch));
  while (!reader.poll(batch)) std::this_thread::yield();
  CHECK(landed(batch) == 10);
  reader.cancel(batch);
  reader.wait(batch);
  CHECK(batch.stats().dropped == 0 && batch.stats().requests == 10);
  jobs.check(bytes);
}

void an_error_leaves_the_landed_jobs(const std::string& path) {
  DirectFile file(path, true);
  Reader reader(reading(1));
  inject(file, Fault::Kind::error, 4, 1000, EIO);
  ReadBatch batch;
  Jobs jobs(1 << 20);
  add_scattered(jobs, batch, 0, 10);
  CHECK(run(reader, batch, file) == Outcome::io);
  CHECK(landed(batch) == 4);
}

// Demand reads and prefetches of several callers, sorted out at random moments: what landed is right.
void prefetches_are_sorted_out_under_way(const std::string& path, const Bytes& bytes, int rounds) {
  const DirectFile file(path, true);
  ReaderOptions options = reading(5);
  options.max_gap = 1024;
  Reader reader(options);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(caller);
      for (int round = 0; round < rounds; ++round) {
        ReadBatch prefetched, needed;
        Jobs prefetched_jobs(2 << 20), needed_jobs(1 << 20);
        fill_random(prefetched_jobs, prefetched, bytes, random, 40);
        fill_random(needed_jobs, needed, bytes, random, 10);
        reader.submit(prefetched, file, ReadPriority::prefetch);
        for (unsigned spin = random() % 200; spin > 0; --spin) std::this_thread::yield();
        const auto parity = static_cast<std::uint64_t>(random() % 2);
        const auto wanted = [&](const ReadJob& job) { return job.offset / 512 % 2 == parity; };
        if (round % 3 != 0) reader.keep(prefetched, wanted);
        reader.submit(needed, file);
        if (round % 3 == 0) reader.cancel(prefetched);
        while (round % 2 == 0 && !reader.poll(needed)) std::this_thread::yield();
        reader.wait(needed);
        reader.wait(prefetched);
        needed_jobs.check(bytes);
        const ReadStats& stats = prefetched.stats();
        CHECK((landed(prefetched) == 40) == (stats.dropped == 0));
        for (const ReadJob& job : prefetched.jobs) {
          CHECK(job.landed || round % 3 == 0 || !wanted(job));
          if (job.landed) CHECK(std::memcmp(job.destination, bytes.data() + job.offset, job.nbytes) == 0);
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void batches_are_used_properly(const std::string& path) {
  const DirectFile file(path, true);
  Reader reader(reading(32));
  ReadBatch batch;
  reader.read(batch, file);  // empty
  CHECK(batch.stats().requests == 0 && !batch.in_flight());
  CHECK(is_refused([&] { reader.wait(batch); }));
  CHECK(is_refused([&] { reader.poll(batch); }));
  CHECK(is_refused([&] { reader.cancel(batch); }));
  HugeBuffer memory(4096);
  ReadJob job;
  job.destination = memory.data();
  job.nbytes = 512;
  batch.jobs = {job};
  reader.submit(batch, file);
  CHECK(is_refused([&] { reader.submit(batch, file); }));
  reader.settle(batch);
  reader.settle(batch);
  CHECK(!batch.in_flight());
}

}  // namespace

// Every job lies in exactly one request, in order, within the limits.
void test_request_plan(int scale) {
  std::mt19937 random(1);
  std::vector<std::byte> memory(1 << 20);
  std::vector<ReadRequest> requests;
  for (int round = 0; round < 200 * scale; ++round) {
    RequestLimits limits;
    limits.max_gap = random() % 3 * 2048;
    limits.max_request = 4096 << random() % 4;
    limits.offset_alignment = limits.memory_alignment = random() % 2 != 0 ? 512 : 1;
    std::vector<ReadJob> jobs;
    std::uint64_t total = 0;
    std::vector<std::uint64_t> checksums(64);
    for (std::size_t i = 0; i < 1 + random() % 1500; ++i) {
      ReadJob job;
      job.offset = random() % 2000 * 512 + (random() % 5 == 0 ? random() % 512 : 0);
      job.nbytes = 512 * (1 + random() % 32);
      job.destination = memory.data() + i * 512 % memory.size();
      if (random() % 3 == 0) {
        job.row_nbytes = 512;
        job.checksums = checksums.data();
      }
      total += job.nbytes;
      jobs.push_back(job);
    }
    plan_requests(jobs, limits, requests);
    std::uint64_t planned = 0;
    std::uint32_t next_job = 0;
    for (const ReadRequest& request : requests) {
      CHECK(request.first_job == next_job && request.num_jobs >= 1 && request.num_jobs <= kMaxPieces);
      std::uint64_t end = request.offset;
      bool gaps = false;
      for (std::uint32_t i = 0; i < request.num_jobs; ++i, ++next_job) {
        const ReadJob& job = jobs[next_job];
        CHECK(job.offset >= end && job.offset - end <= limits.max_gap);
        gaps = gaps || job.offset > end;
        if (job.checksums != nullptr) CHECK(job.checksums < checksums.data() + 32 && job.nbytes % 512 == 0);
        end = job.offset + job.nbytes;
        planned += job.nbytes;
        if (request.aligned) {
          CHECK(job.offset % limits.offset_alignment == 0 && job.nbytes % limits.offset_alignment == 0);
          CHECK(reinterpret_cast<std::uintptr_t>(job.destination) % limits.memory_alignment == 0);
        }
      }
      CHECK(end == request.offset + request.nbytes && request.nbytes <= limits.max_request);
      CHECK(request.gaps == gaps && (!gaps || request.nbytes <= kMaxThrough));
      CHECK(request.bounces() == (gaps || !request.aligned));
    }
    CHECK(next_job == jobs.size() && planned == total);
  }
}

void test_reader(const std::string& directory, int scale) {
  const std::string path = directory + "/reader.bin";
  const Bytes bytes = random_bytes(300000, 3);
  write_file(path, bytes.data(), bytes.size());
  for (const ReadBackendKind backend : {ReadBackendKind::threads, ReadBackendKind::io_uring}) {
    tested_backend = backend;
    try {
      Reader(reading(32));
    } catch (const CoreError& error) {
      CHECK(backend == ReadBackendKind::io_uring);
      std::printf("not tested: %s\n", error.what());
      continue;
    }
    for (const int at_a_time : {1, 4, 32})
      for (const bool direct : {true, false})
        random_batches_equal_the_file(path, bytes, at_a_time, direct, at_a_time == 4 ? 4096 : 0, 4 * scale);
    many_callers_share_a_reader(path, bytes, 15 * scale);
    a_thread_may_end_with_reads_under_way(path, bytes, 5 * scale);
    reads_move_on_beside_a_loop(path, bytes);
    every_fault_is_met(path, bytes, true);
    every_fault_is_met(path, bytes, false);
    flipped_bits_are_found(path, bytes);
    what_lies_elsewhere_is_unpacked(path, bytes);
    demand_is_read_before_prefetch(path, bytes);
    busy_time_is_counted_once(path);
    prefetches_are_dropped(path, bytes);
    an_error_leaves_the_landed_jobs(path);
    prefetches_are_sorted_out_under_way(path, bytes, 20 * scale);
    batches_are_used_properly(path);
  }
}
