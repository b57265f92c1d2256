// Functions to call when tasks complete.
//
// Who may call: add, any thread; run, the thread that has completed the task. Blocks: for the mutex.
// Memory: of the process.
#pragma once
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "tasks/regions/access.h"

namespace tilewise::tasks {

class Callbacks {
 public:
  using Function = void (*)(void*);

  void add(TaskRef task, Function function, void* context);
  bool has_any() const { return count_.load(std::memory_order_acquire) != 0; }
  /// Calls the functions of a task, once, outside the mutex.
  void run(TaskRef task);

 private:
  std::atomic<uint32_t> count_{0};
  std::mutex mutex_;
  std::unordered_multimap<TaskRef, std::pair<Function, void*>> all_;
};

}  // namespace tilewise::tasks
