// Opening and closing a runtime.
//
// Who may call: open and run_workers: any thread; close: a thread that is in none of its tasks. Blocks: open of a
// shared file until the workers' process exists; close until every task has ended.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Closes and deletes a runtime. A failure of its tasks is not reported, because no caller is left to receive it.
void drop_engine(Engine* engine);
using OpenEngine = std::unique_ptr<Engine, void (*)(Engine*)>;

OpenEngine open_engine(const Options& options);
/// Waits for every task, stops the workers.
void close_engine(Engine& engine);
/// The workers' side of a shared file. Returns a status when the orchestrator has closed it or died.
int run_workers(const char* path, const std::vector<std::string>& libraries);

}  // namespace tilewise::tasks
