// See callbacks.h.
#include "tasks/engine/callbacks.h"

#include <vector>

namespace tilewise::tasks {

void Callbacks::add(TaskRef task, Function function, void* context) {
  std::lock_guard guard(mutex_);
  all_.emplace(task, std::make_pair(function, context));
  count_.store(static_cast<uint32_t>(all_.size()), std::memory_order_release);
}

void Callbacks::run(TaskRef task) {
  std::vector<std::pair<Function, void*>> due;
  {
    std::lock_guard guard(mutex_);
    const auto [begin, end] = all_.equal_range(task);
    for (auto at = begin; at != end; ++at) due.push_back(at->second);
    all_.erase(begin, end);
    count_.store(static_cast<uint32_t>(all_.size()), std::memory_order_release);
  }
  for (const auto& [function, context] : due) function(context);
}

}  // namespace tilewise::tasks
