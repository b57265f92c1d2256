// See inspect.h.
#include "programs/run/inspect.h"

#include "programs/run/instruction_issuer.h"

namespace tilewise::programs {

namespace {

/// The base address of arenas that are never accessed.
std::byte* origin() { return reinterpret_cast<std::byte*>(uintptr_t{1} << 20); }

void add_views(const Program& program, Task& task, int64_t number, Table<8>& views) {
  for (int64_t o = 0; o < task.num_views(); ++o) {
    const BoundOperand& operand = task.instr->operands[o];
    const kernels::TileView& view = task.views()[o];
    if (operand.null || view.rows <= 0 || view.cols <= 0) continue;
    const Tensor& tensor = program.class_of(operand.owner).tensors[task.call->binding[operand.slot]];
    const int64_t deep = operand.mode == Mode::kPanelCols ? kPanelRows : 1;  // rows that are interleaved
    const int64_t rows = (view.rows + deep - 1) / deep;
    const int64_t begin = static_cast<std::byte*>(view.data) - origin();
    const int64_t stride = deep * view.stride * size_of(tensor.dtype);
    const int64_t end = begin + (rows - 1) * stride + deep * view.cols * size_of(tensor.dtype);
    views.push_back({number, o, operand.owner, begin, end, rows, stride, operand.role});
  }
}

}  // namespace

TaskTables list_tasks(const Program& program, int64_t device, int64_t list, const std::vector<int64_t>& symbols) {
  const std::vector<std::byte*> arenas(program.num_devices(), origin());
  const Needs& needs = program.needs(device);
  const comm::SignalBoard signals(needs.num_signals);
  const std::vector<Call>& calls = program.list_of(device, list).calls;
  const Bound& templates = program.bound(device);
  InstructionIssuer issuer;
  issuer.begin({&program, device, &symbols, &arenas, needs.num_handles}, list, signals, {});
  TaskTables tables;
  Task task;
  std::vector<tasks::Access> accesses;
  while (issuer.prepare()) {
    issuer.fill(task, accesses);
    const int64_t number = std::ssize(tables.tasks);
    const int64_t template_id = task.call->template_id;
    tables.tasks.push_back({task.call - calls.data(), template_id, task.instr - templates[template_id].instrs.data(),
                            task.index, task.instr->label});
    for (const tasks::Access& access : accesses) {
      tables.accesses.push_back({number, access.object, static_cast<int64_t>(access.use)});
    }
    add_views(program, task, number, tables.views);
    for (size_t w = 0; w < task.waits.size(); ++w) {
      const auto threshold = static_cast<int64_t>(task.waits[w].threshold);
      tables.waits.push_back({number, task.waits[w].signal, threshold, task.instr->waits[w].poster});
    }
    const Values values{symbols.data(), nullptr, task.call->numbers.data()};
    for (const BoundNotify& notify : task.instr->notifies) {
      tables.posts.push_back({number, notify.device, notify.signal.at(values, task.index)});
    }
  }
  return tables;
}

}  // namespace tilewise::programs
