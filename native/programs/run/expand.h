// From one iteration of an instruction to a task: tile views, handle accesses, waits.
//
// Pure except for the task and the vectors that it fills. It knows the address of every device's arena. It checks
// nothing, because Program::finish did; ranges are clipped to their tensor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "programs/run/task.h"
#include "tasks/embed/embedded.h"

namespace tilewise::programs {

/// Everything an expansion reads that stays the same during a run.
struct ExpandContext {
  const Program* program = nullptr;
  int64_t device = 0;
  const std::vector<int64_t>* symbols = nullptr;
  const std::vector<std::byte*>* arenas = nullptr;  // per device
  int64_t first_order_handle = 0;                   // handle + s orders the tasks that post signal s
  const std::vector<int64_t>* hosts = nullptr;      // per device; nullptr: all memory can be read in place
};

/// Rows [begin, end) of a tensor.
struct RowRange {
  int64_t begin;
  int64_t end;
};

/// One iteration of an instruction of a call over an extent of rows in steps; step 0: one iteration over all rows.
struct Iteration {
  const Call& call;
  const BoundInstr& instr;
  const int64_t* ints;
  int64_t index;
  int64_t extent;
  int64_t step;
};

/// Fills the task except its waits and its injected fault; appends the accesses.
void expand(const ExpandContext& context, const Iteration& iteration, Task& task, std::vector<tasks::Access>& accesses);

}  // namespace tilewise::programs
