// See bound.h.
#include "programs/bound.h"

namespace tilewise::programs {

namespace {

/// Binds instructions to one device.
class Binding {
 public:
  Binding(const DeviceEntry& device, int64_t number) : device_(device), number_(number) {}

  BoundInstr instr(const Instr& given) const {
    const Moves moves = moves_of(given.kernel);
    BoundInstr made{.source = &given,
                    .fn = moves == Moves::kNothing ? given.fn : nullptr,
                    .moves = moves,
                    .is_copy = given.kernel.starts_with("copy_pairs"),
                    .label = given.label,
                    .priority = given.priority,
                    .operands = {},
                    .ints = {},
                    .late_ints = {},
                    .waits = {},
                    .notifies = {}};
    made.operands.reserve(given.operands.size());
    for (const Operand& o : given.operands) made.operands.push_back(operand(o));
    made.ints.reserve(given.ints.size());
    for (const Number& n : given.ints) made.ints.push_back(n.on(device_.numbers).constant);
    if (given.first_int >= 0) {
      for (const Number& n : given.ints) made.late_ints.push_back(n.on(device_.numbers));
    }
    made.waits.reserve(given.waits.size());
    for (const Wait& w : given.waits) {
      const int64_t poster = w.group < 0 ? -1 : peer(w.group, w.member);
      if (poster == number_) continue;
      made.waits.push_back({signal(w.signal_base, w.per_index), w.increment, poster, w.slot, w.use});
    }
    made.notifies.reserve(given.notifies.size());
    for (const Notify& n : given.notifies) {
      const int64_t target = peer(n.group, n.member);
      if (target == number_) continue;
      made.notifies.push_back({target, signal(n.signal_base, n.per_index), n.slot, n.use});
    }
    return made;
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
    const int64_t role = o.role != kNoAccess ? o.role : (o.access != kNoAccess && is_own ? o.access : int64_t{kIn});
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
  Bound made(of.templates.size());
  for (size_t t = 0; t < made.size(); ++t) {
    made[t].instrs.reserve(of.templates[t].instrs.size());
    for (const Instr& instr : of.templates[t].instrs) made[t].instrs.push_back(binding.instr(instr));
  }
  return made;
}

const Bound& Program::bound(int64_t device) const {
  const std::scoped_lock guard(binding_);
  std::unique_ptr<Bound>& made = bound_[device];
  if (made == nullptr) made = std::make_unique<Bound>(bind(device));
  return *made;
}

}  // namespace tilewise::programs
