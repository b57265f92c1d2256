// The edges of a pattern for systems that do not find them in the data: Taskflow and oneTBB.
//
// Read after write, write after read and write after write, each pair once. They are found before the clock starts:
// the peers are not charged for work that a program with another structure might not need.
#ifndef TASK_OVERHEAD_EDGES_HPP
#define TASK_OVERHEAD_EDGES_HPP

#include <algorithm>
#include <vector>

#include "workload.h"

struct Edge {
  int before, after;
};

struct Cell {
  int writer = -1;
  std::vector<int> readers;  // since that write
};

inline void add_predecessors(const Access& access, std::vector<Cell>& state, int task, std::vector<int>& before) {
  for (int read : {access.first, access.second}) {
    if (state[read].writer >= 0) before.push_back(state[read].writer);
    state[read].readers.push_back(task);
  }
}

inline std::vector<Edge> find_edges(const Workload& workload) {
  std::vector<Edge> edges;
  if (workload.cells_per_task == 0) return edges;
  std::vector<Cell> state(workload.num_cells);
  std::vector<int> before;
  for (int task = 0; task < workload.num_tasks; ++task) {
    const Access& access = workload.tasks[task];
    before.clear();
    if (workload.cells_per_task == 3) add_predecessors(access, state, task, before);
    Cell& target = state[access.target];
    before.insert(before.end(), target.readers.begin(), target.readers.end());
    if (target.readers.empty() && target.writer >= 0) before.push_back(target.writer);
    target.writer = task;
    target.readers.clear();
    std::sort(before.begin(), before.end());
    before.erase(std::unique(before.begin(), before.end()), before.end());
    for (int one : before) edges.push_back({one, task});
  }
  return edges;
}

#endif
