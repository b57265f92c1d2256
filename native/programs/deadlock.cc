// Shows that a tile program cannot deadlock, whatever the workers and the window, and that signals say what they mean.
//
// One legal schedule is: every device runs its tasks strictly in submission order. If that schedule reaches the end,
// every greedy execution does: of the tasks not completed when something is stuck, take the first in the order in
// which this schedule completed them. All before it are complete, among them all that were submitted before it on its
// device (so the window has room and it is submitted), all it depends on, and all raisers it waits for: it can run.
//
// With few devices there is a cursor per device. With more there is one per class, that of its first device, and a
// step of a class raises what the step raises on all its devices: a wait for a peer is a wait for the peer's class.
// That is the same proof where a class's devices are in lockstep: each gets from every instruction of every class as
// many raises, and has in every instruction as many waits, as the first. Then a schedule of classes that ends is one of
// devices (let all devices of a class take a step at once: what lets the first go on lets every other). And where the
// devices' schedule ends, so does the classes': order the steps of classes by when the first device of each took them;
// it waited for devices that had taken theirs, so their classes stand before it. What is not in lockstep is refused: it
// is another class.
//
// Signals only count, so the proof also pairs the n-th raise of a signal with the n-th that is waited for, and refuses
// a pair about different tensors or uses, or from another raiser than the wait names.
#include <algorithm>
#include <vector>

#include "programs/bound.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kMostCursors = 16;  // with more devices, classes have one

/// A raise, as the cursor that takes it sees it.
struct Raise {
  int64_t cursor;
  int64_t raiser;
  BoundSignal signal;
  int64_t slot;
  Number use;
};

/// Whose steps are taken, and what each step raises at which cursor.
struct Cast {
  std::vector<int64_t> devices;  // of each cursor
  std::vector<std::vector<std::vector<std::vector<Raise>>>> raises;  // per cursor, template, instruction
};

int64_t member_of(const DeviceEntry& device, int64_t team, const Number& member) {
  return device.teams[team][member.on(device.numbers).constant];
}

void make_room(const Program& program, int64_t device, Cast& cast) {
  cast.devices.push_back(device);
  auto& of_cursor = cast.raises.emplace_back();
  for (const Template& plan : program.class_of(device).templates) of_cursor.emplace_back(plan.instrs.size());
}

Cast cast_of_devices(const Program& program) {
  Cast cast;
  for (int64_t d = 0; d < program.num_devices(); ++d) {
    make_room(program, d, cast);
    const Bound& templates = program.bound(d);
    for (size_t t = 0; t < templates.size(); ++t) {
      for (size_t i = 0; i < templates[t].instrs.size(); ++i) {
        for (const BoundNotify& n : templates[t].instrs[i].notifies) {
          cast.raises[d][t][i].push_back({n.device, d, n.signal, n.slot, n.use});
        }
      }
    }
  }
  return cast;
}

/// Classes with one cursor each; refuses devices that are not in lockstep.
class Classes {
 public:
  explicit Classes(const Program& program) : program_(program), first_(program.num_classes(), -1) {
    std::vector<bool> has_several(program.num_classes());
    for (int64_t d = 0; d < program.num_devices(); ++d) {
      const int64_t of = program.device(d).class_id;
      has_several[of] = first_[of] >= 0;
      if (first_[of] < 0) first_[of] = d;
    }
    for (int64_t d = 0; d < program.num_devices(); ++d) {
      columns_.push_back(has_several[program.device(d).class_id] ? num_columns_++ : -1);
    }
    for (int64_t c = 0; c < program.num_classes(); ++c) number_sites(c);
    counts_.resize(2 * site_labels_.size() * num_columns_);
  }

  Cast cast() {
    Cast cast;
    for (int64_t d : first_) make_room(program_, d, cast);
    for (int64_t d = 0; d < program_.num_devices(); ++d) add_device(d, cast);
    for (int64_t d = 0; d < program_.num_devices(); ++d) check_lockstep(d);
    return cast;
  }

 private:
  /// Instructions that wait or raise.
  void number_sites(int64_t class_id) {
    auto& of_class = sites_.emplace_back();
    for (const Template& plan : program_.class_at(class_id).templates) {
      auto& of_template = of_class.emplace_back();
      for (const Instr& instr : plan.instrs) {
        of_template.push_back(std::ssize(site_labels_));
        if (!instr.waits.empty() || !instr.notifies.empty()) site_labels_.push_back(instr.label);
      }
    }
  }

