// The checks of Program::finish, and what a program needs of its devices.
//
// Devices are checked one by one, everything else once per class. A Number (number.h) is a constant plus a multiple of
// a value that is known later. If that is a device's value or a symbol, it is checked once, for the range over the
// class's devices and over symbols from 0 to their bounds; if it is a call's value, it is checked for every call.
#include <algorithm>

#include "programs/program.h"
#include "tasks/embed/embedded.h"

namespace tilewise::programs {

namespace {

/// Least and greatest value of a number.
struct Range {
  int64_t low;
  int64_t high;
};

/// What all devices of a class have in common, and the ranges of their numbers.
struct ClassFacts {
  bool is_used = false;
  std::vector<Range> numbers;
  std::vector<int64_t> group_sizes;
  std::vector<int64_t> fewest_tensors;  // per device group: the minimum over its devices' classes
};

enum Allowed : int64_t { kSymbols = 1, kDevices = 2, kCalls = 4, kPositions = 8 };

class Checks {
 public:
  explicit Checks(const Program& program)
      : program_(program), facts_(program.num_classes()), needs_(program.num_classes()), scratch_(bounds()) {}

  std::vector<Needs> run() {
    for (int64_t bound : bounds()) {
      check<ArgumentError>(bound >= 0, "[programs.Program.finish] a symbol's bound must be >= 0; got ", bound,
                           "; correct the plan");
    }
    check<ArgumentError>(program_.num_devices() >= 1,
                         "[programs.Program.finish] a program needs 1 device or more; got none; add_device first");
    for (int64_t d = 0; d < program_.num_devices(); ++d) check_device(d);
    for (int64_t c = 0; c < program_.num_classes(); ++c) check_class(c);
    for (Needs& needs : needs_) needs.num_signals = num_signals_;
    return needs_;
  }

 private:
  const std::vector<int64_t>& bounds() const { return program_.symbols_max(); }

  // ---- devices ----

  void check_device(int64_t number) {
    const DeviceEntry& device = program_.device(number);
    ClassFacts& facts = facts_[device.class_id];
    if (!facts.is_used) {
      facts.is_used = true;
      for (int64_t value : device.numbers) facts.numbers.push_back({value, value});
      for (const auto& group : device.groups) facts.group_sizes.push_back(std::ssize(group));
      facts.fewest_tensors.assign(device.groups.size(), INT64_MAX);
    }
    bool is_alike = device.numbers.size() == facts.numbers.size() && device.groups.size() == facts.group_sizes.size();
    for (size_t t = 0; is_alike && t < device.groups.size(); ++t) {
      is_alike = std::ssize(device.groups[t]) == facts.group_sizes[t];
    }
    check<ArgumentError>(
        is_alike,
        "[programs.Program.finish] devices of one class must have as many numbers, and device groups of the "
        "same sizes; got other ones on device ",
        number, "; correct the plan, or make it another class");
    for (size_t n = 0; n < device.numbers.size(); ++n) {
      facts.numbers[n].low = std::min(facts.numbers[n].low, device.numbers[n]);
      facts.numbers[n].high = std::max(facts.numbers[n].high, device.numbers[n]);
    }
    for (size_t t = 0; t < device.groups.size(); ++t) check_group(number, device.groups[t], facts.fewest_tensors[t]);
  }

  void check_group(int64_t number, const std::vector<int64_t>& group, int64_t& fewest_tensors) {
    std::vector<bool> is_member(program_.num_devices());
    for (int64_t member : group) {
      check<ArgumentError>(member >= 0 && member < program_.num_devices() && !is_member[member],
                           "[programs.Program.finish] a device group must be different devices of the program's ",
                           program_.num_devices(), "; got ", member, " in one of device ", number,
                           "; correct the plan");
      is_member[member] = true;
      fewest_tensors = std::min(fewest_tensors, std::ssize(program_.class_of(member).tensors));
    }
  }

  // ---- classes ----

