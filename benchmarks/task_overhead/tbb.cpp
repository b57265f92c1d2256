// oneTBB: a flow graph of continue_nodes with explicit edges; independent tasks are a task_group, its faster way.
// `submit` times building and running; `replay` runs a graph that was built before. Destroying it is not timed.
// Build: g++ -O2 -std=c++20 tbb.cpp -ltbb     Run: ./tbb THREADS REPETITIONS PATTERN (the main thread is one of them)
#include <tbb/flow_graph.h>
#include <tbb/global_control.h>
#include <tbb/task_group.h>

#include <deque>
#include <memory>
#include <vector>

#include "edges.hpp"
#include "workload.h"

using Node = tbb::flow::continue_node<tbb::flow::continue_msg>;
using Message = tbb::flow::continue_msg;

struct Program {
  std::vector<Edge> edges;
  std::vector<int> roots;
  std::unique_ptr<tbb::flow::graph> graph;
  std::unique_ptr<std::deque<Node>> nodes;
};

static std::vector<int> find_roots(int num_tasks, const std::vector<Edge>& edges) {
  std::vector<char> has_predecessor(num_tasks);
  for (const Edge& edge : edges) has_predecessor[edge.after] = 1;
  std::vector<int> roots;
  for (int i = 0; i < num_tasks; ++i)
    if (!has_predecessor[i]) roots.push_back(i);
  return roots;
}

static void clear(const Workload*, void* context) {
  Program& program = *static_cast<Program*>(context);
  program.nodes = nullptr;
  program.graph = std::make_unique<tbb::flow::graph>();
  program.nodes = std::make_unique<std::deque<Node>>();
}

template <int kCells>
static void add_nodes(const Workload* workload, Program& program) {
  for (int i = 0; i < workload->num_tasks; ++i) {
    const Access* access = &workload->tasks[i];
    program.nodes->emplace_back(*program.graph, [access](const Message&) { run_access(access, kCells); });
  }
}

static void build(const Workload* workload, void* context) {
  Program& program = *static_cast<Program*>(context);
  if (workload->cells_per_task == 0) add_nodes<0>(workload, program);
  if (workload->cells_per_task == 1) add_nodes<1>(workload, program);
  if (workload->cells_per_task == 3) add_nodes<3>(workload, program);
  std::deque<Node>& nodes = *program.nodes;
  for (const Edge& edge : program.edges) tbb::flow::make_edge(nodes[edge.before], nodes[edge.after]);
}

static void replay(const Workload*, void* context) {
  Program& program = *static_cast<Program*>(context);
  for (int root : program.roots) (*program.nodes)[root].try_put(Message());
  program.graph->wait_for_all();
}

static void build_and_run(const Workload* workload, void* context) {
  build(workload, context);
  replay(workload, context);
}

static void run_group(const Workload* workload, void*) {
  tbb::task_group group;
  for (int i = 0; i < workload->num_tasks; ++i) group.run([] { count_task(); });
  group.wait();
}

int main(int argc, char** argv) {
  const Arguments arguments = parse_arguments(argc, argv);
  tbb::global_control control(tbb::global_control::max_allowed_parallelism, arguments.threads);
  Workload workload = make_pattern(arguments.pattern);
  {
    Program program{find_edges(workload), {}, nullptr, nullptr};
    program.roots = find_roots(workload.num_tasks, program.edges);
    if (workload.cells_per_task == 0)
      measure(&workload, "submit", arguments.repetitions, nullptr, run_group, nullptr);
    else
      measure(&workload, "submit", arguments.repetitions, clear, build_and_run, &program);
    clear(&workload, &program);
    build(&workload, &program);
    measure(&workload, "replay", arguments.repetitions, nullptr, replay, &program);
  }
  free_workload(&workload);
}
