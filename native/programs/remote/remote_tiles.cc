// See remote_tiles.h.
#include "programs/remote/remote_tiles.h"

#include <utility>
#include <vector>

namespace tilewise::programs {

namespace {

/// Whether a task only copies tiles to contiguous memory, all from remote devices; or from contiguous memory, all to
/// remote devices. Then `rows` and `local` say what to transfer directly, and the kernel need not run.
bool is_one_transfer(Task& task, std::vector<RemoteRows>& rows, std::vector<std::byte*>& local) {
  if (!task.instr->is_copy || task.injected != Injected::kNothing || 2 * std::ssize(task.remote) != task.num_views())
    return false;
  const bool is_put = task.remote.front().is_written;
  for (size_t i = 0; i < task.remote.size(); ++i) {
    const RemoteView& remote = task.remote[i];
    const int64_t first = remote.view - remote.view % 2;
    const kernels::TileView& to = task.views()[first];
    const kernels::TileView& of = task.views()[first + 1];
    const kernels::TileView& here = is_put ? of : to;
    if (remote.is_written != is_put || (remote.view == first) != is_put) return false;
    if (here.cols != here.stride || to.cols != of.cols || to.rows > of.rows || to.rows == 0) return false;
    rows[i].rows = to.rows;
    local.push_back(static_cast<std::byte*>(here.data));
  }
  return true;
}

std::optional<comm::Post> take_post(Task& task, const std::vector<RemoteRows>& rows, const FindPost& find) {
  const auto travelling = rows.size() == 1 ? find(rows.front()) : std::nullopt;
  if (!travelling) return std::nullopt;
  task.num_sent_post = travelling->number;
  return travelling->post;
}

}  // namespace

void bring_tiles(RemoteMemory& memory, Task& task, const FindPost& find, std::function<void()> done) {
  std::vector<RemoteRows> rows;
  for (const RemoteView& remote : task.remote) rows.push_back(remote.rows);
  task.is_moved = true;
  if (std::vector<std::byte*> local; is_one_transfer(task, rows, local)) {
    task.skips_kernel = true;
    if (task.sends_tiles) {
      task.sends_tiles = false;
      const auto post = take_post(task, rows, find);
      memory.write(rows, local, post, done);
    } else {
      memory.read(rows, local, done);
    }
    return;
  }
  memory.fetch(rows, [&task, done = std::move(done)](Staging::Block block, const auto& staged) {
    task.staging = block;
    for (size_t i = 0; i < staged.size(); ++i) {
      kernels::TileView& view = task.views()[task.remote[i].view];
      view.data = staged[i];
      view.stride = view.cols;
    }
    done();
  });
}

void send_tiles(RemoteMemory& memory, Task& task, const FindPost& find, const std::function<void()>& done) {
  std::vector<RemoteRows> rows;
  std::vector<std::byte*> staged;
  for (const RemoteView& remote : task.remote) {
    if (!remote.is_written) continue;
    const kernels::TileView& view = task.views()[remote.view];
    rows.push_back(remote.rows);
    rows.back().rows = view.rows;  // padding after them belongs to the owner
    staged.push_back(static_cast<std::byte*>(view.data));
  }
  const auto post = take_post(task, rows, find);
  memory.write(rows, staged, post, done);
}

}  // namespace tilewise::programs
