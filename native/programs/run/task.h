// A task: everything that a worker needs to run it, in its place in the device's window.
//
// The instruction issuer fills it while no other thread knows the place. Then one thread at a time uses it: the one
// that admits it, later the one that runs it. Then the place is reused. A task owns no tensor, and refers to its
// instruction, which lives as long as the run's program. More than kInlineViews operands use side storage that stays
// with the place, so that the steady state allocates nothing.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "comm/signal.h"
#include "kernels/kernel.h"
#include "programs/bound.h"
#include "programs/remote/remote_memory.h"
#include "tasks/embed/embedded.h"

namespace tilewise::programs {

inline constexpr int64_t kInlineViews = 24;

class Device;

/// A signal of this device, and the value that the task waits for.
struct TaskWait {
  int64_t signal = 0;
  uint64_t threshold = 0;
};

/// The task's entry in a signal's list, one list at a time. Its signal_posted goes to `device`.
struct TaskWaiter : comm::Waiter {
  Device* device = nullptr;
  uint32_t task = 0;
};

/// A view of a remote device's memory, and its rows there.
struct RemoteView {
  int64_t view = 0;
  RemoteRows rows;
  bool is_written = false;
};

enum class Injected : uint8_t { kNothing, kThrow, kStall, kDelay };

struct Task {
  const BoundInstr* instr = nullptr;
  const Call* call = nullptr;
  const int64_t* ints = nullptr;
  int64_t index = 0;  // iteration of the instruction
  int64_t row_begin = 0;
  tasks::Target target = {};  // which worker runs it
  int64_t priority = 0;
  int64_t transfers = 0;  // elements read from or written to other devices' memory
  Injected injected = Injected::kNothing;
  std::vector<TaskWait> waits;
  size_t num_waits_begun = 0;
  TaskWaiter waiter;
  bool is_moved = false;  // its transfer or fetch has started
  bool skips_kernel = false;  // the transfer has done the kernel's work
  bool sends_tiles = false;  // writes remote tiles, which are sent after its kernel
  bool has_sent_tiles = false;  // they have landed when the task runs again
  int64_t num_sent_post = -1;  // the post that went with them, by its number among the instruction's; -1: none
  std::vector<RemoteView> remote = {};
  Staging::Block staging = {};  // the memory of remote tiles
  uint64_t poison = 0;  // the id of an error of a poster of its signals, or of its transfer

  void set_num_views(int64_t count) {
    num_views_ = count;
    if (count > kInlineViews) more_.resize(count);
  }
  int64_t num_views() const { return num_views_; }
  kernels::TileView* views() { return num_views_ > kInlineViews ? more_.data() : inline_.data(); }

 private:
  int64_t num_views_ = 0;
  std::array<kernels::TileView, kInlineViews> inline_;
  std::vector<kernels::TileView> more_;
};

}  // namespace tilewise::programs
