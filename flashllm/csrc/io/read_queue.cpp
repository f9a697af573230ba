#include "io/read_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "io/reader.h"

namespace flashllm {

namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace

void ReadQueue::push(ReadBatch& batch, ReadPriority priority) {
  const std::lock_guard<std::mutex> lock(mutex_);
  batch.submitted_at_ns_ = moved_at_ns_ = now_ns();
  if (unfinished_batches_++ == 0) busy_since_ns_ = batch.submitted_at_ns_;
  batch.priority_ = priority;
  queue_of(batch).push_back(&batch);
}

std::size_t ReadQueue::keep(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (batch.next_request_ == batch.requests_.size()) return 0;  // all started
  drop_rest(batch, wanted);
  const std::size_t left = batch.requests_.size() - batch.next_request_;
  if (batch.priority_ == ReadPriority::demand || left == 0) return 0;
  std::deque<ReadBatch*>& queue = queue_of(batch);
  queue.erase(std::find(queue.begin(), queue.end(), &batch));
  batch.priority_ = ReadPriority::demand;
  demand_.push_back(&batch);
  return left;
}

bool ReadQueue::poll(ReadBatch& batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  mark_landed(batch);
  return batch.unfinished_ == 0;
}

bool ReadQueue::wait(ReadBatch& batch, std::chrono::milliseconds at_most) {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait_for(lock, at_most, [&] { return batch.unfinished_ == 0 || lost_; });
  mark_landed(batch);
  return batch.unfinished_ == 0;
}

bool ReadQueue::lose(std::chrono::milliseconds patience) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_) return true;
  const auto patience_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(patience).count());
  const std::uint64_t now = now_ns();
  if (now - std::exchange(looked_at_ns_, now) > kStoppedNs) moved_at_ns_ = now;
  if (held_ != 0 || unfinished_batches_ == 0 || now - moved_at_ns_ < patience_ns) return false;
  lost_ = closed_ = true;
  done_.notify_all();
  work_.notify_all();
  return true;
}

bool ReadQueue::is_lost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

bool ReadQueue::hold(Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_) return false;
  work.held = true;
  ++held_;
  moved_at_ns_ = now_ns();
  return true;
}

void ReadQueue::let_go(Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  work.held = false;
  --held_;
  moved_at_ns_ = now_ns();
}

std::uint64_t ReadQueue::take_busy_ns() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (unfinished_batches_ != 0) {
    const std::uint64_t now = now_ns();
    busy_ns_ += now - busy_since_ns_;
    busy_since_ns_ = now;
  }
  return std::exchange(busy_ns_, 0);
}

bool ReadQueue::take(Work& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_.wait(lock, [this] { return closed_ || next_queue() != nullptr; });
  return !closed_ && pop(work);
}

bool ReadQueue::try_take(Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !closed_ && pop(work);
}

void ReadQueue::finish(const Work& work, const RequestOutcome& outcome, std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ReadBatch& batch = *work.batch;
  if (work.held) --held_;
  batch.stats_.bytes += outcome.bytes;
  batch.stats_.gap_bytes += outcome.gap_bytes;
  batch.stats_.retries += outcome.retries;
  if (!error) {
    batch.landed_.push_back(work.request);
  } else if (!batch.error_) {  // the first error wins, and nothing more is read
    batch.error_ = std::move(error);
    drop_rest(batch, [](const ReadJob&) { return false; });
  }
  if (work.idle)
    idle_nbytes_ -= work.request->nbytes;
  else
    --under_way_;
  retire(batch, 1);
}

void ReadQueue::retire(ReadBatch& batch, std::size_t requests) {
  batch.unfinished_ -= requests;
  const std::uint64_t now = moved_at_ns_ = now_ns();
  if (batch.unfinished_ != 0) return;
  batch.stats_.wall_ns = now - batch.submitted_at_ns_;
  if (--unfinished_batches_ == 0) busy_ns_ += now - busy_since_ns_;
  done_.notify_all();
}

void ReadQueue::notify(std::size_t requests, std::size_t waiting) {
  if (requests >= waiting) return work_.notify_all();  // one system call instead of as many
  for (std::size_t i = 0; i < requests; ++i) work_.notify_one();
}

void ReadQueue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  work_.notify_all();
}

std::deque<ReadBatch*>& ReadQueue::queue_of(const ReadBatch& batch) {
  if (batch.priority_ == ReadPriority::demand) return demand_;
  return batch.priority_ == ReadPriority::prefetch ? prefetch_ : idle_;
}

// Where work may be taken from now, or nullptr. Who finishes the last request under way asks again.
std::deque<ReadBatch*>* ReadQueue::next_queue() {
  if (!demand_.empty()) return &demand_;
  if (!prefetch_.empty()) return &prefetch_;
  if (idle_.empty() || under_way_ != 0) return nullptr;
  const ReadBatch& batch = *idle_.front();
  const std::uint64_t together = idle_nbytes_ + batch.requests_[batch.next_request_].nbytes;
  return idle_nbytes_ == 0 || together <= most_idle_nbytes_ ? &idle_ : nullptr;
}

bool ReadQueue::pop(Work& work) {
  std::deque<ReadBatch*>* queue = next_queue();
  if (queue == nullptr) return false;
  moved_at_ns_ = now_ns();
  ReadBatch& batch = *queue->front();
  const ReadRequest& request = batch.requests_[batch.next_request_++];
  const ReadJob* jobs = batch.jobs.data() + request.first_job;
  work = {&batch, &request, jobs, jobs->file != nullptr ? jobs->file : batch.file_, true, queue == &idle_};
  ++held_;
  if (work.idle)
    idle_nbytes_ += request.nbytes;
  else
    ++under_way_;
  if (batch.next_request_ == batch.requests_.size()) queue->pop_front();
  if (next_queue() == &idle_)
    work_.notify_one();  // who was woken at the submit may have found others under way
  return true;
}

// Of the requests not started, those without a wanted job. Those started lie before them and do not move.
void ReadQueue::drop_rest(ReadBatch& batch, const std::function<bool(const ReadJob&)>& wanted) {
  if (batch.next_request_ == batch.requests_.size()) return;
  const ReadJob* jobs = batch.jobs.data();
  const auto is_dropped = [&](const ReadRequest& request) {
    const ReadJob* first = jobs + request.first_job;
    return std::none_of(first, first + request.num_jobs, wanted);
  };
  const auto rest = batch.requests_.begin() + static_cast<std::ptrdiff_t>(batch.next_request_);
  const auto end = std::remove_if(rest, batch.requests_.end(), is_dropped);
  const auto dropped = static_cast<std::size_t>(batch.requests_.end() - end);
  batch.requests_.erase(end, batch.requests_.end());
  batch.stats_.requests -= dropped;
  batch.stats_.dropped += dropped;
  if (batch.next_request_ == batch.requests_.size()) {
    std::deque<ReadBatch*>& queue = queue_of(batch);
    queue.erase(std::find(queue.begin(), queue.end(), &batch));
  }
  retire(batch, dropped);
}

void ReadQueue::mark_landed(ReadBatch& batch) {
  for (const ReadRequest* request : batch.landed_)
    for (std::uint32_t i = 0; i < request->num_jobs; ++i) batch.jobs[request->first_job + i].landed = true;
  batch.landed_.clear();
}

}  // namespace flashllm
