// A task: everything a worker needs to run it, inline in a slot of the device's window.
//
// Filled by the walker while it alone knows the slot, read by one worker, then filled anew. Owns no tensor; refers to
// its instruction, which lives as long as the run's program. More than kInlineViews operands go to side storage that
// the slot keeps, so that the steady state allocates nothing.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "comm/signal.h"
#include "kernels/kernel.h"
#include "runtime/program.h"

namespace tilewise::runtime {

inline constexpr int64_t kInlineViews = 24;

class Device;

/// A wait of a task: a waiter that knows whom to tell.
struct TaskWait : comm::Waiter {
  Device* device = nullptr;
  int32_t slot = 0;
  int64_t signal = 0;
};

enum class Injected : uint8_t { kNothing, kThrow, kStall };

struct Task {
  const Instr* instr = nullptr;
  int64_t index = 0;      // iteration of the instruction
  int64_t row_begin = 0;
  int64_t transfers = 0;  // elements read from other devices' memory
  Injected injected = Injected::kNothing;
  std::vector<TaskWait> waits;
  int64_t submit_ns = 0;

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

}  // namespace tilewise::runtime
