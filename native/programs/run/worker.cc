// See worker.h.
#include "programs/run/worker.h"

#include <chrono>
#include <sstream>
#include <thread>

#include "programs/run/errors.h"

namespace tilewise::programs {

void Worker::begin(const Task& task) {
  index_.store(task.index, std::memory_order_relaxed);
  since_ns_.store(now_ns(), std::memory_order_relaxed);
  instr_.store(task.instr, std::memory_order_release);
}

uint64_t Worker::run_kernel(Task& task, const std::string& label, int64_t device, RunState& state) {
  const BoundInstr& instr = *task.instr;
  const auto failed = [&](const char* what) {
    std::ostringstream text;
    text << "[runtime.Executor.run] a task must not fail; got '" << what << "' from kernel '" << instr.source->kernel
         << "' in '" << label << "'[" << task.index << "] on device " << device << ", worker " << number_
         << "; check its operands, or the kernel";
    const TaskFailed error(text.str(), label, task.index, number_, device);
    return state.fail(std::make_exception_ptr(error));
  };
  try {
    if (task.injected == Injected::kThrow) throw std::runtime_error("injected failure");
    if (instr.fn == nullptr) return 0;
    instr.fn({task.views(),
              task.num_views(),
              task.ints,
              static_cast<int64_t>(instr.ints.size()),
              instr.source->floats.data(),
              static_cast<int64_t>(instr.source->floats.size()),
              task.row_begin,
              {scratch_.data(), scratch_.bytes()}});
  } catch (const std::exception& error) {
    return failed(error.what());
  } catch (...) {
    return failed("an unknown exception");
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
