// See walker.h.
#include "programs/walker.h"

namespace tilewise::programs {

void Walker::begin(const ExpandContext& context, const comm::SignalBoard& signals, std::vector<Injection> injections) {
  context_ = context;
  program_ = &context.program->device(context.device);
  instr_ = nullptr;
  call_ = 0;
  next_instr_ = 0;
  index_ = 0;
  count_ = 0;
  expected_.resize(context.program->needs(context.device).num_signals);
  for (int64_t s = 0; s < std::ssize(expected_); ++s) expected_[s] = signals[s].value();
  injections_ = std::move(injections);
  label_counts_.assign(injections_.empty() ? 0 : context.program->labels().size(), 0);
}

bool Walker::prepare() {
  while (index_ >= count_) {
    if (call_ >= program_->calls.size()) return false;
    const Template& plan = program_->templates[program_->calls[call_].template_id];
    if (next_instr_ >= plan.instrs.size()) {
      next_instr_ = 0;
      ++call_;
      continue;
    }
    instr_ = &plan.instrs[next_instr_++];
    extent_ = instr_->extent.at(*context_.symbols);
    count_ = instr_->num_iterations(extent_);
    index_ = 0;
  }
  return true;
}

void Walker::fill(Task& task, std::vector<tasks::Access>& accesses) {
  accesses.clear();
  expand(context_, {program_->calls[call_], *instr_, index_, extent_}, task, accesses);
  fill_waits(*instr_, task);
  task.injected = injections_.empty() ? Injected::kNothing : injected(*instr_);
  ++index_;
}

void Walker::fill_waits(const Instr& instr, Task& task) {
  task.waits.resize(instr.waits.size());
  for (size_t w = 0; w < instr.waits.size(); ++w) {
    const Wait& wait = instr.waits[w];
    const int64_t signal = wait.signal_base + (wait.per_index ? index_ : 0);
    expected_[signal] += wait.increment;
    task.waits[w] = {signal, expected_[signal]};
  }
  task.num_asked = 0;
  task.poison = 0;
}

Injected Walker::injected(const Instr& instr) {
  const int64_t ordinal = label_counts_[instr.label]++;
  for (const Injection& fault : injections_) {
    if (fault.label == instr.label && fault.index == ordinal) return fault.kind;
  }
  return Injected::kNothing;
}

}  // namespace tilewise::programs
