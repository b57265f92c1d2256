// The tasks of a program as tables, for checkers: made by the instruction issuer that runs it, without running
// anything.
//
// Who may call: any thread, on a finished program. Memory: some hundred bytes per task.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "programs/program.h"

namespace tilewise::programs {

/// Rows of integers; each table says what its columns mean.
template <size_t kColumns>
using Table = std::vector<std::array<int64_t, kColumns>>;

/// The tasks of one list on one device in the order of submission. Rows of the other tables begin with a task's number.
struct TaskTables {
  Table<5> tasks;     // call in the list, template, instruction in it, iteration, label
  Table<3>
      accesses;  // task, handle, use (0 reads, 1 writes, 2 after all earlier uses); from num_handles on: order of posts
  Table<8> views;  // task, operand, owner, begin, end (bytes of its arena), rows, bytes between rows, role
  Table<4> waits;  // task, signal, threshold (with signals starting at 0), poster (-1: any)
  Table<3> posts;  // task, device, signal
};

TaskTables list_tasks(const Program& program, int64_t device, int64_t list, const std::vector<int64_t>& symbols);

}  // namespace tilewise::programs
