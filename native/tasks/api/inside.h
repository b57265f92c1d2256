// Inspecting a runtime: figures, traces, graphs.
//
// Who may call: any thread; traces are read while nothing runs. Blocks: for the locks of what it counts.
#pragma once
#include "tasks/engine/engine.h"

namespace tilewise::tasks {

void stats(Engine& engine, pto_stats* stats);
/// No task is ready or runs. A thread is busy from taking a task until it has handed on what became ready.
bool is_idle(const Engine& engine);
/// Per thread; 0: off.
void enable_trace(Engine& engine, uint32_t max_records);
/// Copies up to `capacity` records; returns how many there are.
uint64_t trace_tasks(const Engine& engine, pto_trace_task* records, uint64_t capacity);
uint64_t trace_stalls(const Engine& engine, pto_trace_stall* records, uint64_t capacity);
void begin_graph(Engine& engine);
void end_graph(Engine& engine, const char* json_path);

}  // namespace tilewise::tasks
