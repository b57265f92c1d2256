// See expand.h.
#include "programs/run/expand.h"

#include <algorithm>

namespace tilewise::programs {

namespace {

/// The rows that an operand views in iteration [begin, end), clipped to the tensor's rows.
RowRange view_rows(const BoundOperand& operand, RowRange range, int64_t rows, const Values& values) {
  int64_t begin = 0;
  int64_t end = rows;
  switch (operand.mode) {
    case Mode::kRow:
    case Mode::kRowCols: {
      const int64_t div = std::max<int64_t>(operand.div.at(values), 1);
      begin = range.begin / div;
      end = (range.end + div - 1) / div;
      break;
    }
    case Mode::kRowPart: {
      const int64_t length = range.end - range.begin;
      const int64_t part = operand.part.at(values);
      const int64_t parts = std::max<int64_t>(operand.parts.at(values), 1);
      const int64_t first = operand.offset.at(values) + range.begin;
      begin = first + length * part / parts;
      end = first + length * (part + 1) / parts;
      break;
    }
    case Mode::kRows:
      begin = operand.part.at(values);
      end = begin + operand.parts.at(values);
      break;
    case Mode::kWhole:
    case Mode::kCol:
    case Mode::kPanelCols:
      break;
  }
  return {std::min(begin, rows), std::min(end, rows)};
}

struct ColumnRange {
  int64_t begin;
  int64_t end;
};

/// The columns that an operand views in iteration [begin, end), clipped to the tensor's columns.
ColumnRange view_columns(const BoundOperand& operand, RowRange range, int64_t cols, const Values& values) {
  int64_t begin = 0;
  int64_t end = cols;
  if (operand.mode == Mode::kCol || operand.mode == Mode::kPanelCols) {
    const int64_t div = std::max<int64_t>(operand.div.at(values), 1);
    begin = range.begin / div;
    end = (range.end + div - 1) / div;
  } else if (operand.mode == Mode::kRowCols) {
    begin = operand.part.at(values);
    end = begin + operand.parts.at(values);
  }
  return {std::min(begin, cols), std::min(end, cols)};
}

/// A tensor with its sizes in this run.
struct Sized {
  const Tensor& tensor;
  int64_t rows;
  int64_t tile_rows;
};

Sized sized(const Tensor& tensor, const Values& values) {
  return {tensor, tensor.rows.at(values), tensor.rows_per_tile(values)};
}

/// Rows that a tensor may use in memory. A packed weight's padding is written with it. For other tensors that end
/// inside a tile this may be up to a panel too many, which at worst adds an edge between tasks.
int64_t rows_in_memory(const Sized& size) {
  const int64_t tiles = (size.rows + size.tile_rows - 1) / size.tile_rows * size.tile_rows;
  return std::min(tiles, (size.rows + kPanelRows - 1) / kPanelRows * kPanelRows);
}

/// A write also waits for every task that still uses the same bytes through another tensor. A write of some columns
/// waits for all tasks that use any of its rows.
void reuse_accesses(const std::vector<Tensor>& tensors, const Values& values, const Sized& written, RowRange tiles,
                    std::vector<tasks::Access>& accesses) {
  const Tensor& tensor = written.tensor;
  const int64_t low = tensor.offset + tiles.begin * written.tile_rows * tensor.row_bytes();
  const int64_t last_row = std::min(tiles.end * written.tile_rows, rows_in_memory(written));
  const int64_t high = tensor.offset + last_row * tensor.row_bytes();
  for (int64_t id : tensor.aliases) {
    const Tensor& other = tensors[id];
    const Sized size = sized(other, values);
    const int64_t other_rows = rows_in_memory(size);
    const int64_t tile_bytes = size.tile_rows * other.row_bytes();
    const int64_t other_high = other.offset + other_rows * other.row_bytes();
    if (tile_bytes == 0 || low >= other_high || high <= other.offset) continue;
    const int64_t across = other.tiles_across();
    const int64_t first = (std::max(low, other.offset) - other.offset) / tile_bytes * across;
    const int64_t last = (std::min(high, other_high) - 1 - other.offset) / tile_bytes * across + across - 1;
    for (int64_t tile = first; tile <= last; ++tile) {
      accesses.push_back({static_cast<uint32_t>(other.first_handle + tile), tasks::Use::kAfterAll});
    }
  }
}

/// An operand depends on the tiles that it views; a part of an iteration depends on the whole iteration's tiles.
void tile_accesses(const ExpandContext& context, const BoundOperand& operand, const Sized& sized, RowRange range,
                   RowRange viewed, ColumnRange columns, const Values& values, std::vector<tasks::Access>& accesses) {
  const Tensor& tensor = sized.tensor;
  const int64_t offset = operand.offset.at(values);
  const RowRange touched = operand.mode == Mode::kRowPart ? RowRange{std::min(offset + range.begin, sized.rows),
                                                                     std::min(offset + range.end, sized.rows)}
                                                          : viewed;
  if (touched.begin >= touched.end) return;
  const RowRange tiles{touched.begin / sized.tile_rows, (touched.end - 1) / sized.tile_rows + 1};
  const bool is_write = (operand.access & kOut) != 0;
  const int64_t across = tensor.tiles_across();
  const int64_t first = across > 1 ? std::min(columns.begin / tensor.tile_cols, across - 1) : 0;
  const int64_t last = across > 1 ? std::max((columns.end - 1) / tensor.tile_cols, first) : 0;
  for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    for (int64_t c = first; c <= last; ++c) {
      accesses.push_back({static_cast<uint32_t>(tensor.first_handle + tile * across + c),
                          is_write ? tasks::Use::kWrite : tasks::Use::kRead});
    }
  }
  if (!is_write || tensor.aliases.empty()) return;
  reuse_accesses(context.program->class_of(context.device).tensors, values, sized, tiles, accesses);
}

/// Signals count epochs, so tasks of this device must post one in submission order: if a later layer's task ended
/// first, its post must not count for an earlier layer. So the signal is also a handle that these tasks write.
void order_posts(const ExpandContext& context, const BoundInstr& instr, int64_t index, const Values& values,
                 std::vector<tasks::Access>& accesses) {
  int64_t last = -1;
  for (const BoundNotify& notify : instr.notifies) {
    const int64_t signal = notify.signal.at(values, index);
    if (signal != last) {
      accesses.push_back({static_cast<uint32_t>(context.first_order_handle + signal), tasks::Use::kWrite});
    }
    last = signal;
  }
}

kernels::TileView view_of(const Tensor& tensor, Mode mode, std::byte* arena, RowRange viewed, ColumnRange columns) {
  const int64_t skipped = mode == Mode::kPanelCols ? columns.begin * kPanelRows : columns.begin;  // elements
  std::byte* data = arena + tensor.offset + viewed.begin * tensor.row_bytes() + skipped * size_of(tensor.dtype);
  return {data, viewed.end - viewed.begin, columns.end - columns.begin, tensor.stride};
}

/// The rows of a remote device's tensor to transfer for a view. Rows after them are not read: they may belong to
/// another tensor. So a remote view of a packed weight must have whole panels, which planning checks.
RemoteRows remote_rows(const ExpandContext& context, const BoundOperand& operand, const Tensor& tensor,
                       const kernels::TileView& view) {
  const int64_t bytes = size_of(tensor.dtype);
  const int64_t offset = static_cast<std::byte*>(view.data) - (*context.arenas)[operand.owner];
  return {operand.owner, offset, view.rows, view.cols * bytes, view.stride * bytes, (operand.role & kIn) != 0};
}

}  // namespace

