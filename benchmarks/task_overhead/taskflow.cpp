// Taskflow: the graph is built with explicit edges and run by an executor of THREADS threads.
// `submit` times building and running; `replay` runs a graph that was built before. Destroying it is not timed.
// Build: g++ -O2 -std=c++20 -I<taskflow> taskflow.cpp -pthread     Run: ./taskflow THREADS REPETITIONS PATTERN
#include <taskflow/taskflow.hpp>
#include <vector>

#include "edges.hpp"
#include "workload.h"

struct Program {
  tf::Executor& executor;
  std::vector<Edge> edges;
  tf::Taskflow flow;
  std::vector<tf::Task> nodes;
};

static void clear(const Workload* workload, void* context) {
  Program& program = *static_cast<Program*>(context);
  program.flow.clear();
  program.nodes.assign(workload->num_tasks, tf::Task());
}

// One pointer is captured, so that std::function needs no memory of its own.
template <int kCells>
static void add_nodes(const Workload* workload, Program& program) {
  for (int i = 0; i < workload->num_tasks; ++i) {
    const Access* access = &workload->tasks[i];
    program.nodes[i] = program.flow.emplace([access] { run_access(access, kCells); });
  }
}

static void build(const Workload* workload, void* context) {
  Program& program = *static_cast<Program*>(context);
  if (workload->cells_per_task == 0) add_nodes<0>(workload, program);
  if (workload->cells_per_task == 1) add_nodes<1>(workload, program);
  if (workload->cells_per_task == 3) add_nodes<3>(workload, program);
  for (const Edge& edge : program.edges) program.nodes[edge.before].precede(program.nodes[edge.after]);
}

static void replay(const Workload*, void* context) {
  Program& program = *static_cast<Program*>(context);
  program.executor.run(program.flow).wait();
}

static void build_and_run(const Workload* workload, void* context) {
  build(workload, context);
  replay(workload, context);
}

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  tf::Executor executor(arguments.threads);
  Workload workload = make_pattern(arguments.pattern);
  {
    Program program{executor, find_edges(workload), {}, {}};
    measure(&workload, "submit", arguments.repetitions, clear, build_and_run, &program);
    measure(&workload, "replay", arguments.repetitions, nullptr, replay, &program);
  }
  free_workload(&workload);
}
