// See leaving.h.
#include "tasks/replay/leaving.h"

#include <algorithm>

#include "tasks/engine/handles.h"
#include "tasks/order/boxes.h"
#include "tasks/order/dependencies.h"

namespace tilewise::tasks {

void leave_writers(Engine& engine, Handle& handle, const std::vector<TaskRef>& writers, uint32_t thread) {
  AccessState state;
  state.kind = Kind::kWrite;
  ChunkPool pool{engine, engine.thread_slot(thread)};
  try {
    for (const TaskRef writer : writers) {
      if (state.now[0] == 0) {
        state.now[0] = writer;
      } else {
        push_ref(pool, state.more_now, writer);
        ++state.num_more;
      }
    }
  } catch (...) {
    give_chunks(pool, state.more_now);
    throw;
  }
  forget_accesses(engine, handle, thread);
  handle.flags &= ~kHasRegions;
  handle.state = state;
}

// Records in a buffer's state the recording's last accesses, with the task names of this replay.
void leave_behind(Engine& engine, Recording& recording, const RecordedBuffer& buffer, Handle& handle,
                  const std::vector<TaskRef>& names, uint32_t thread) {
  ChunkPool pool{engine, engine.thread_slot(thread)};
  const auto renamed = [&](TaskRef ref) { return names[slot_of(ref)] | (ref & kFlagMask); };
  if (buffer.has_regions || (handle.flags & kHasRegions) != 0) {
    std::vector<TaskRef> writers;
    for (const uint32_t user : buffer.users) writers.push_back(names[user]);
    for_each_now(buffer.state, recording.pool, [&](TaskRef ref) { writers.push_back(renamed(ref)); });
    return leave_writers(engine, handle, writers, thread);
  }
  if (!buffer.is_written) {
    for_each_now(buffer.state, recording.pool,
                 [&](TaskRef ref) { record(handle.state, pool, PTO_INPUT, without_flags(renamed(ref))); });
    return;
  }
  AccessState state;
  state.kind = buffer.state.kind;
  std::transform(std::begin(buffer.state.now), std::end(buffer.state.now), std::begin(state.now),
                 [&](TaskRef ref) { return ref != 0 ? renamed(ref) : 0; });
  if (buffer.state.before != 0) state.before = renamed(buffer.state.before);
  try {
    for_each_in(recording.pool, buffer.state.more_now, [&](TaskRef ref) {
      push_ref(pool, state.more_now, renamed(ref));
      ++state.num_more;
    });
    for_each_in(recording.pool, buffer.state.more_before,
                [&](TaskRef ref) { push_ref(pool, state.more_before, renamed(ref)); });
  } catch (...) {
    give_chunks(pool, state.more_now);
    give_chunks(pool, state.more_before);
    throw;
  }
  if (handle.state.more_now != 0) give_chunks(pool, handle.state.more_now);
  if (handle.state.more_before != 0) give_chunks(pool, handle.state.more_before);
  handle.state = state;
}

}  // namespace tilewise::tasks
