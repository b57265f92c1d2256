// Records the dependency graph of submitted tasks.
//
// Purpose: a file from which an offline check recomputes the order (tilewise.observe). Who may call: submitters,
// with the locks of the submission. Blocks: for its mutex. Memory: of the process, one entry per task.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "tasks/store/layout.h"

namespace tilewise::tasks {

class GraphLog {
 public:
  /// Adds a producer of the task that this thread is linking.
  static void note(TaskRef producer) { pending().push_back(without_flags(producer)); }
  /// Adds the task that this thread has just linked.
  void add(const Store& store, uint32_t slot, const pto_task_spec& spec);
  void write(const char* path) const;

 private:
  struct Access {
    int mode;
    uint64_t buffer;
    uint64_t bytes;
    bool has_region;
    pto_region region;
  };
  struct Node {
    TaskRef task;
    std::string kernel;
    std::string name;
    int submitter;
    uint32_t depth;
    TaskRef domain;
    int64_t submit_ns;
    std::vector<Access> accesses;
    std::vector<TaskRef> after;
    std::vector<TaskRef> producers;
  };
  static std::vector<TaskRef>& pending();

  mutable std::mutex mutex_;
  std::vector<Node> nodes_;
};

}  // namespace tilewise::tasks