  void add_device(int64_t number, Cast& cast) {
    const DeviceEntry& device = program_.device(number);
    const std::vector<Template>& templates = program_.class_of(number).templates;
    for (size_t t = 0; t < templates.size(); ++t) {
      for (size_t i = 0; i < templates[t].instrs.size(); ++i) {
        const Instr& instr = templates[t].instrs[i];
        const int64_t site = sites_[device.class_id][t][i];
        for (const Wait& wait : instr.waits) {
          if (wait.team < 0 || member_of(device, wait.team, wait.member) != number) count(2 * site + 1, number);
        }
        for (const Notify& n : instr.notifies) {
          const int64_t target = member_of(device, n.team, n.member);
          if (target == number) continue;
          count(2 * site, target);
          const int64_t target_class = program_.device(target).class_id;
          if (first_[target_class] != target) continue;
          const BoundSignal signal{n.signal_base.on(device.numbers), n.per_index};
          cast.raises[device.class_id][t][i].push_back({target_class, number, signal, n.slot, n.use});
        }
      }
    }
  }

  void count(int64_t row, int64_t device) {
    if (columns_[device] >= 0) ++counts_[row * num_columns_ + columns_[device]];
  }

  void check_lockstep(int64_t device) const {
    const int64_t first = first_[program_.device(device).class_id];
    if (columns_[device] < 0) return;
    for (int64_t row = 0; row < 2 * std::ssize(site_labels_); ++row) {
      const int64_t mine = counts_[row * num_columns_ + columns_[device]];
      const int64_t other = counts_[row * num_columns_ + columns_[first]];
      if (mine == other) continue;
      check<ArgumentError>(
          false, "[runtime.Program.finish] devices of one class must wait for each other in lockstep; got device ",
          device, " with ", mine, row % 2 == 0 ? " raises from '" : " waits in '",
          program_.labels()[site_labels_[row / 2]], "' and device ", first, " of its class with ", other,
          "; correct its teams, or make it another class");
    }
  }

  const Program& program_;
  std::vector<int64_t> first_;  // device of each class
  std::vector<std::vector<std::vector<int64_t>>> sites_;  // per class, template and instruction
  std::vector<int64_t> site_labels_;
  // A row per site of the raises that each device gets from it, and one of the waits that each has in it. Devices that
  // are alone in their class have no column.
  std::vector<int64_t> columns_;
  int64_t num_columns_ = 0;
  std::vector<int32_t> counts_;
};

/// What a raise is about, and where it comes from.
struct Mark {
  int64_t tensor;
  int64_t use;
  int64_t raiser;
  int64_t label;
  int64_t index;
};

/// A signal in the simulation. Marks that were waited for are dropped when all have been.
struct Counter {
  std::vector<Mark> marks;
  uint64_t num_dropped = 0;
  uint64_t expected = 0;

  uint64_t value() const { return num_dropped + marks.size(); }
  const Mark& at(uint64_t raise) const { return marks[raise - num_dropped]; }
  void drop() {
    if (expected != value()) return;
    num_dropped = expected;
    marks.clear();
  }
};

/// A device's position in its submission order.
struct Cursor {
  int64_t device = 0;
  const Bound* templates = nullptr;
  const std::vector<Call>* calls = nullptr;
  size_t call = 0;
  size_t instr = 0;
  int64_t index = 0;
  bool armed = false;  // expected values already raised for this iteration
  std::vector<Counter> signals;
  std::vector<uint64_t> thresholds;  // of this iteration's waits

  const Call& now() const { return (*calls)[call]; }
};

