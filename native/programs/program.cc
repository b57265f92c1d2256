// See program.h. The checks of finish() are in check.cc and deadlock.cc, bound() is in bind.cc.
#include "programs/program.h"

#include <algorithm>
#include <set>

#include "programs/bound.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kMostDevices = 1024;

// Sharing bytes is mutual: whichever tensor is written must wait for the other, so each must list the other.
void mirror_aliases(std::vector<Tensor>& tensors) {
  std::vector<std::set<int64_t>> aliases(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    for (int64_t other : tensors[t].aliases) {
      if (other == static_cast<int64_t>(t)) continue;
      aliases[t].insert(other);
      aliases[other].insert(static_cast<int64_t>(t));
    }
  }
  for (size_t t = 0; t < tensors.size(); ++t) tensors[t].aliases.assign(aliases[t].begin(), aliases[t].end());
}

/// Whether an instruction has as many operands and attributes as its kernel declares. The lengths of lists must be
/// constant.
bool fits(const kernels::Entry& kernel, const Instr& instr) {
  std::vector<int64_t> ints;
  ints.reserve(instr.ints.size());
  for (const Number& n : instr.ints) ints.push_back(n.is_constant() ? n.constant : -1);
  return kernel.fits({nullptr,
                      std::ssize(instr.operands),
                      ints.data(),
                      std::ssize(ints),
                      nullptr,
                      std::ssize(instr.floats),
                      0,
                      {nullptr, 0}});
}

}  // namespace

Program::Program() = default;
Program::~Program() = default;

void Program::check_open(const char* where) const {
  check<ArgumentError>(!finished_, "[programs.Program.", where,
                       "] a finished program is frozen; got another call; build a new program");
}

DeviceClass& Program::open(int64_t class_id, const char* where) {
  check_open(where);
  check<ArgumentError>(class_id >= 0 && class_id < num_classes(), "[programs.Program.", where,
                       "] class must be one of the program's ", num_classes(), "; got ", class_id, "; add_class first");
  return classes_[class_id];
}

int64_t Program::add_class(int64_t memory_bytes) {
  check_open("add_class");
  classes_.emplace_back().memory_bytes = memory_bytes;
  return num_classes() - 1;
}

int64_t Program::add_tensor(int64_t class_id, Tensor tensor) {
  DeviceClass& of = open(class_id, "add_tensor");
  of.tensors.push_back(std::move(tensor));
  return std::ssize(of.tensors) - 1;
}

int64_t Program::add_template(int64_t class_id, std::string name) {
  DeviceClass& of = open(class_id, "add_template");
  of.templates.push_back({std::move(name), {}, 0});
  return std::ssize(of.templates) - 1;
}

void Program::add_instr(int64_t class_id, int64_t template_id, Instr instr, const std::string& label) {
  DeviceClass& of = open(class_id, "add_instr");
  check<ArgumentError>(template_id >= 0 && template_id < std::ssize(of.templates),
                       "[programs.Program.add_instr] template must exist; got ", template_id, " of ",
                       of.templates.size(), "; add_template first");
  const auto [entry, is_new] = label_ids_.try_emplace(label, std::ssize(labels_));
  if (is_new) labels_.push_back(label);
  instr.label = entry->second;
  of.templates[template_id].instrs.push_back(std::move(instr));
}

void Program::add_call(int64_t class_id, Call call, const std::string& name) {
  DeviceClass& of = open(class_id, "add_call");
  check<ArgumentError>(call.template_id >= 0 && call.template_id < std::ssize(of.templates),
                       "[programs.Program.add_call] template must exist; got ", call.template_id, " of ",
                       of.templates.size(), "; add_template first");
  int64_t list = find_list(name);
  if (list < 0) {
    list = num_lists();
    names_.push_back(name);
  }
  if (std::ssize(of.lists) <= list) of.lists.resize(list + 1);
  of.lists[list].calls.push_back(std::move(call));
}

int64_t Program::add_device(DeviceEntry device) {
  open(device.class_id, "add_device");
  check<ArgumentError>(num_devices() < kMostDevices, "[programs.Program.add_device] a program has at most ",
                       kMostDevices, " devices; got one more; use a smaller mesh");
  devices_.push_back(std::move(device));
  return num_devices() - 1;
}

void Program::add_kernel(const std::string& name, tilewise_tile_kernel kernel) {
  check_open("add_kernel");
  // The runtime itself does what kernels of these names do, or parts of it.
  const bool is_reserved = name.starts_with("copy_pairs") || moves_of(name) != Moves::kNothing;
  check<ArgumentError>(!name.empty() && !is_reserved && kernel != nullptr,
                       "[programs.Program.add_kernel] a kernel must have an address, and a name that does not begin "
                       "with copy_pairs, fetch_ or store_; got address ",
                       reinterpret_cast<uintptr_t>(kernel), " for '", name, "'; choose another name");
  check<ArgumentError>(user_kernels_.emplace(name, kernel).second,
                       "[programs.Program.add_kernel] a kernel's name must be new; got '", name,
                       "' again; choose another name");
}