  void check_class(int64_t class_id) {
    class_ = class_id;
    check<ArgumentError>(facts().is_used, "[programs.Program.finish] every class needs a device; got none for class ",
                         class_id, " of ", program_.num_classes(), "; add_device");
    const DeviceClass& of = program_.class_at(class_id);
    for (size_t t = 0; t < of.tensors.size(); ++t) check_tensor(static_cast<int64_t>(t), of.tensors[t]);
    call_numbers_.assign(of.templates.size(), 0);
    late_.assign(of.templates.size(), {});
    for (size_t t = 0; t < of.templates.size(); ++t) {
      for (const Instr& instr : of.templates[t].instrs) {
        num_call_numbers_ = 0;
        check_instr(instr);
        check_values(instr, nullptr);
        if (num_call_numbers_ > 0) late_[t].push_back(&instr);
        call_numbers_[t] = std::max(call_numbers_[t], num_call_numbers_);
      }
    }
    for (const CallList& list : of.lists) {
      for (const Call& call : list.calls) check_call(of, call);
    }
  }

  const ClassFacts& facts() const { return facts_[class_]; }

  void check_tensor(int64_t id, const Tensor& tensor) {
    std::ostringstream words;
    words << "tensor " << id << " of class " << class_;
    const std::string name = words.str();
    check_number(tensor.rows, kSymbols, "rows", name);
    check_number(tensor.tile_rows, kSymbols, "tile_rows", name);
    check_extent(tensor.rows, nullptr, name);
    check<ArgumentError>(
        tensor.offset >= 0 && tensor.cols >= 0 && least_above_0(tensor.tile_rows) >= 1 && tensor.first_handle >= 0 &&
            tensor.tile_cols >= 0,
        "[programs.Program.finish] offset, cols, tile_cols and first_handle must be >= 0 and tile_rows >= 1; got ",
        tensor.offset, ", ", tensor.cols, ", ", tensor.tile_cols, ", ", tensor.first_handle, ", ",
        least_above_0(tensor.tile_rows), " in ", name, "; correct the plan");
    check<ArgumentError>(tensor.stride >= tensor.cols && size_of(tensor.dtype) > 0,
                         "[programs.Program.finish] stride must be >= cols and the dtype valid; got stride ",
                         tensor.stride, ", cols ", tensor.cols, ", dtype ", static_cast<int>(tensor.dtype), " in ",
                         name, "; correct the plan");
    const int64_t num_tensors = std::ssize(program_.class_at(class_).tensors);
    for (int64_t alias : tensor.aliases) {
      check<ArgumentError>(alias >= 0 && alias < num_tensors, "[programs.Program.finish] an alias must be a tensor of ",
                           "the same class (0 to ", num_tensors - 1, "); got ", alias, " in ", name,
                           "; correct the plan");
    }
    Needs& needs = needs_[class_];
    const int64_t tiles = most_steps(tensor.rows, tensor.tile_rows, nullptr) * tensor.tiles_across();
    needs.num_handles = std::max(needs.num_handles, tensor.first_handle + tiles);
    const int64_t rows = range(tensor.rows, nullptr).high;
    if (rows == 0) return;
    const int64_t elements = (rows - 1) * tensor.stride + tensor.cols;
    const int64_t end = tensor.offset + elements * size_of(tensor.dtype);
    if (is_in_file(tensor)) {
      needs.file_bytes = std::max(needs.file_bytes, end - memory_bytes());
      return;
    }
    check<ArgumentError>(end <= memory_bytes(), "[programs.Program.finish] a tensor must lie in memory or in the ",
                         "file; got bytes ", tensor.offset, " to ", end, " in ", name, ", and a file that begins at ",
                         memory_bytes(), "; correct the plan");
    needs.arena_bytes = std::max(needs.arena_bytes, end);
  }

  /// Where the files of the class's devices begin.
  int64_t memory_bytes() const { return program_.class_at(class_).memory_bytes; }

  bool is_in_file(const Tensor& tensor) const { return tensor.offset >= memory_bytes(); }

  // ---- instructions ----

  const std::string& label_of(const Instr& instr) const { return program_.labels()[instr.label]; }

