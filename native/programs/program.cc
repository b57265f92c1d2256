// See program.h. Every check that needs no thread stands here or in deadlock.cc.
#include "programs/program.h"

#include <algorithm>
#include <set>

namespace tilewise::programs {

Program::Program(int64_t num_devices) {
  check<ArgumentError>(num_devices >= 1 && num_devices <= 1024,
                       "[runtime.Program] a program needs 1 to 1024 devices; got ", num_devices,
                       "; pass the mesh's size");
  devices_.resize(num_devices);
  needs_.resize(num_devices);
}

DeviceProgram& Program::open(int64_t device, const char* where) {
  check<ArgumentError>(!finished_, "[runtime.Program.", where,
                       "] a finished program is frozen; got a further call; build a new program");
  check<ArgumentError>(device >= 0 && device < num_devices(), "[runtime.Program.", where,
                       "] device must be one of the program's ", num_devices(), "; got ", device,
                       "; count devices from 0");
  return devices_[device];
}

int64_t Program::add_tensor(int64_t device, Tensor tensor) {
  DeviceProgram& program = open(device, "add_tensor");
  program.tensors.push_back(std::move(tensor));
  return static_cast<int64_t>(program.tensors.size()) - 1;
}

int64_t Program::add_template(int64_t device, std::string name) {
  DeviceProgram& program = open(device, "add_template");
  program.templates.push_back({std::move(name), {}});
  return static_cast<int64_t>(program.templates.size()) - 1;
}

void Program::add_instr(int64_t device, int64_t template_id, Instr instr, const std::string& label) {
  DeviceProgram& program = open(device, "add_instr");
  const auto num_templates = static_cast<int64_t>(program.templates.size());
  check<ArgumentError>(template_id >= 0 && template_id < num_templates,
                       "[runtime.Program.add_instr] template must exist; got ", template_id, " of ", num_templates,
                       "; add_template first");
  const auto found = std::find(labels_.begin(), labels_.end(), label);
  instr.label = found - labels_.begin();
  if (found == labels_.end()) labels_.push_back(label);
  program.templates[template_id].instrs.push_back(std::move(instr));
}

void Program::add_call(int64_t device, Call call) {
  DeviceProgram& program = open(device, "add_call");
  const auto num_templates = static_cast<int64_t>(program.templates.size());
  check<ArgumentError>(call.template_id >= 0 && call.template_id < num_templates,
                       "[runtime.Program.add_call] template must exist; got ", call.template_id, " of ", num_templates,
                       "; add_template first");
  program.calls.push_back(std::move(call));
}

void Program::finish(std::vector<int64_t> symbols_max, const KernelResolver& resolve) {
  open(0, "finish");
  symbols_max_ = std::move(symbols_max);
  needs_.assign(devices_.size(), Needs{});
  for (int64_t d = 0; d < num_devices(); ++d) {
    for (size_t t = 0; t < devices_[d].tensors.size(); ++t)
      check_tensor(d, static_cast<int64_t>(t), devices_[d].tensors[t]);
    for (const Tensor& tensor : devices_[d].tensors) {
      const int64_t rows = tensor.rows.at(symbols_max_);
      Needs& needs = needs_[d];
      needs.num_handles = std::max(needs.num_handles, tensor.first_handle + tensor.num_tiles(rows));
      if (rows == 0) continue;
      const int64_t elements = (rows - 1) * tensor.stride + tensor.cols;
      needs.arena_bytes = std::max(needs.arena_bytes, tensor.offset + elements * size_of(tensor.dtype));
    }
  }
  for (int64_t d = 0; d < num_devices(); ++d) {
    for (Template& plan : devices_[d].templates) {
      for (Instr& instr : plan.instrs) {
        check_instr(d, instr);
        instr.fn = instr.kernel.empty() ? nullptr : resolve(instr.kernel);
        check<ArgumentError>(instr.kernel.empty() || instr.fn != nullptr,
                             "[runtime.Program.finish] every kernel must exist natively; got '", instr.kernel, "' in '",
                             labels_[instr.label], "'; use a name of the kernel table");
      }
    }
    for (const Call& call : devices_[d].calls) check_call(d, call);
  }
  for (DeviceProgram& program : devices_) mirror_aliases(program);
  check_no_deadlock(*this);
  finished_ = true;
}

namespace {

void check_extent(const Extent& extent, const std::vector<int64_t>& symbols_max, const std::string& what) {
  const auto num_symbols = static_cast<int64_t>(symbols_max.size());
  check<ArgumentError>(extent.symbol >= -1 && extent.symbol < num_symbols,
                       "[runtime.Program.finish] a symbol must be -1 or one of the ", num_symbols, " given; got ",
                       extent.symbol, " in ", what, "; pass an upper bound for it to finish()");
  check<ArgumentError>(extent.constant >= 0 && extent.multiple >= 0,
                       "[runtime.Program.finish] an extent must not be negative; got ", extent.constant, " + ",
                       extent.multiple, " * symbol in ", what, "; correct the plan");
}

}  // namespace

void Program::check_tensor(int64_t device, int64_t id, const Tensor& tensor) const {
  std::ostringstream name;
  name << "tensor " << id << " of device " << device;
  check_extent(tensor.rows, symbols_max_, name.str());
  check<ArgumentError>(tensor.offset >= 0 && tensor.cols >= 0 && tensor.tile_rows >= 1 && tensor.first_handle >= 0,
                       "[runtime.Program.finish] offset, cols and first_handle must be >= 0 and tile_rows >= 1; got ",
                       tensor.offset, ", ", tensor.cols, ", ", tensor.first_handle, ", ", tensor.tile_rows, " in ",
                       name.str(), "; correct the plan");
  check<ArgumentError>(tensor.stride >= tensor.cols && size_of(tensor.dtype) > 0,
                       "[runtime.Program.finish] stride must be >= cols and the dtype known; got stride ",
                       tensor.stride, ", cols ", tensor.cols, ", dtype ", static_cast<int>(tensor.dtype), " in ",
                       name.str(), "; correct the plan");
  const auto num_tensors = static_cast<int64_t>(devices_[device].tensors.size());
  for (int64_t alias : tensor.aliases) {
    check<ArgumentError>(alias >= 0 && alias < num_tensors, "[runtime.Program.finish] an alias must be a tensor of ",
                         "the same device (0 to ", num_tensors - 1, "); got ", alias, " in ", name.str(),
                         "; correct the plan");
  }
}

void Program::check_instr(int64_t device, const Instr& instr) const {
  const std::string& label = labels_[instr.label];
  check_extent(instr.extent, symbols_max_, "'" + label + "'");
  for (const Operand& operand : instr.operands) {
    const auto mode = static_cast<int64_t>(operand.mode);
    check<ArgumentError>(mode >= 0 && mode <= 4, "[runtime.Program.finish] mode must be 0 to 4; got ", mode, " in '",
                         label, "'; see runtime.Mode");
    check<ArgumentError>(operand.access >= kNoAccess && operand.access <= kInOut,
                         "[runtime.Program.finish] access must be 0 to 3; got ", operand.access, " in '", label,
                         "'; see runtime.Access");
    check<ArgumentError>(operand.peer >= -1 && operand.peer < num_devices(),
                         "[runtime.Program.finish] peer must be -1 or a device; got ", operand.peer, " in '", label,
                         "'; the program has ", num_devices(), " devices");
    check<ArgumentError>(operand.peer < 0 || operand.peer == device || operand.access == kNoAccess,
                         "[runtime.Program.finish] a peer's tile is ordered by signals, not by handles; got access ",
                         operand.access, " on device ", operand.peer, " in '", label, "'; pass access 0");
    const bool is_share = operand.mode != Mode::kRowCols;  // otherwise part and parts are columns
    check<ArgumentError>(
        operand.div >= 1 && operand.parts >= 1 && operand.part >= 0 && (!is_share || operand.part < operand.parts),
        "[runtime.Program.finish] div and parts must be >= 1 and 0 <= part < parts; got div ", operand.div, ", part ",
        operand.part, " of ", operand.parts, " in '", label, "'; correct the plan");
  }
  for (const Wait& wait : instr.waits) {
    check<ArgumentError>(wait.signal_base >= 0 && wait.increment >= 0,
                         "[runtime.Program.finish] a wait's signal and increment must be >= 0; got ", wait.signal_base,
                         ", ", wait.increment, " in '", label, "'; correct the plan");
  }
  for (const Notify& notify : instr.notifies) {
    check<ArgumentError>(notify.signal_base >= 0 && notify.device >= 0 && notify.device < num_devices(),
                         "[runtime.Program.finish] a notify needs a signal >= 0 of an existing device; got signal ",
                         notify.signal_base, " of device ", notify.device, " in '", label, "'; correct the plan");
  }
}

void Program::check_call(int64_t device, const Call& call) {
  const Template& plan = devices_[device].templates[call.template_id];
  for (const Instr& instr : plan.instrs) {
    const std::string& label = labels_[instr.label];
    for (const Operand& operand : instr.operands) {
      if (operand.null) continue;
      const auto num_slots = static_cast<int64_t>(call.binding.size());
      check<ArgumentError>(operand.slot >= 0 && operand.slot < num_slots,
                           "[runtime.Program.finish] every operand's slot must be bound; got slot ", operand.slot,
                           " of ", num_slots, " in '", label, "' of template '", plan.name, "'; bind it in add_call");
      const int64_t owner = operand.peer < 0 ? device : operand.peer;
      const auto num_tensors = static_cast<int64_t>(devices_[owner].tensors.size());
      const int64_t tensor = call.binding[operand.slot];
      check<ArgumentError>(tensor >= 0 && tensor < num_tensors,
                           "[runtime.Program.finish] a bound tensor must exist on its device; got tensor ", tensor,
                           " of ", num_tensors, " on device ", owner, " in '", label, "'; add_tensor on every device");
    }
    const int64_t iterations = instr.num_iterations(instr.extent.at(symbols_max_));
    for (const Wait& wait : instr.waits) need_signals(device, wait.signal_base, wait.per_index, iterations);
    for (const Notify& n : instr.notifies) need_signals(n.device, n.signal_base, n.per_index, iterations);
  }
}

void Program::need_signals(int64_t device, int64_t base, bool per_index, int64_t iterations) {
  if (iterations == 0) return;
  int64_t& needed = needs_[device].num_signals;
  needed = std::max(needed, base + (per_index ? iterations : 1));
}

// Sharing bytes is mutual: the tensor written first must wait for the other, so each side must know the other.
void Program::mirror_aliases(DeviceProgram& program) {
  std::vector<std::set<int64_t>> aliases(program.tensors.size());
  for (size_t t = 0; t < program.tensors.size(); ++t) {
    for (int64_t other : program.tensors[t].aliases) {
      if (other == static_cast<int64_t>(t)) continue;
      aliases[t].insert(other);
      aliases[other].insert(static_cast<int64_t>(t));
    }
  }
  for (size_t t = 0; t < program.tensors.size(); ++t) {
    program.tensors[t].aliases.assign(aliases[t].begin(), aliases[t].end());
  }
}

int64_t Program::num_tasks(int64_t device, const std::vector<int64_t>& symbols) const {
  const DeviceProgram& program = devices_[device];
  int64_t total = 0;
  for (const Call& call : program.calls) {
    for (const Instr& instr : program.templates[call.template_id].instrs) {
      total += instr.num_iterations(instr.extent.at(symbols));
    }
  }
  return total;
}

std::vector<int64_t> Program::raisers(int64_t device, int64_t signal) const {
  std::vector<int64_t> found;
  for (int64_t d = 0; d < num_devices(); ++d) {
    bool raises = false;
    for (const Template& plan : devices_[d].templates) {
      for (const Instr& instr : plan.instrs) {
        const int64_t count = instr.num_iterations(instr.extent.at(symbols_max_));
        for (const Notify& n : instr.notifies) {
          const int64_t past = n.signal_base + (n.per_index ? count : 1);
          raises |= n.device == device && signal >= n.signal_base && signal < past;
        }
      }
    }
    if (raises) found.push_back(d);
  }
  return found;
}

}  // namespace tilewise::programs