Moves moves_of(std::string_view kernel) {
  if (kernel.starts_with("fetch_")) return Moves::kFromFile;
  return kernel.starts_with("store_") ? Moves::kToFile : Moves::kNothing;
}

void Program::finish(std::vector<int64_t> symbols_max, const KernelResolver& resolve) {
  check_open("finish");
  symbols_max_ = std::move(symbols_max);
  needs_ = check_program(*this);
  for (const auto& [name, kernel] : user_kernels_) {
    check<ArgumentError>(resolve(name) == nullptr,
                         "[programs.Program.finish] a kernel of the user must not have a name of the kernel table; "
                         "got '",
                         name, "'; choose another name");
  }
  for (DeviceClass& of : classes_) {
    for (Template& plan : of.templates) {
      for (Instr& instr : plan.instrs) find_kernel(instr, resolve);
    }
    place_late_ints(of);
    mirror_aliases(of.tensors);
  }
  bound_.clear();
  bound_.resize(devices_.size());
  check_signals(*this);
  finished_ = true;
}

void Program::find_kernel(Instr& instr, const KernelResolver& resolve) const {
  if (instr.kernel.empty()) return;
  if (const auto user = user_kernels_.find(instr.kernel); user != user_kernels_.end()) {
    instr.user_fn = user->second;
    return;
  }
  const kernels::Entry* const kernel = resolve(instr.kernel);
  check<ArgumentError>(kernel != nullptr, "[programs.Program.finish] every kernel must exist natively; got '",
                       instr.kernel, "' in '", labels_[instr.label],
                       "'; use a name of the kernel table, or add_kernel first");
  check<ArgumentError>(fits(*kernel, instr),
                       "[programs.Program.finish] an instruction must have the operands and attributes that its "
                       "kernel declares; got ",
                       instr.operands.size(), " operands, ", instr.ints.size(), " integers and ", instr.floats.size(),
                       " floats for '", instr.kernel, "' in '", labels_[instr.label], "'; correct the plan");
  instr.fn = kernel->fn;
}

/// Gives every call a place for its late ints, which the instruction issuer writes once per run.
void Program::place_late_ints(DeviceClass& of) {
  for (Template& plan : of.templates) {
    plan.num_late_ints = 0;
    for (Instr& instr : plan.instrs) {
      const bool is_late = std::any_of(instr.ints.begin(), instr.ints.end(),
                                       [](const Number& n) { return !n.is_constant() && n.source != Source::kDevice; });
      instr.first_int = is_late ? plan.num_late_ints : -1;
      if (is_late) plan.num_late_ints += std::ssize(instr.ints);
    }
  }
  for (CallList& list : of.lists) {
    list.num_late_ints = 0;
    for (Call& call : list.calls) {
      call.first_int = list.num_late_ints;
      list.num_late_ints += of.templates[call.template_id].num_late_ints;
    }
  }
}

int64_t Program::find_list(const std::string& name) const {
  const auto entry = std::find(names_.begin(), names_.end(), name);
  return entry == names_.end() ? -1 : entry - names_.begin();
}

const CallList& Program::list_of(int64_t device, int64_t list) const {
  static const CallList kEmpty;
  const DeviceClass& of = class_of(device);
  return list < std::ssize(of.lists) ? of.lists[list] : kEmpty;
}

int64_t Program::num_tasks(int64_t device, int64_t list, const std::vector<int64_t>& symbols) const {
  const DeviceClass& of = class_of(device);
  int64_t total = 0;
  for (const Call& call : list_of(device, list).calls) {
    const Values values{symbols.data(), nullptr, call.numbers.data()};
    for (const Instr& instr : of.templates[call.template_id].instrs) {
      total += num_iterations(instr.extent.at(values), instr.step_at(values));
    }
  }
  return total;
}

std::vector<int64_t> Program::posters(int64_t device, int64_t signal) const {
  const auto posts = [&](int64_t from) {
    const Bound& templates = bound(from);
    for (const CallList& list : class_of(from).lists) {
      for (const Call& call : list.calls) {
        const Values values{symbols_max_.data(), nullptr, call.numbers.data()};
        for (const BoundInstr& instr : templates[call.template_id].instrs) {
          for (const BoundNotify& n : instr.notifies) {
            if (n.device != device) continue;
            const int64_t first = n.signal.at(values, 0);
            const int64_t count =
                n.signal.per_index ? num_iterations(instr.source->extent.at(values), instr.source->step_at(values)) : 1;
            if (signal >= first && signal < first + count) return true;
          }
        }
      }
    }
    return false;
  };
  std::vector<int64_t> devices;
  for (int64_t d = 0; d < num_devices(); ++d) {
    if (posts(d)) devices.push_back(d);
  }
  return devices;
}

}  // namespace tilewise::programs
