// See expand.h.
#include "programs/expand.h"

#include <algorithm>

namespace tilewise::programs {

namespace {

/// The rows whose tiles an operand depends on: what it views, and the whole iteration for a part of it.
RowRange touched_rows(const Operand& operand, RowRange range, int64_t rows) {
  if (operand.mode == Mode::kRowPart) return {std::min(range.begin, rows), std::min(range.end, rows)};
  return view_rows(operand, range, rows);
}

constexpr int64_t kPanelRows = 32;  // of a packed weight, whose last panel is padded (native/kernels/microkernel.h)

/// Rows that a tensor may fill in memory: a packed weight's padding is written with it. For other tensors that end
/// inside a tile this is up to a panel too many, which costs an edge between tasks at most.
int64_t rows_in_memory(const Tensor& tensor, int64_t rows) {
  const int64_t tiles = (rows + tensor.tile_rows - 1) / tensor.tile_rows * tensor.tile_rows;
  return std::min(tiles, (rows + kPanelRows - 1) / kPanelRows * kPanelRows);
}

/// A write also waits for every task that still uses the same bytes under another tensor.
void reuse_accesses(const ExpandContext& context, const Tensor& tensor, int64_t rows, RowRange tiles,
                    std::vector<tasks::Access>& accesses) {
  const int64_t low = tensor.offset + tiles.begin * tensor.tile_rows * tensor.row_bytes();
  const int64_t last_row = std::min(tiles.end * tensor.tile_rows, rows_in_memory(tensor, rows));
  const int64_t high = tensor.offset + last_row * tensor.row_bytes();
  const std::vector<Tensor>& tensors = context.program->device(context.device).tensors;
  for (int64_t id : tensor.aliases) {
    const Tensor& other = tensors[id];
    const int64_t other_rows = rows_in_memory(other, other.rows.at(*context.symbols));
    const int64_t tile_bytes = other.tile_rows * other.row_bytes();
    const int64_t other_high = other.offset + other_rows * other.row_bytes();
    if (tile_bytes == 0 || low >= other_high || high <= other.offset) continue;
    const int64_t first = (std::max(low, other.offset) - other.offset) / tile_bytes;
    const int64_t last = (std::min(high, other_high) - 1 - other.offset) / tile_bytes;
    for (int64_t tile = first; tile <= last; ++tile) {
      accesses.push_back({static_cast<uint32_t>(other.first_handle + tile), tasks::Use::kAfterAll});
    }
  }
}

void tile_accesses(const ExpandContext& context, const Operand& operand, const Tensor& tensor, RowRange range,
                   int64_t rows, std::vector<tasks::Access>& accesses) {
  const RowRange touched = touched_rows(operand, range, rows);
  if (touched.begin >= touched.end) return;
  const RowRange tiles{touched.begin / tensor.tile_rows, (touched.end - 1) / tensor.tile_rows + 1};
  const bool is_write = (operand.access & kOut) != 0;
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    accesses.push_back(
        {static_cast<uint32_t>(tensor.first_handle + tile), is_write ? tasks::Use::kWrite : tasks::Use::kRead});
  }
  if (is_write && !tensor.aliases.empty()) reuse_accesses(context, tensor, rows, tiles, accesses);
}

/// A signal counts epochs, so this device's tasks that raise it do so in the order of submission: a later layer's task
/// that is done first must not stand for an earlier layer's. The signal is a handle that they write.
void order_raises(const ExpandContext& context, const Instr& instr, int64_t index,
                  std::vector<tasks::Access>& accesses) {
  int64_t last = -1;
  for (const Notify& notify : instr.notifies) {
    const int64_t signal = notify.signal_base + (notify.per_index ? index : 0);
    if (signal != last) {
      accesses.push_back({static_cast<uint32_t>(context.first_order_handle + signal), tasks::Use::kWrite});
    }
    last = signal;
  }
}

kernels::TileView view_of(const Operand& operand, const Tensor& tensor, std::byte* arena, RowRange range,
                          int64_t rows) {
  const RowRange part = view_rows(operand, range, rows);
  int64_t first_col = 0;
  int64_t cols = tensor.cols;
  if (operand.mode == Mode::kCol) {
    first_col = std::min(range.begin, tensor.cols);
    cols = std::min(range.end, tensor.cols) - first_col;
  } else if (operand.mode == Mode::kRowCols) {
    first_col = std::min(operand.part, tensor.cols);
    cols = std::min(operand.part + operand.parts, tensor.cols) - first_col;
  }
  std::byte* data = arena + tensor.offset + part.begin * tensor.row_bytes() + first_col * size_of(tensor.dtype);
  return {data, part.end - part.begin, cols, tensor.stride};
}

}  // namespace

RowRange view_rows(const Operand& operand, RowRange range, int64_t rows) {
  int64_t begin = 0;
  int64_t end = rows;
  if (operand.mode == Mode::kRow || operand.mode == Mode::kRowCols) {
    begin = range.begin / operand.div;
    end = (range.end + operand.div - 1) / operand.div;
  } else if (operand.mode == Mode::kRowPart) {
    const int64_t length = range.end - range.begin;
    begin = range.begin + length * operand.part / operand.parts;
    end = range.begin + length * (operand.part + 1) / operand.parts;
  }
  return {std::min(begin, rows), std::min(end, rows)};
}

void expand(const ExpandContext& context, const Iteration& iteration, Task& task,
            std::vector<tasks::Access>& accesses) {
  const auto& [call, instr, index, extent] = iteration;
  const RowRange range =
      instr.step <= 0 ? RowRange{0, extent} : RowRange{index * instr.step, std::min((index + 1) * instr.step, extent)};
  task.instr = &instr;
  task.index = index;
  task.row_begin = range.begin;
  task.transfers = 0;
  task.set_num_views(static_cast<int64_t>(instr.operands.size()));
  kernels::TileView* view = task.views();
  for (const Operand& operand : instr.operands) {
    if (operand.null) {
      *view++ = {nullptr, 0, 0, 0};
      continue;
    }
    const int64_t owner = operand.peer < 0 ? context.device : operand.peer;
    const Tensor& tensor = context.program->device(owner).tensors[call.binding[operand.slot]];
    const int64_t rows = tensor.rows.at(*context.symbols);
    *view = view_of(operand, tensor, (*context.arenas)[owner], range, rows);
    if (owner != context.device) task.transfers += view->rows * view->cols;
    if (operand.access != kNoAccess) tile_accesses(context, operand, tensor, range, rows, accesses);
    ++view;
  }
  order_raises(context, instr, index, accesses);
}

}  // namespace tilewise::programs
