// See instruction_issuer.h.
#include "programs/run/instruction_issuer.h"

namespace tilewise::programs {

void InstructionIssuer::begin(const ExpandContext& context, int64_t list, const comm::SignalBoard& signals,
                              std::vector<Injection> injections) {
  context_ = context;
  templates_ = &context.program->bound(context.device);
  list_ = &context.program->list_of(context.device, list);
  instr_ = nullptr;
  call_ = 0;
  next_instr_ = 0;
  index_ = 0;
  count_ = 0;
  late_ints_.resize(list_->num_late_ints);
  expected_.resize(context.program->needs(context.device).num_signals);
  for (int64_t s = 0; s < std::ssize(expected_); ++s) expected_[s] = signals[s].value();
  injections_ = std::move(injections);
  label_counts_.assign(injections_.empty() ? 0 : context.program->labels().size(), 0);
}

bool InstructionIssuer::prepare() {
  while (index_ >= count_) {
    if (call_ >= list_->calls.size()) return false;
    const Call& call = list_->calls[call_];
    const BoundTemplate& plan = (*templates_)[call.template_id];
    if (next_instr_ >= plan.instrs.size()) {
      next_instr_ = 0;
      ++call_;
      continue;
    }
    instr_ = &plan.instrs[next_instr_++];
    prepare_instr(call);
  }
  return true;
}

void InstructionIssuer::prepare_instr(const Call& call) {
  const Values values{context_.symbols->data(), nullptr, call.numbers.data()};
  const Instr& source = *instr_->source;
  extent_ = source.extent.at(values);
  step_ = source.step_at(values);
  count_ = num_iterations(extent_, step_);
  index_ = 0;
  choose_hints(call);
  ints_ = instr_->ints.data();
  if (source.first_int < 0) return;
  int64_t* late = late_ints_.data() + call.first_int + source.first_int;
  ints_ = late;
  for (const Number& n : instr_->late_ints) *late++ = n.at(values);
}

/// An instruction's hints are for one op, so they stand before those of its layer.
void InstructionIssuer::choose_hints(const Call& call) {
  const TaskHints& own = instr_->source->hints;
  workers_ = !own.workers.empty() ? &own : !call.hints.workers.empty() ? &call.hints : nullptr;
  priority_ = own.priority.value_or(call.hints.priority.value_or(instr_->priority));
}

void InstructionIssuer::fill(Task& task, std::vector<tasks::Access>& accesses) {
  accesses.clear();
  const int64_t iteration = iteration_at(index_, instr_->first, count_);
  expand(context_, {list_->calls[call_], *instr_, ints_, iteration, extent_, step_}, task, accesses);
  fill_waits(task);
  task.priority = priority_;
  task.target = {};
  if (workers_ != nullptr) [[unlikely]] {
    const int64_t place = iteration * std::ssize(workers_->workers) / count_;
    task.target = {static_cast<uint32_t>(workers_->workers[place] + 1), workers_->is_preference};
  }
  task.injected = injections_.empty() ? Injected::kNothing : injected(*instr_);
  ++index_;
}

void InstructionIssuer::fill_waits(Task& task) {
  const Values values{context_.symbols->data(), nullptr, task.call->numbers.data()};
  const std::vector<BoundWait>& waits = instr_->waits;
  task.waits.resize(waits.size());
  for (size_t w = 0; w < waits.size(); ++w) {
    const int64_t signal = waits[w].signal.at(values, task.index);
    expected_[signal] += waits[w].increment.at(values);
    task.waits[w] = {signal, expected_[signal]};
  }
  task.num_waits_begun = 0;
  task.is_moved = task.skips_kernel = task.has_sent_tiles = false;
  task.poison = 0;
}

Injected InstructionIssuer::injected(const BoundInstr& instr) {
  const int64_t ordinal = label_counts_[instr.label]++;
  for (const Injection& fault : injections_) {
    if (fault.label == instr.label && fault.index == ordinal) return fault.kind;
  }
  return Injected::kNothing;
}

}  // namespace tilewise::programs
