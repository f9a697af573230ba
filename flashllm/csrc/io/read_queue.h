// Which request is read next, and which batches are finished. Plain bookkeeping under one lock; reads
// nothing and starts no threads. Shared by the callers of a Reader and its backend.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "io/read_request.h"
#include "io/request_plan.h"

namespace flashllm {

class ReadBatch;

// Idle ones are read while nothing else is: one request at a time, or several short ones.
enum class ReadPriority { demand, prefetch, idle };

class ReadQueue {
 public:
  struct Work {
    ReadBatch* batch = nullptr;
    const ReadRequest* request = nullptr;
    const ReadJob* jobs = nullptr;  // of the request
    const DirectFile* file = nullptr;
    bool held = false;
    bool idle = false;
  };

  // Idle requests that are under way together have at most `idle_nbytes`, or there is one.
  explicit ReadQueue(std::uint64_t idle_nbytes) : most_idle_nbytes_(idle_nbytes) {}

  // For callers.
  void push(ReadBatch& batch, ReadPriority priority);
  // How many requests became demand reads.
  std::size_t keep(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted);
  bool poll(ReadBatch& batch);  // marks the jobs that have landed; true when nothing is under way
  // As poll, once every request is finished, or `at_most` is over, or the queue is lost.
  bool wait(ReadBatch& batch, std::chrono::milliseconds at_most);
  std::uint64_t take_busy_ns();  // time since the last call in which any batch was unfinished

  // For backends. Work is handed out in the order of submission, demand before prefetch, and idle work to
  // whoever asks when nothing else is under way; all of it must be finished.
  bool take(Work& work);      // waits for work; false when the queue was closed
  bool try_take(Work& work);  // false when there is none
  void finish(const Work& work, const RequestOutcome& outcome, std::exception_ptr error);
  // Wakes a thread in `take` for each request; at most `waiting` threads are there.
  void notify(std::size_t requests, std::size_t waiting);
  void close();  // ends all waiting in `take`

  // A read that never ends. Where no request has moved for `patience` the queue is lost: true, for ever
  // after. It hands out nothing more, and whoever waits is told. What its batches point to may then be
  // destroyed, so a backend has a request held when it is handed out and before it looks at what its read
  // gave, and lets it go before the next system call; `hold` is false where the queue is lost, and the
  // request must not be touched. Whoever waits asks every tenth of a second; where nobody has asked for
  // longer, the process may have been stopped (ctrl-Z, a debugger) with its reads, and patience begins anew.
  bool lose(std::chrono::milliseconds patience);
  bool is_lost();
  bool hold(Work& work);
  void let_go(Work& work);

 private:
  static constexpr std::uint64_t kStoppedNs = 1'000'000'000;  // between two questions of `lose`

  std::deque<ReadBatch*>& queue_of(const ReadBatch& batch);
  std::deque<ReadBatch*>* next_queue();
  bool pop(Work& work);
  void retire(ReadBatch& batch, std::size_t requests);
  void drop_rest(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted);
  static void mark_landed(ReadBatch& batch);

  const std::uint64_t most_idle_nbytes_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<ReadBatch*> demand_, prefetch_, idle_;  // batches with requests not yet taken
  std::size_t under_way_ = 0;                        // requests taken and not finished, without idle ones
  std::uint64_t idle_nbytes_ = 0;                    // of idle requests under way
  std::size_t unfinished_batches_ = 0;
  std::uint64_t busy_since_ns_ = 0, busy_ns_ = 0;  // since: while a batch is unfinished
  std::uint64_t moved_at_ns_ = 0;                  // when a request last came, began or ended
  std::uint64_t looked_at_ns_ = 0;                 // when `lose` was last asked
  std::size_t held_ = 0;                           // requests
  bool closed_ = false, lost_ = false;
};

}  // namespace flashllm
