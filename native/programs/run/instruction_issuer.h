// Issues the instructions of one device: a resumable cursor over the calls, instructions and iterations of its program.
//
// Purpose: makes the next task in submission order. It is not a thread: when few tasks are ready, a worker advances it
// by some tens of tasks. The device admits one such worker at a time and orders its use before the next worker's.
// Blocking: never. Memory: a few vectors, reused by every run.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "comm/signal.h"
#include "programs/run/expand.h"

namespace tilewise::programs {

/// A planted fault: the `index`-th task of that label (in submission order of one run) misbehaves.
struct Injection {
  Injected kind = Injected::kNothing;
  int64_t label = 0;
  int64_t index = 0;
};

class InstructionIssuer {
 public:
  /// Starts at the first task. Signals count on from their current values.
  void begin(const ExpandContext& context, int64_t list, const comm::SignalBoard& signals,
             std::vector<Injection> injections);

  /// Moves to the next task; false at the end.
  bool prepare();

  /// Fills the prepared task and its accesses, and advances. Its waits have signal and threshold.
  void fill(Task& task, std::vector<tasks::Access>& accesses);

 private:
  void prepare_instr(const Call& call);
  void choose_hints(const Call& call);
  void fill_waits(Task& task);
  Injected injected(const BoundInstr& instr);

  ExpandContext context_;
  const Bound* templates_ = nullptr;
  const CallList* list_ = nullptr;
  const BoundInstr* instr_ = nullptr;  // prepared instruction
  const int64_t* ints_ = nullptr;  // its integers
  const TaskHints* workers_ = nullptr;  // the hints that choose the workers of its tasks; nullptr: any worker
  int64_t priority_ = 0;  // of its tasks
  size_t call_ = 0;
  size_t next_instr_ = 0;
  int64_t index_ = 0;  // number of its iterations that have been submitted
  int64_t count_ = 0;
  int64_t extent_ = 0;
  int64_t step_ = 0;
  std::vector<int64_t> late_ints_;  // of this run, for every call
  std::vector<uint64_t> expected_;  // per signal of this device
  std::vector<Injection> injections_;
  std::vector<int64_t> label_counts_;
};

}  // namespace tilewise::programs