  /// Checks what does not depend on calls: sources, modes, accesses, device groups.
  void check_instr(const Instr& instr) {
    const std::string& label = label_of(instr);
    const std::string place = "'" + label + "'";
    constexpr int64_t kAll = kSymbols | kDevices | kCalls;
    check_number(instr.extent, kSymbols | kCalls, "an extent", place);
    check_number(instr.step, kSymbols | kCalls, "a step", place);
    check_number(instr.first, kDevices, "a first iteration", place);
    for (const Number& n : instr.ints) check_number(n, kAll, "an integer", place);
    check_hints(instr.hints, place);
    for (const Operand& operand : instr.operands) {
      const auto mode = static_cast<int64_t>(operand.mode);
      check<ArgumentError>(mode >= 0 && mode <= 6, "[programs.Program.finish] mode must be 0 to 6; got ", mode, " in '",
                           label, "'; see runtime.Mode");
      check<ArgumentError>(operand.access >= kNoAccess && operand.access <= kInOut,
                           "[programs.Program.finish] access must be 0 to 3; got ", operand.access, " in '", label,
                           "'; see runtime.Access");
      check<ArgumentError>(operand.role >= kNoAccess && operand.role <= kInOut,
                           "[programs.Program.finish] role must be 0 to 3; got ", operand.role, " in '", label,
                           "'; see runtime.Access");
      if (operand.group != -1) check_peer(operand.group, operand.member, "an operand's", label);
      check<ArgumentError>(operand.mode != Mode::kPanelCols || is_of_whole_panels(instr, operand),
                           "[programs.Program.finish] columns of panels must be read, on the device itself, in a loop "
                           "of whole panels (32); got access ",
                           operand.access, ", device group ", operand.group, ", step ", instr.step.constant, " in '",
                           label, "'; copy the weight first");
      for (const Number* n : {&operand.div, &operand.part, &operand.parts, &operand.offset}) {
        check_number(*n, kAll, "div, part, parts and offset", place);
      }
    }
    for (const Wait& wait : instr.waits) {
      if (wait.group != -1) check_peer(wait.group, wait.member, "a wait's", label);
      check_number(wait.signal_base, kDevices | kCalls, "a signal", place);
      check_number(wait.increment, kCalls, "an increment", place);
      check_number(wait.use, kCalls | kPositions, "a use", place);
    }
    for (const Notify& notify : instr.notifies) {
      check_peer(notify.group, notify.member, "a notify's", label);
      check_number(notify.signal_base, kDevices | kCalls, "a signal", place);
      check_number(notify.use, kCalls | kPositions, "a use", place);
    }
  }

  /// Checks the range of workers. Executor::run compares the largest one with the executor's number of workers.
  void check_hints(const TaskHints& hints, const std::string& place) {
    for (int64_t worker : hints.workers) {
      check<ArgumentError>(worker >= 0 && worker < tasks::Embedded::kMaxWorkers,
                           "[programs.Program.finish] a worker must lie in [0, ", tasks::Embedded::kMaxWorkers - 1,
                           "]; got ", worker, " in ", place, "; count from 0");
      needs_[class_].num_workers = std::max(needs_[class_].num_workers, worker + 1);
    }
  }

  /// Panels interleave rows and pairs of columns, so only such a view of columns is rectangular in memory.
  static bool is_of_whole_panels(const Instr& instr, const Operand& operand) {
    const bool is_read = operand.access <= kIn && operand.role <= kIn && operand.group < 0;
    return is_read && operand.div.is_constant() && operand.div.constant == 1 && instr.step.is_constant() &&
           instr.step.constant % kPanelRows == 0;
  }

  void check_peer(int64_t group, const Number& member, const char* whose, const std::string& label) {
    const int64_t num_groups = std::ssize(facts().group_sizes);
    check<ArgumentError>(group >= 0 && group < num_groups, "[programs.Program.finish] ", whose,
                         " peer must be in a device group of its device; got device group ", group, " of ", num_groups,
                         " in '", label, "'; pass the device group to add_device");
    check_number(member, kDevices, "a member", "'" + label + "'");
    const Range members = range(member, nullptr);
    check<ArgumentError>(members.low >= 0 && members.high < facts().group_sizes[group], "[programs.Program.finish] ",
                         whose, " peer must be a member of its device group; got member ",
                         members.low < 0 ? members.low : members.high, " of ", facts().group_sizes[group], " in '",
                         label, "'; correct the plan");
  }

