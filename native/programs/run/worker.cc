// See worker.h.
#include "programs/run/worker.h"

#include <chrono>
#include <cstddef>
#include <sstream>
#include <thread>

#include "programs/run/errors.h"

namespace tilewise::programs {

namespace {

using kernels::KernelArgs;
using kernels::TileView;

// A user's kernel gets the arguments of every kernel under their names in C.
static_assert(sizeof(tilewise_tile) == sizeof(TileView) && offsetof(tilewise_tile, data) == offsetof(TileView, data) &&
              offsetof(tilewise_tile, rows) == offsetof(TileView, rows) &&
              offsetof(tilewise_tile, cols) == offsetof(TileView, cols) &&
              offsetof(tilewise_tile, stride) == offsetof(TileView, stride));
static_assert(sizeof(tilewise_kernel_args) == sizeof(KernelArgs) &&
              offsetof(tilewise_kernel_args, tiles) == offsetof(KernelArgs, tiles) &&
              offsetof(tilewise_kernel_args, num_tiles) == offsetof(KernelArgs, num_tiles) &&
              offsetof(tilewise_kernel_args, ints) == offsetof(KernelArgs, ints) &&
              offsetof(tilewise_kernel_args, num_ints) == offsetof(KernelArgs, num_ints) &&
              offsetof(tilewise_kernel_args, floats) == offsetof(KernelArgs, floats) &&
              offsetof(tilewise_kernel_args, num_floats) == offsetof(KernelArgs, num_floats) &&
              offsetof(tilewise_kernel_args, row_begin) == offsetof(KernelArgs, row_begin) &&
              offsetof(tilewise_kernel_args, scratch) == offsetof(KernelArgs, scratch.data) &&
              offsetof(tilewise_kernel_args, scratch_bytes) == offsetof(KernelArgs, scratch.bytes));

void call_user(tilewise_tile_kernel kernel, const KernelArgs& args) {
  const int status = kernel(reinterpret_cast<const tilewise_kernel_args*>(&args));
  if (status != 0) throw std::runtime_error("status " + std::to_string(status));
}

}  // namespace

void Worker::begin(const Task& task) {
  index_.store(task.index, std::memory_order_relaxed);
  since_ns_.store(now_ns(), std::memory_order_relaxed);
  instr_.store(task.instr, std::memory_order_release);
}

TaskFailed failure_of(const Task& task, const std::string& label, int64_t device, int64_t worker,
                      const std::exception_ptr& error) {
  std::string what;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    what = exception.what();
  } catch (...) {
    what = "an unknown exception";
  }
  std::ostringstream text;
  text << "[programs.Executor.run] a task must not fail; got '" << what << "' from kernel '"
       << task.instr->source->kernel << "' in '" << label << "'[" << task.index << "] on device " << device;
  if (worker >= 0) text << ", worker " << worker;
  text << "; check its operands, or the kernel";
  return {text.str(), label, task.index, worker, device};
}

uint64_t Worker::run_kernel(Task& task, const std::string& label, int64_t device, RunState& state) {
  const BoundInstr& instr = *task.instr;
  try {
    if (task.injected == Injected::kThrow) throw std::runtime_error("injected failure");
    if (instr.fn == nullptr && instr.user_fn == nullptr) return 0;
    const KernelArgs args{task.views(),
                          task.num_views(),
                          task.ints,
                          static_cast<int64_t>(instr.ints.size()),
                          instr.source->floats.data(),
                          static_cast<int64_t>(instr.source->floats.size()),
                          task.row_begin,
                          {scratch_.data(), scratch_.bytes()}};
    if (instr.fn != nullptr) {
      instr.fn(args);
    } else {
      call_user(instr.user_fn, args);
    }
  } catch (...) {
    return state.fail(std::make_exception_ptr(failure_of(task, label, device, number_, std::current_exception())));
  }
  return 0;
}

void Worker::stall(const RunState& state) {
  stalled_.store(true, std::memory_order_relaxed);
  while (state.stopped() == 0 && !state.closing()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  stalled_.store(false, std::memory_order_relaxed);
}

WorkerStatus Worker::status() const {
  return {instr_.load(std::memory_order_acquire), index_.load(std::memory_order_relaxed),
          since_ns_.load(std::memory_order_relaxed), stalled_.load(std::memory_order_relaxed)};
}

}  // namespace tilewise::programs
