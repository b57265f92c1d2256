// Opening and closing a runtime.
//
// Who may call: open and run_workers: any thread; close: a thread that is not inside one of its tasks. Blocks: open of
// a shared file until the workers' process exists; close until every task has ended.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "tasks/engine/engine.h"

namespace tilewise::tasks {

/// Closes a runtime whose owner is destroyed; its first failure is then not reported.
void drop_engine(Engine* engine);
using OpenEngine = std::unique_ptr<Engine, void (*)(Engine*)>;

OpenEngine open_engine(const Options& options);
/// Waits for every task, stops the workers.
void close_engine(Engine& engine);
/// Runs the workers of a shared file. Returns a status when the orchestrator has closed it or died.
int run_workers(const char* path, const std::vector<std::string>& libraries);

}  // namespace tilewise::tasks