  void check_number(const Number& n, int64_t allowed, const char* what, const std::string& place) {
    const auto source = static_cast<int64_t>(n.source);
    const bool is_known = source >= 0 && source <= static_cast<int64_t>(Source::kPosition);
    check<ArgumentError>(is_known && (n.is_constant() || (allowed >> (source - 1) & 1) != 0),
                         "[programs.Program.finish] ", what, " must have a source that fits it; got source ", source,
                         " in ", place, "; see ir.program.Source");
    const auto num_symbols = std::ssize(bounds());
    check<ArgumentError>(n.source != Source::kSymbol || (n.which >= 0 && n.which < num_symbols),
                         "[programs.Program.finish] a symbol must be one of the ", num_symbols, " bounded ones; got ",
                         n.which, " in ", place, "; pass an upper bound for it to finish()");
    const auto num_numbers = std::ssize(facts().numbers);
    check<ArgumentError>(n.source != Source::kDevice || (n.which >= 0 && n.which < num_numbers),
                         "[programs.Program.finish] a number of the device must be one of its class's ", num_numbers,
                         "; got ", n.which, " in ", place, "; pass it to add_device");
    if (n.source != Source::kCall) return;
    check<ArgumentError>(n.which >= 0, "[programs.Program.finish] a number of the call must be one of its own; got ",
                         n.which, " in ", place, "; count from 0");
    num_call_numbers_ = std::max<int64_t>(num_call_numbers_, n.which + 1);
  }

  // ---- values ----

  void check_extent(const Number& extent, const Call* call, const std::string& place) const {
    check<ArgumentError>(least_of(extent, call) >= 0, "[programs.Program.finish] an extent must not be negative; got ",
                         extent.constant, " + ", extent.multiple, " * what it names in ", place, "; correct the plan");
  }

  /// Checks values over all devices and symbols; those of a call's numbers only with a call.
  void check_values(const Instr& instr, const Call* call) const {
    const std::string& label = label_of(instr);
    const auto least = [&](const Number& n) { return least_of(n, call); };
    check_extent(instr.extent, call, "'" + label + "'");
    check<ArgumentError>(instr.is_single() || least_above_0(instr.step, call) >= 1,
                         "[programs.Program.finish] a step that is not constant must be >= 1; got ",
                         least_above_0(instr.step, call), " in '", label, "'; correct the plan");
    for (const Operand& operand : instr.operands) {
      const bool is_range = operand.mode == Mode::kRowCols || operand.mode == Mode::kRows;  // of columns or rows
      const Range part = range(operand.part, call);
      const bool is_known = is_known_with(operand.part, call);
      check<ArgumentError>(
          least_above_0(operand.div, call) >= 1 && least_above_0(operand.parts, call) >= 1 &&
              (!is_known || (part.low >= 0 && (is_range || part.high < least_above_0(operand.parts, call)))),
          "[programs.Program.finish] div and parts must be >= 1 and 0 <= part < parts; got div ",
          least_above_0(operand.div, call), ", part ", part.high, " of ", least_above_0(operand.parts, call), " in '",
          label, "'; correct the plan");
      check<ArgumentError>(
          least(operand.offset) >= 0 && (operand.mode == Mode::kRowPart || operand.offset == Number(0)),
          "[programs.Program.finish] an offset must be >= 0, and 0 unless the mode is ROWPART; got ",
          least(operand.offset), " in '", label, "'; correct the plan");
    }
    for (const Wait& wait : instr.waits) {
      check<ArgumentError>(least(wait.signal_base) >= 0 && least(wait.increment) >= 0,
                           "[programs.Program.finish] a wait's signal and increment must be >= 0; got ",
                           least(wait.signal_base), ", ", least(wait.increment), " in '", label, "'; correct the plan");
    }
    for (const Notify& notify : instr.notifies) {
      check<ArgumentError>(least(notify.signal_base) >= 0, "[programs.Program.finish] a notify's signal must be >= 0; ",
                           "got ", least(notify.signal_base), " in '", label, "'; correct the plan");
    }
  }