void expand(const ExpandContext& context, const Iteration& iteration, Task& task,
            std::vector<tasks::Access>& accesses) {
  const auto& [call, instr, ints, index, extent, step] = iteration;
  const Values values{context.symbols->data(), nullptr, call.numbers.data()};
  const RowRange range = step <= 0 ? RowRange{0, extent} : RowRange{index * step, std::min((index + 1) * step, extent)};
  task.instr = &instr;
  task.call = &call;
  task.ints = ints;
  task.index = index;
  task.row_begin = range.begin;
  task.transfers = 0;
  task.remote.clear();
  task.sends_tiles = false;
  task.num_sent_post = -1;
  task.set_num_views(std::ssize(instr.operands));
  kernels::TileView* view = task.views();
  for (const BoundOperand& operand : instr.operands) {
    if (operand.null) {
      *view++ = {nullptr, 0, 0, 0};
      continue;
    }
    const Tensor& tensor = context.program->class_of(operand.owner).tensors[call.binding[operand.slot]];
    const Sized now = sized(tensor, values);
    const RowRange viewed = view_rows(operand, range, now.rows, values);
    const ColumnRange columns = view_columns(operand, range, tensor.cols, values);
    *view = view_of(tensor, operand.mode, (*context.arenas)[operand.owner], viewed, columns);
    if (operand.owner != context.device) {
      task.transfers += view->rows * view->cols * (operand.role == kInOut ? 2 : 1);
    }
    if (context.hosts != nullptr && (*context.hosts)[operand.owner] != (*context.hosts)[context.device] &&
        view->rows > 0 && view->cols > 0) {
      const bool is_written = (operand.role & kOut) != 0;
      task.remote.push_back({view - task.views(), remote_rows(context, operand, tensor, *view), is_written});
      task.sends_tiles = task.sends_tiles || is_written;
    }
    if (operand.access != kNoAccess) tile_accesses(context, operand, now, range, viewed, columns, values, accesses);
    ++view;
  }
  order_posts(context, instr, index, values, accesses);
}

}  // namespace tilewise::programs
