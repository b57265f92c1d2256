// See fetch.h.
#include "programs/remote/fetch.h"

#include <utility>
#include <vector>

namespace tilewise::programs {

namespace {

/// Whether a task only copies the fetched tiles to contiguous memory. Then `rows` and `destinations` say what to fetch
/// directly, and the kernel need not run.
bool can_fetch_in_place(Task& task, std::vector<RemoteRows>& rows, std::vector<std::byte*>& destinations) {
  if (!task.instr->is_copy || task.injected != Injected::kNothing || 2 * std::ssize(task.remote) != task.num_views())
    return false;
  for (size_t i = 0; i < task.remote.size(); ++i) {
    const int64_t from = task.remote[i].view;
    const kernels::TileView& to = task.views()[from - 1];
    const kernels::TileView& of = task.views()[from];
    if (from % 2 == 0 || to.cols != to.stride || to.cols != of.cols || to.rows > of.rows || to.rows == 0) return false;
    rows[i].rows = to.rows;
    destinations.push_back(static_cast<std::byte*>(to.data));
  }
  return true;
}

}  // namespace

void start_fetch(RemoteMemory& memory, Task& task, std::function<void()> fetched) {
  std::vector<RemoteRows> requested;
  for (const RemoteView& remote : task.remote) requested.push_back(remote.rows);
  task.is_moved = true;
  if (std::vector<std::byte*> destinations; can_fetch_in_place(task, requested, destinations)) {
    task.skips_kernel = true;
    memory.read(requested, destinations, fetched);
    return;
  }
  memory.fetch(requested, [&task, fetched = std::move(fetched)](Staging::Block block, const auto& rows) {
    task.staging = block;
    for (size_t i = 0; i < rows.size(); ++i) {
      kernels::TileView& view = task.views()[task.remote[i].view];
      view.data = rows[i];
      view.stride = view.cols;
    }
    fetched();
  });
}

}  // namespace tilewise::programs
