// State that all devices of one executor share: how a run ends, its first error, its options.
//
// Purpose: workers notify the waiting run(). Who may call: any thread. Blocks: only for the mutex's few instructions
// (never on the path of a successful task, except the last of a device). Memory order: stop_ is stored with release
// after the error is recorded; finishing uses the mutex, so that run() sees everything that a device did. Memory: owned
// by a shared pointer in the executor and in every worker, so that a worker that never returns from a kernel never
// touches freed memory.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "comm/peers.h"
#include "programs/run/file_queue.h"

namespace tilewise::programs {

class RunState {
 public:
  /// The other processes of the run; nullptr: all devices are in this one.
  std::unique_ptr<comm::Peers> peers;

  // Workers.

  /// Records an error. Its id (position + 1) becomes the poison of everything that depends on it. The first error stops
  /// the run.
  uint64_t fail(std::exception_ptr error) {
    std::lock_guard guard(mutex_);
    errors_.push_back(std::move(error));
    const uint64_t id = errors_.size();
    if (id == 1) stop_.store(id, std::memory_order_release);
    return id;
  }
  /// The id of the error that stopped the run, else 0. Tasks that start after it are skipped.
  uint64_t stopped() const { return stop_.load(std::memory_order_acquire); }
  void device_finished() {
    std::lock_guard guard(mutex_);
    if (devices_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) changed_.notify_all();
  }
  /// Transfers between memory and the devices' files.
  FileQueue& files() { return files_; }
  bool closing() const { return closing_.load(std::memory_order_acquire); }
  void worker_exited() {
    std::lock_guard guard(mutex_);
    if (--workers_left_ == 0) changed_.notify_all();
  }

  // The executor.

  void begin_run(int64_t num_devices) {
    std::lock_guard guard(mutex_);
    errors_.clear();
    stop_.store(0, std::memory_order_release);
    devices_left_.store(num_devices, std::memory_order_relaxed);
  }
  bool has_finished() const { return devices_left_.load(std::memory_order_acquire) == 0; }
  /// True when all devices have finished.
  bool wait_finished(std::chrono::milliseconds limit) {
    std::unique_lock guard(mutex_);
    return changed_.wait_for(guard, limit, [&] { return has_finished(); });
  }
  std::exception_ptr first_error() {
    std::lock_guard guard(mutex_);
    return errors_.empty() ? nullptr : errors_.front();
  }
  std::exception_ptr last_error() {
    std::lock_guard guard(mutex_);
    return errors_.empty() ? nullptr : errors_.back();
  }
  void set_workers(int64_t count) { workers_left_ = count; }
  void close() { closing_.store(true, std::memory_order_seq_cst); }
  bool wait_exited(std::chrono::milliseconds limit) {
    std::unique_lock guard(mutex_);
    return changed_.wait_for(guard, limit, [&] { return workers_left_ == 0; });
  }

 private:
  FileQueue files_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::exception_ptr> errors_;  // of this run
  std::atomic<int64_t> devices_left_{0};
  int64_t workers_left_ = 0;
  std::atomic<uint64_t> stop_{0};
  std::atomic<bool> closing_{false};
};

}  // namespace tilewise::programs
