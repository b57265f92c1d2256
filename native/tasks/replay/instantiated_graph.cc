// See instantiated_graph.h.
#include "tasks/replay/instantiated_graph.h"

#include <algorithm>
#include <utility>

namespace tilewise::tasks {

namespace {

constexpr uint32_t kFewProducers = 16;

/// The edges (producer, consumer), by consumer, without those that two others imply. Most edges of a recording are
/// implied: a task that overwrites what others have read waits for the readers, and they wait for the writer.
std::vector<std::pair<uint32_t, uint32_t>> needed_edges(const Recording& recording) {
  std::vector<std::pair<uint32_t, uint32_t>> edges;
  std::vector<uint32_t> covered_by(recording.tasks.size(), kNone);
  for (uint32_t t = 0; t < recording.tasks.size(); ++t) {
    const auto for_each_producer = [&](uint32_t task, auto&& visit) {
      const RecordedTask& recorded = recording.tasks[task];
      for (uint32_t p = 0; p < recorded.num_producers; ++p) {
        visit(static_cast<uint32_t>(recording.producers[recorded.first_producer + p] >> kFlagBits));
      }
    };
    for_each_producer(t, [&](uint32_t producer) {
      if (recording.tasks[producer].num_producers > kFewProducers) return;
      for_each_producer(producer, [&](uint32_t earlier) { covered_by[earlier] = t; });
    });
    for_each_producer(t, [&](uint32_t producer) {
      if (covered_by[producer] != t) edges.emplace_back(producer, t);
    });
  }
  return edges;
}

}  // namespace

InstantiatedGraph::InstantiatedGraph(Engine& engine, Recording& its_recording, uint32_t its_first_slot)
    : GraphReplay(its_first_slot, engine.store.header->num_thread_slots),
      recording(its_recording),
      addresses(its_recording.accesses.size()),
      slots_(engine.store.slots) {
  const Store& store = engine.store;
  const uint32_t count = num_tasks();
  std::vector<uint32_t> num_arrivals(count);
  std::vector<uint32_t> begin(count + 1);  // first successor of each task
  const std::vector<std::pair<uint32_t, uint32_t>> edges = needed_edges(recording);
  for (const auto& [producer, consumer] : edges) {
    ++begin[producer + 1];
    ++num_arrivals[consumer];
  }
  for (uint32_t t = 0; t < count; ++t) begin[t + 1] += begin[t];
  successors.resize(edges.size());
  std::vector<uint32_t> next = begin;
  for (const auto& [producer, consumer] : edges) successors[next[producer]++] = first_slot + consumer;
  uint64_t newest = 1;
  for (uint32_t t = 0; t < count; ++t) {
    const RecordedTask& task = recording.tasks[t];
    for (uint32_t a = task.first_param; a < task.first_param + task.num_params; ++a) {
      const Recording::Access& access = recording.accesses[a];
      if (access.meets_entry) entries.push_back({t, access.buffer, access.mode});
    }
    newest = std::max(newest, TaskWord::generation_in(TaskWord::look(store.slots[first_slot + t].word)) | 1);
  }
  generation = newest;
  for (uint32_t t = 0; t < count; ++t) {
    const RecordedTask& task = recording.tasks[t];
    Slot& slot = store.slots[first_slot + t];
    if (task.num_producers == 0) roots.push_back(first_slot + t);
    if (begin[t] == begin[t + 1]) sinks.push_back(first_slot + t);
    slot.begin(task.kernel, task.priority, task.type_class, kIsReplayed);
    slot.num_params = task.num_params;
    slot.num_scalars = task.num_scalars;
    slot.cancelled.store(0, std::memory_order_relaxed);
    slot.state.store(SlotState::kPending, std::memory_order_relaxed);
    num_arrivals[t] = std::max(num_arrivals[t], 1u);
    slot.replayed = {this,
                     engine.kernels.function_at(task.kernel),
                     addresses.data() + task.first_param,
                     recording.scalars.data() + task.first_scalar,
                     successors.data() + begin[t],
                     begin[t + 1] - begin[t],
                     num_arrivals[t],
                     0,
                     0};
    slot.children.store(num_arrivals[t], std::memory_order_relaxed);
    slot.word.store(TaskWord::of_generation(newest + 2), std::memory_order_release);  // as if a replay had just ended
  }
}

}  // namespace tilewise::tasks