  static bool is_known_with(const Number& n, const Call* call) { return n.source != Source::kCall || call != nullptr; }

  /// The range of a number's values. Without a call, the constant of a call's number.
  Range range(const Number& n, const Call* call) const {
    Range values{0, 0};
    if (n.source == Source::kSymbol) values.high = bounds()[n.which];
    if (n.source == Source::kDevice) values = facts().numbers[n.which];
    if (n.source == Source::kCall && call != nullptr) values = {call->numbers[n.which], call->numbers[n.which]};
    const int64_t ends[] = {n.constant + n.multiple * values.low, n.constant + n.multiple * values.high};
    return Range{std::min(ends[0], ends[1]), std::max(ends[0], ends[1])};
  }

  int64_t least_of(const Number& n, const Call* call) const {
    return is_known_with(n, call) ? range(n, call).low : INT64_MAX;
  }

  /// The least value for symbols above 0: divisors of rows are not used if there are no rows.
  int64_t least_above_0(const Number& n, const Call* call = nullptr) const {
    if (n.source != Source::kSymbol) return least_of(n, call);
    return n.constant + std::min(n.multiple, n.multiple * std::max<int64_t>(bounds()[n.which], 1));
  }

  /// The maximum number of steps over all values of symbols. If rows and step depend on one symbol, their quotient is
  /// monotonic in it, so it is largest at 1 or at the bound; at 0 a step counts as 1.
  int64_t most_steps(const Number& rows, const Number& step, const Call* call) {
    const Values values{scratch_.data(), nullptr, call == nullptr ? nullptr : call->numbers.data()};
    const auto steps = [&] { return num_iterations(rows.at(values), std::max<int64_t>(step.at(values), 1)); };
    const auto over = [&](const Number& n, const auto& body) {
      if (n.source != Source::kSymbol) return body();
      const int64_t bound = bounds()[n.which];
      int64_t most = 0;
      for (int64_t value : {int64_t{0}, std::min<int64_t>(1, bound), bound}) {
        scratch_[n.which] = value;
        most = std::max(most, body());
      }
      return most;
    };
    const bool is_one = rows.source == Source::kSymbol && step.source == Source::kSymbol && rows.which == step.which;
    return over(rows, [&] { return is_one ? steps() : over(step, steps); });
  }

  // ---- calls ----

  void check_call(const DeviceClass& of, const Call& call) {
    const Template& plan = of.templates[call.template_id];
    const int64_t num_slots = std::ssize(call.binding);
    check<ArgumentError>(std::ssize(call.numbers) >= call_numbers_[call.template_id],
                         "[programs.Program.finish] a call must have the numbers that its template uses; got ",
                         call.numbers.size(), " of ", call_numbers_[call.template_id], " for template '", plan.name,
                         "'; pass them to add_call");
    if (!call.hints.workers.empty()) check_hints(call.hints, "a call of '" + plan.name + "'");
    for (const Instr* instr : late_[call.template_id]) check_values(*instr, &call);
    for (const Instr& instr : plan.instrs) {
      const auto check_slot = [&](int64_t slot, const char* what) {
        check<ArgumentError>(slot >= 0 && slot < num_slots, "[programs.Program.finish] every ", what,
                             " slot must be bound; got slot ", slot, " of ", num_slots, " in '", label_of(instr),
                             "' of template '", plan.name, "'; bind it in add_call");
      };
      for (const Operand& operand : instr.operands) {
        if (operand.null) continue;
        check_slot(operand.slot, "operand's");
        const int64_t num_tensors = operand.group < 0 ? std::ssize(of.tensors) : facts().fewest_tensors[operand.group];
        const int64_t tensor = call.binding[operand.slot];
        check<ArgumentError>(tensor >= 0 && tensor < num_tensors,
                             "[programs.Program.finish] a bound tensor must exist on its device; got tensor ", tensor,
                             " of ", num_tensors, " in '", label_of(instr), "' of class ", class_,
                             "; add_tensor to every class");
      }
      check_places(of, instr, call);
      if (instr.waits.empty() && instr.notifies.empty()) continue;
      const int64_t iterations = instr.is_single() ? 1 : most_steps(instr.extent, instr.step, &call);
      for (const Wait& wait : instr.waits) {
        if (wait.slot != -1) check_slot(wait.slot, "wait's");
        need_signals(wait.signal_base, wait.per_index, call, iterations);
      }
      for (const Notify& notify : instr.notifies) {
        if (notify.slot != -1) check_slot(notify.slot, "notify's");
        need_signals(notify.signal_base, notify.per_index, call, iterations);
      }
    }
  }

