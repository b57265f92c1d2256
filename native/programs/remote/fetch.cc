// See fetch.h.
#include "programs/remote/fetch.h"

#include <utility>
#include <vector>

namespace tilewise::programs {

namespace {

/// Whether all that a task does is to copy what is fetched to places without gaps: then it lands there.
bool lands(Task& task, std::vector<RemoteRows>& wanted, std::vector<std::byte*>& ends) {
  if (!task.instr->is_copy || task.injected != Injected::kNothing || 2 * std::ssize(task.remote) != task.num_views())
    return false;
  for (size_t i = 0; i < task.remote.size(); ++i) {
    const int64_t from = task.remote[i].view;
    const kernels::TileView& to = task.views()[from - 1];
    const kernels::TileView& of = task.views()[from];
    if (from % 2 == 0 || to.cols != to.stride || to.cols != of.cols || to.rows > of.rows || to.rows == 0) return false;
    wanted[i].rows = to.rows;
    ends.push_back(static_cast<std::byte*>(to.data));
  }
  return true;
}

}  // namespace

void start_fetch(RemoteMemory& memory, Task& task, std::function<void()> fetched) {
  std::vector<RemoteRows> wanted;
  for (const RemoteView& remote : task.remote) wanted.push_back(remote.rows);
  task.is_moved = true;
  if (std::vector<std::byte*> ends; lands(task, wanted, ends)) {
    task.is_landed = true;
    memory.read(wanted, ends, fetched);
    return;
  }
  memory.fetch(wanted, [&task, fetched = std::move(fetched)](Staging::Block block, const auto& rows) {
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
