// A recorded part of a program: its tasks, the order among them, and the accesses that depend on other tasks.
//
// Purpose: submits the same tasks again without asking each buffer for earlier accesses. While recording, every task
// also goes through a separate dependency analysis in which no task ever completes; the live analysis drops finished
// readers, so its edges depend on timing. Who may call: the recording thread. Memory: of the process.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tasks/order/dependencies.h"
#include "tasks/order/growing_pool.h"
#include "tasks/regions/region_index.h"
#include "tasks/store/layout.h"

namespace tilewise::tasks {

class InstantiatedGraph;

/// A buffer of a recording.
struct RecordedBuffer {
  pto_handle handle;  // at recording; 0: a runtime-owned output, allocated by each replay
  uint32_t index;  // of the handle
  uint64_t address;
  uint64_t bytes;
  bool is_frozen;
  bool has_regions = false;
  bool is_written = false;
  AccessState state;  // after the whole recording
  RegionTree tree;
  std::vector<uint32_t> users;  // tasks, if accessed by boxes
};

/// A task of a recording: the places of its parts in the recording's lists.
struct RecordedTask {
  int32_t kernel;
  int32_t priority;
  uint8_t type_class;
  uint16_t flags;
  uint8_t num_params;
  uint8_t num_scalars;
  uint32_t target_worker;
  uint32_t first_param;
  uint32_t first_scalar;
  uint32_t first_producer;
  uint32_t num_producers;
  uint32_t first_wait;
  uint32_t num_waits;
  uint32_t predicate;  // buffer + 1
  uint32_t name;  // + 1
  uint32_t first_view;  // + 1; one per parameter
  float deadline_s;
  bool is_plain;  // a leaf that only reads or writes whole registered buffers, without other options
};

class Recording {
 public:
  using Buffer = RecordedBuffer;
  using Task = RecordedTask;
  struct Access {
    uint32_t buffer;  // kNone: a raw address
    uint8_t mode;
    bool is_region;
    bool meets_entry;  // it also depends on tasks before the recording
    uint32_t box;  // of a region
    uint64_t offset;  // in the buffer, or the address
  };
  struct Wait {
    uint64_t event;
    uint64_t offset;  // value relative to the event's at the beginning
  };

  explicit Recording(const Store& store);
  ~Recording();

  /// Adds a task that has just been linked. `fresh`: mask of the parameters whose buffers were made for it.
  void add(const Store& store, uint32_t slot, const pto_task_spec& spec, uint32_t fresh);
  uint32_t find_buffer(pto_handle handle) const;

  std::vector<Task> tasks;
  std::vector<Access> accesses;
  std::vector<uint64_t> scalars;
  std::vector<std::string> names;
  std::vector<pto_view> views;
  std::vector<pto_region> boxes;
  std::vector<uint64_t> producers;  // recorded task << kFlagBits | flags
  std::vector<Wait> waits;
  std::deque<Buffer> buffers;
  std::vector<uint64_t> event_values;  // at the beginning
  std::vector<pto_handle> bound;  // the last binding that was checked, per buffer
  std::unique_ptr<InstantiatedGraph> graph;  // nullptr: replayed task by task

  /// While recording no task ever completes, so no reference is settled.
  struct Pool : GrowingPool {
    bool is_settled(TaskRef) const { return false; }
    bool remembers_failures() const { return true; }
  };
  Pool pool;

 private:
  uint32_t buffer_of(const Store& store, uint32_t index, bool is_new);
  void analyse(uint32_t buffer, Access& access, const pto_region* region, TaskRef self,
               std::vector<uint64_t>& task_producers);

  std::unordered_map<uint64_t, uint32_t> buffer_by_name_;  // generation and index
  std::unordered_map<TaskRef, uint32_t> task_by_name_;
  std::vector<std::byte> box_memory_;
  std::unique_ptr<RegionIndex> boxes_;
};

}  // namespace tilewise::tasks