class Simulation {
 public:
  Simulation(const Program& program, const Cast& cast, int64_t list) : program_(program), cast_(cast) {
    for (int64_t device : cast.devices) {
      Cursor& at = cursors_.emplace_back();
      at.device = device;
      at.templates = &program.bound(device);
      at.calls = &program.list_of(device, list).calls;
      at.signals.resize(program.needs(device).num_signals);
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t c = 0; c < std::ssize(cursors_); ++c) {
        while (step(c)) moved = true;
      }
    }
    for (Cursor& at : cursors_) report_if_stuck(at);
  }

 private:
  const BoundInstr* current(Cursor& at) const {
    while (at.call < at.calls->size()) {
      const BoundTemplate& plan = (*at.templates)[at.now().template_id];
      const Values values = values_of(at);
      for (; at.instr < plan.instrs.size(); ++at.instr, at.index = 0) {
        const BoundInstr& instr = plan.instrs[at.instr];
        if (instr.source->waits.empty() && instr.source->notifies.empty()) continue;
        if (at.index < num_iterations(instr.source->extent.at(values), instr.source->step_at(values))) return &instr;
      }
      at.instr = 0;
      ++at.call;
    }
    return nullptr;
  }

  Values values_of(const Cursor& at) const {
    return {program_.symbols_max().data(), nullptr, at.now().numbers.data(), static_cast<int64_t>(at.call)};
  }

  bool step(int64_t cursor) {
    Cursor& at = cursors_[cursor];
    const BoundInstr* instr = current(at);
    if (instr == nullptr) return false;
    const Values values = values_of(at);
    if (!at.armed) {
      at.thresholds.clear();
      for (const BoundWait& wait : instr->waits) {
        uint64_t& expected = at.signals[wait.signal.at(values, at.index)].expected;
        expected += wait.increment.at(values);
        at.thresholds.push_back(expected);
      }
      at.armed = true;
    }
    if (unmet(at, *instr) >= 0) return false;
    for (size_t w = 0; w < instr->waits.size(); ++w) pair(at, *instr, w);
    for (const BoundWait& wait : instr->waits) at.signals[wait.signal.at(values, at.index)].drop();
    for (const Raise& raise : cast_.raises[cursor][at.now().template_id][at.instr]) {
      cursors_[raise.cursor].signals[raise.signal.at(values, at.index)].marks.push_back(
          {tensor(at, raise.slot), raise.use.at(values), raise.raiser, instr->label, at.index});
    }
    at.armed = false;
    ++at.index;
    return true;
  }

  static int64_t tensor(const Cursor& at, int64_t slot) { return slot < 0 ? -1 : at.now().binding[slot]; }

  int64_t unmet(const Cursor& at, const BoundInstr& instr) const {
    const Values values = values_of(at);
    for (size_t w = 0; w < instr.waits.size(); ++w) {
      const Counter& signal = at.signals[instr.waits[w].signal.at(values, at.index)];
      if (signal.value() < at.thresholds[w]) return static_cast<int64_t>(w);
    }
    return -1;
  }

  /// The raises that a wait newly asks for are about its tensor and its use. One that asks for none repeats another.
  void pair(const Cursor& at, const BoundInstr& instr, size_t which) const {
    const BoundWait& wait = instr.waits[which];
    const Values values = values_of(at);
    const int64_t number = wait.signal.at(values, at.index);
    const auto increment = static_cast<uint64_t>(wait.increment.at(values));
    for (uint64_t raise = at.thresholds[which] - increment; raise < at.thresholds[which]; ++raise) {
      const Mark& mark = at.signals[number].at(raise);
      const int64_t about = tensor(at, wait.slot);
      const int64_t use = wait.use.at(values);
      const bool is_raiser = wait.raiser < 0 || wait.raiser == mark.raiser;
      if (mark.tensor == about && mark.use == use && is_raiser) continue;
      const auto place = [&](int64_t label, int64_t index) {
        return "'" + program_.labels()[label] + "'[" + std::to_string(index) + "]";
      };
      check<ArgumentError>(false, "[runtime.Program.finish] a wait and its raise must be about one use of one tensor, ",
                           "by the device that the wait names; got device ", at.device, " waiting in ",
                           place(instr.label, at.index), " for signal ", number, " about tensor ", about, ", use ", use,
                           raiser_named(wait.raiser), " and raise ", raise + 1, " in ", place(mark.label, mark.index),
                           " of device ", mark.raiser, " about tensor ", mark.tensor, ", use ", mark.use,
                           "; correct the plan");
    }
  }

  static std::string raiser_named(int64_t device) {
    return device < 0 ? "" : " of device " + std::to_string(device) + ",";
  }

  void report_if_stuck(Cursor& at) const {
    const BoundInstr* instr = current(at);
    if (instr == nullptr) return;
    const Values values = values_of(at);
    const int64_t w = unmet(at, *instr);
    const int64_t signal = instr->waits[w].signal.at(values, at.index);
    check<ArgumentError>(false, "[runtime.Program.finish] the devices' orders must not block each other; got device ",
                         at.device, " waiting for ever in '", program_.labels()[instr->label], "'[", at.index,
                         "] for signal ", signal, " to reach ", at.thresholds[w], " (it stays at ",
                         at.signals[signal].value(), "); submit the raising task earlier or add it");
  }

  const Program& program_;
  const Cast& cast_;
  std::vector<Cursor> cursors_;
};

void simulate(const Program& program, const Cast& cast) {
  for (int64_t list = 0; list < program.num_lists(); ++list) Simulation(program, cast, list).run();
}

}  // namespace

void check_signals_by_device(const Program& program) { simulate(program, cast_of_devices(program)); }

void check_signals_by_class(const Program& program) { simulate(program, Classes(program).cast()); }

void check_signals(const Program& program) {
  program.num_devices() <= kMostCursors ? check_signals_by_device(program) : check_signals_by_class(program);
}

}  // namespace tilewise::programs
