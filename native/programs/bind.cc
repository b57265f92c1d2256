// See bound.h.
#include "programs/bound.h"

namespace tilewise::programs {

namespace {

/// Binds instructions to one device.
class Binding {
 public:
  Binding(const DeviceEntry& device, int64_t number) : device_(device), number_(number) {}

  BoundInstr instr(const Instr& source) const {
    const Moves moves = moves_of(source.kernel);
    BoundInstr bound{.source = &source,
                     .fn = moves == Moves::kNothing ? source.fn : nullptr,
                     .user_fn = source.user_fn,
                     .moves = moves,
                     .is_copy = source.kernel.starts_with("copy_pairs"),
                     .label = source.label,
                     .priority = source.priority,
                     .first = source.first.on(device_.numbers).constant,
                     .operands = {},
                     .ints = {},
                     .late_ints = {},
                     .waits = {},
                     .notifies = {}};
    bound.operands.reserve(source.operands.size());
    for (const Operand& o : source.operands) bound.operands.push_back(operand(o));
    bound.ints.reserve(source.ints.size());
    for (const Number& n : source.ints) bound.ints.push_back(n.on(device_.numbers).constant);
    if (source.first_int >= 0) {
      for (const Number& n : source.ints) bound.late_ints.push_back(n.on(device_.numbers));
    }
    bound.waits.reserve(source.waits.size());
    for (const Wait& w : source.waits) {
      const int64_t poster = w.group < 0 ? -1 : peer(w.group, w.member);
      if (poster == number_) continue;
      bound.waits.push_back({signal(w.signal_base, w.per_index), w.increment, poster, w.slot, w.use});
    }
    bound.notifies.reserve(source.notifies.size());
    for (const Notify& n : source.notifies) {
      const int64_t target = peer(n.group, n.member);
      if (target == number_) continue;
      bound.notifies.push_back({target, signal(n.signal_base, n.per_index), n.slot, n.use});
    }
    return bound;
  }

 private:
  int64_t peer(int64_t group, const Number& member) const {
    return device_.groups[group][member.on(device_.numbers).constant];
  }
  BoundSignal signal(const Number& base, bool per_index) const { return {base.on(device_.numbers), per_index}; }

  BoundOperand operand(const Operand& o) const {
    if (o.null) return {o.slot, number_, o.mode, kNoAccess, 1, 0, 1, true, kNoAccess};
    const int64_t owner = o.group < 0 ? number_ : peer(o.group, o.member);
    const bool is_own = owner == number_;
    const int64_t role = o.role != kNoAccess ? o.role : (o.access != kNoAccess ? o.access : int64_t{kIn});
    const auto at = [&](const Number& n) { return n.on(device_.numbers); };
    return {o.slot, owner, o.mode,      is_own ? o.access : int64_t{kNoAccess}, at(o.div), at(o.part), at(o.parts),
            false,  role,  at(o.offset)};
  }

  const DeviceEntry& device_;
  int64_t number_;
};

}  // namespace

Bound Program::bind(int64_t device) const {
  const Binding binding(devices_[device], device);
  const DeviceClass& of = class_of(device);
  Bound templates(of.templates.size());
  for (size_t t = 0; t < templates.size(); ++t) {
    templates[t].instrs.reserve(of.templates[t].instrs.size());
    for (const Instr& instr : of.templates[t].instrs) templates[t].instrs.push_back(binding.instr(instr));
  }
  return templates;
}

const Bound& Program::bound(int64_t device) const {
  const std::scoped_lock guard(binding_);
  std::unique_ptr<Bound>& templates = bound_[device];
  if (templates == nullptr) templates = std::make_unique<Bound>(bind(device));
  return *templates;
}

}  // namespace tilewise::programs