  /// Instructions that move tiles must have one operand in the device's own file and rows without gaps. No other
  /// instruction may use a file.
  void check_places(const DeviceClass& of, const Instr& instr, const Call& call) const {
    if (instr.kernel.empty()) return;
    const Moves moves = moves_of(instr.kernel);
    const std::string& label = label_of(instr);
    if (moves != Moves::kNothing) {
      bool fits = instr.operands.size() == 2;
      const Tensor* other = nullptr;
      for (const Operand& operand : instr.operands) {
        const bool has_columns =
            operand.mode == Mode::kCol || operand.mode == Mode::kRowCols || operand.mode == Mode::kPanelCols;
        fits = fits && !operand.null && operand.group < 0 && !has_columns;
        if (!fits) break;
        const Tensor& tensor = of.tensors[call.binding[operand.slot]];
        fits = tensor.cols == tensor.stride &&
               (other == nullptr || (other->cols == tensor.cols && other->dtype == tensor.dtype));
        other = &tensor;
      }
      check<ArgumentError>(fits,
                           "[programs.Program.finish] fetch and store must move whole rows between a tensor in "
                           "memory and one of the same shape in the file; got other operands in '",
                           label, "'; correct the plan");
    }
    for (size_t o = 0; o < instr.operands.size(); ++o) {
      if (instr.operands[o].null) continue;
      const bool is_end = (moves == Moves::kFromFile && o == 1) || (moves == Moves::kToFile && o == 0);
      check<ArgumentError>(
          is_in_file(of, instr.operands[o], call) == is_end,
          "[programs.Program.finish] fetch reads a device's file, store writes it, and no other kernel "
          "touches it; got '",
          instr.kernel, "' on a tensor in ", is_end ? "memory" : "the file", " in '", label, "'; correct the plan");
    }
  }

  /// Whether the tensor, possibly a peer's of any class, is in the file.
  bool is_in_file(const DeviceClass& of, const Operand& operand, const Call& call) const {
    const auto number = static_cast<size_t>(call.binding[operand.slot]);
    if (operand.group < 0) return is_in_file(of.tensors[number]);
    for (int64_t c = 0; c < program_.num_classes(); ++c) {
      const DeviceClass& peer = program_.class_at(c);
      if (number < peer.tensors.size() && peer.tensors[number].offset >= peer.memory_bytes) return true;
    }
    return false;
  }

  /// Signals have the same numbers on every device.
  void need_signals(const Number& base, bool per_index, const Call& call, int64_t iterations) {
    if (iterations == 0) return;
    num_signals_ = std::max(num_signals_, range(base, &call).high + (per_index ? iterations : 1));
  }

  const Program& program_;
  std::vector<ClassFacts> facts_;
  std::vector<Needs> needs_;
  std::vector<int64_t> scratch_;  // values of symbols
  int64_t num_signals_ = 0;
  // Of the current class.
  int64_t class_ = 0;
  int64_t num_call_numbers_ = 0;                 // used by the current instruction
  std::vector<int64_t> call_numbers_;            // used by each template
  std::vector<std::vector<const Instr*>> late_;  // per template: instructions that use numbers of the call
};

}  // namespace

std::vector<Needs> check_program(const Program& program) { return Checks(program).run(); }

}  // namespace tilewise::programs
