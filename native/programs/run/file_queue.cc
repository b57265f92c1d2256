// See file_queue.h.
#include "programs/run/file_queue.h"

#include "base/clock.h"

namespace tilewise::programs {

void FileQueue::push(const Transfer& transfer, Done done) {
  {
    std::lock_guard guard(mutex_);
    waiting_.push_back({transfer, std::move(done)});
  }
  changed_.notify_one();
}

void FileQueue::work() {
  std::unique_lock guard(mutex_);
  while (true) {
    changed_.wait(guard, [&] { return is_closed_ || !waiting_.empty(); });
    if (is_closed_) return;
    const Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    if (num_moving_++ == 0) busy_since_ns_ = now_ns();
    guard.unlock();
    const Transfer& transfer = next.transfer;
    std::exception_ptr error;
    try {
      transfer.file->move(transfer.way, transfer.memory, transfer.offset, transfer.bytes);
    } catch (...) {
      error = std::current_exception();
    }
    guard.lock();
    const bool is_read = transfer.way == memory::SpillFile::Way::kRead;
    if (error == nullptr) (is_read ? traffic_.bytes_read : traffic_.bytes_written) += transfer.bytes;
    if (--num_moving_ == 0) traffic_.busy_ns += now_ns() - busy_since_ns_;
    guard.unlock();
    next.done(error);
    guard.lock();
  }
}

void FileQueue::close() {
  {
    std::lock_guard guard(mutex_);
    is_closed_ = true;
  }
  changed_.notify_all();
}

bool FileQueue::is_busy() {
  std::lock_guard guard(mutex_);
  return num_moving_ > 0 || !waiting_.empty();
}

Traffic FileQueue::traffic() {
  std::lock_guard guard(mutex_);
  return traffic_;
}

}  // namespace tilewise::programs
