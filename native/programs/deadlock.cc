// Shows that a tile program cannot deadlock, whatever the workers and the window.
//
// One legal schedule is: every device runs its tasks strictly in submission order. If that schedule reaches the end,
// every greedy execution does: of the tasks not completed when something is stuck, take the first in the order in
// which this schedule completed them. All before it are complete, among them all that were submitted before it on its
// device (so the window has room and it is submitted), all it depends on, and all raisers it waits for: it can run.
#include <vector>

#include "programs/bound.h"

namespace tilewise::programs {

namespace {

/// One device's position in its submission order.
struct Cursor {
  const Bound* templates = nullptr;
  const std::vector<Call>* calls = nullptr;
  size_t call = 0;
  size_t instr = 0;
  int64_t index = 0;
  bool armed = false;                // expected values already raised for this iteration
  std::vector<uint64_t> expected;    // per signal
  std::vector<uint64_t> thresholds;  // of this iteration's waits
};

class Simulation {
 public:
  Simulation(const Program& program, int64_t list)
      : program_(program), cursors_(program.num_devices()), values_(program.num_devices()) {
    for (int64_t d = 0; d < program.num_devices(); ++d) {
      values_[d].assign(program.needs(d).num_signals, 0);
      cursors_[d].expected.assign(program.needs(d).num_signals, 0);
      cursors_[d].templates = &program.bound(d);
      cursors_[d].calls = &program.list_of(d, list).calls;
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t d = 0; d < program_.num_devices(); ++d) {
        while (step(d)) moved = true;
      }
    }
    for (int64_t d = 0; d < program_.num_devices(); ++d) report_if_stuck(d);
  }

 private:
  const BoundInstr* current(int64_t device) {
    Cursor& at = cursors_[device];
    while (at.call < at.calls->size()) {
      const BoundTemplate& plan = (*at.templates)[(*at.calls)[at.call].template_id];
      for (; at.instr < plan.instrs.size(); ++at.instr, at.index = 0) {
        const BoundInstr& instr = plan.instrs[at.instr];
        if (instr.waits.empty() && instr.notifies.empty()) continue;
        const Values values = values_of(device);
        if (at.index < num_iterations(instr.source->extent.at(values), instr.source->step_at(values))) return &instr;
      }
      at.instr = 0;
      ++at.call;
    }
    return nullptr;
  }

  Values values_of(int64_t device) const {
    const Cursor& at = cursors_[device];
    return {program_.symbols_max().data(), nullptr, (*at.calls)[at.call].numbers.data()};
  }

  bool step(int64_t device) {
    const BoundInstr* instr = current(device);
    if (instr == nullptr) return false;
    Cursor& at = cursors_[device];
    const Values values = values_of(device);
    if (!at.armed) {
      at.thresholds.clear();
      for (const BoundWait& wait : instr->waits) {
        uint64_t& expected = at.expected[wait.signal.at(values, at.index)];
        expected += wait.increment.at(values);
        at.thresholds.push_back(expected);
      }
      at.armed = true;
    }
    if (unmet(device, *instr) >= 0) return false;
    for (const BoundNotify& notify : instr->notifies) ++values_[notify.device][notify.signal.at(values, at.index)];
    at.armed = false;
    ++at.index;
    return true;
  }

  int64_t unmet(int64_t device, const BoundInstr& instr) const {
    const Cursor& at = cursors_[device];
    const Values values = values_of(device);
    for (size_t w = 0; w < instr.waits.size(); ++w) {
      if (values_[device][instr.waits[w].signal.at(values, at.index)] < at.thresholds[w])
        return static_cast<int64_t>(w);
    }
    return -1;
  }

  void report_if_stuck(int64_t device) {
    const BoundInstr* instr = current(device);
    if (instr == nullptr) return;
    const Cursor& at = cursors_[device];
    const Values values = values_of(device);
    const int64_t w = unmet(device, *instr);
    const int64_t signal = instr->waits[w].signal.at(values, at.index);
    throw_deadlock(device, *instr, at.index, signal, at.thresholds[w], values_[device][signal]);
  }

  [[noreturn]] void throw_deadlock(int64_t device, const BoundInstr& instr, int64_t index, int64_t signal,
                                   uint64_t expected, uint64_t seen) const {
    std::ostringstream text;
    text << "[runtime.Program.finish] the devices' orders must not block each other; got device " << device
         << " waiting for ever in '" << program_.labels()[instr.label] << "'[" << index << "] for signal " << signal
         << " to reach " << expected << " (it stays at " << seen << "); submit the raising task earlier or add it";
    throw ArgumentError(text.str());
  }

  const Program& program_;
  std::vector<Cursor> cursors_;
  std::vector<std::vector<uint64_t>> values_;
};

}  // namespace

void check_no_deadlock(const Program& program, int64_t list) { Simulation(program, list).run(); }

}  // namespace tilewise::programs
