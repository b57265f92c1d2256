// Inspecting a runtime: figures, traces, graphs.
//
// Who may call: any thread; traces are read while nothing runs. Blocks: for the locks of the counted data.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

void stats(Engine& engine, pto_stats* stats);
/// Whether no task is ready or running. A thread is busy from taking a task until it has queued the tasks that became
/// ready.
bool is_idle(const Engine& engine);
/// max_records: per thread; 0: off.
void enable_trace(Engine& engine, uint32_t max_records);
/// Copies up to `capacity` records; returns the number of records.
uint64_t trace_tasks(const Engine& engine, pto_trace_task* records, uint64_t capacity);
uint64_t trace_stalls(const Engine& engine, pto_trace_stall* records, uint64_t capacity);
void begin_graph(Engine& engine);
void end_graph(Engine& engine, const char* json_path);

}  // namespace tilewise::tasks
