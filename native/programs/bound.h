// A device's templates as its instruction issuer executes them: numbers of the device are inserted, device groups and
// members resolved.
//
// Symbols and numbers of the call are still open. Operands on the device itself have no device group any more, and
// waits for and posts to itself are removed. Made by Program::bound, frozen, read by every thread of the device.
#pragma once
#include <string>
#include <vector>

#include "programs/program.h"

namespace tilewise::programs {

struct BoundOperand {
  int64_t slot = 0;
  int64_t owner = 0;  // the device whose memory it views
  Mode mode = Mode::kWhole;
  int64_t access = kNoAccess;  // kNoAccess if the owner is a peer
  Number div;
  Number part;
  Number parts;
  bool null = false;
  int64_t role = kIn;  // what the kernel does with it
  Number offset = 0;
};

struct BoundSignal {
  Number base;
  bool per_index = false;

  int64_t at(const Values& values, int64_t index) const { return base.at(values) + (per_index ? index : 0); }
};

struct BoundWait {
  BoundSignal signal;
  Number increment;
  int64_t poster = -1;  // -1: any
  int64_t slot = -1;
  Number use;
};

struct BoundNotify {
  int64_t device = 0;
  BoundSignal signal;
  int64_t slot = -1;
  Number use;
};

struct BoundInstr {
  const Instr* source = nullptr;  // kernel name and floats
  kernels::KernelFn fn = nullptr;  // nullptr if the instruction moves tiles, which happens before the task starts
  tilewise_tile_kernel user_fn = nullptr;  // instead of fn
  Moves moves = Moves::kNothing;
  bool is_copy = false;  // copies each second operand into the one before it
  int64_t label = 0;
  int64_t priority = 0;
  int64_t first = 0;  // the iteration that is submitted first, modulo their number
  std::vector<BoundOperand> operands;
  std::vector<int64_t> ints;           // final except late ones
  std::vector<Number> late_ints;       // empty, or all ints, evaluated for every call and run
  std::vector<BoundWait> waits;
  std::vector<BoundNotify> notifies;
};

struct BoundTemplate {
  std::vector<BoundInstr> instrs;
};

}  // namespace tilewise::programs
