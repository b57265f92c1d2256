// The one rule of ordering: whom a new access waits for, and what it leaves behind for the next.
//
// Purpose: read-after-write, write-after-write and write-after-read on one AccessState, for handles, boxes and
// recordings alike. Who may call: whoever owns the state (the submitter, under its lock). Blocks: never. Memory order:
// none of its own. Memory: chunks from the given pool.
//
// A Pool offers: take() -> index + 1 of an empty chunk; give(index + 1); chunk(index + 1); is_settled(ref): the task
// has completed, and successfully if the reference carries poison.
#pragma once
#include <algorithm>
#include <cstdint>

#include "tasks/access.h"
#include "tasks/layout.h"

namespace tilewise::tasks {

inline constexpr Kind kind_of(int mode) {
  return mode == PTO_INPUT ? Kind::kRead : mode == PTO_COMMUTE ? Kind::kCommute : Kind::kWrite;
}
inline constexpr bool reads_data(int mode) { return mode == PTO_INPUT || mode == PTO_INOUT || mode == PTO_COMMUTE; }

template <class Pool, class Visit>
[[gnu::noinline]] void for_each_in(Pool& pool, uint32_t chunks, Visit&& visit) {
  for (uint32_t c = chunks; c != 0; c = pool.chunk(c).next) {
    const Chunk& chunk = pool.chunk(c);
    for (uint32_t i = 0; i < chunk.count; ++i) visit(chunk.refs[i]);
  }
}

template <class Pool, class Visit>
void for_each_now(const AccessState& state, Pool& pool, Visit&& visit) {
  if (state.now[0] != 0) visit(state.now[0]);
  if (state.now[1] != 0) visit(state.now[1]);
  if (state.more_now != 0) for_each_in(pool, state.more_now, visit);
}

template <class Pool, class Visit>
[[gnu::always_inline]] inline void for_each_before(const AccessState& state, Pool& pool, Visit&& visit) {
  if (state.before != 0) visit(state.before);
  if (state.more_before != 0) [[unlikely]] for_each_in(pool, state.more_before, visit);
}

/// Calls sink(producer with flags) for every task that an access of this mode must wait for.
template <class Pool, class Sink>
[[gnu::always_inline]] inline void collect(const AccessState& state, Pool& pool, int mode, Sink&& sink) {
  const Kind kind = kind_of(mode);
  if (kind == state.kind && kind != Kind::kWrite) {  // joins the group
    for_each_before(state, pool, sink);
    return;
  }
  const TaskRef flag = state.kind != Kind::kRead && reads_data(mode) ? kCarriesPoison : 0;
  if (state.now[0] != 0) sink(state.now[0] | flag);
  if (state.now[1] != 0) sink(state.now[1] | flag);
  if (state.more_now != 0) [[unlikely]] for_each_in(pool, state.more_now, [&](TaskRef ref) { sink(ref | flag); });
  // The readers are order only; the data are those of the writer before them, whose failure must not be lost.
  if (state.kind == Kind::kRead && reads_data(mode)) for_each_before(state, pool, sink);
}

template <class Pool>
void give_chunks(Pool& pool, uint32_t& chunks) {
  while (chunks != 0) {
    const uint32_t next = pool.chunk(chunks).next;
    pool.give(chunks);
    chunks = next;
  }
}

template <class Pool>
void push_ref(Pool& pool, uint32_t& chunks, TaskRef ref) {
  if (chunks == 0 || pool.chunk(chunks).count == 7) {
    const uint32_t fresh = pool.take();
    Chunk& chunk = pool.chunk(fresh);
    chunk.next = chunks;
    chunk.count = 0;
    chunks = fresh;
  }
  Chunk& chunk = pool.chunk(chunks);
  chunk.refs[chunk.count++] = ref;
}

/// Drops the settled members of more_now. Called each time their number has doubled, so that it costs O(1) a member.
template <class Pool>
void prune_now(AccessState& state, Pool& pool) {
  uint32_t kept = 0;
  uint32_t num_kept = 0;
  const TaskRef flag = state.kind == Kind::kRead ? 0 : kCarriesPoison;
  uint32_t old = state.more_now;
  try {
    for_each_in(pool, old, [&](TaskRef ref) {
      if (pool.is_settled(ref | flag)) return;
      push_ref(pool, kept, ref);
      ++num_kept;
    });
  } catch (...) {
    give_chunks(pool, kept);
    throw;
  }
  give_chunks(pool, old);
  state.more_now = kept;
  state.num_more = num_kept;
  state.limit = static_cast<uint16_t>(std::min<uint32_t>(std::max<uint32_t>(14, 2 * num_kept), 0xFFFF));
}

template <class Pool>
[[gnu::noinline]] void join_now(AccessState& state, Pool& pool, TaskRef ref) {
  const TaskRef flag = state.kind == Kind::kRead ? 0 : kCarriesPoison;
  for (TaskRef& member : state.now) {
    if (member != 0 && !pool.is_settled(member | flag)) continue;
    member = ref;
    return;
  }
  if (state.num_more >= std::max<uint32_t>(state.limit, 14)) prune_now(state, pool);
  push_ref(pool, state.more_now, ref);
  ++state.num_more;
}

/// The group `now` becomes `before` of a group that can grow.
template <class Pool>
[[gnu::noinline]] void begin_group(AccessState& state, Pool& pool, Kind kind, TaskRef ref) {
  TaskRef first = 0;
  uint32_t more = 0;
  const auto keep = [&](TaskRef member) {
    if (first == 0) {
      first = member;
    } else {
      push_ref(pool, more, member);
    }
  };
  const TaskRef flag = state.kind == Kind::kRead ? 0 : kCarriesPoison;
  try {
    for_each_now(state, pool, [&](TaskRef member) { keep(member | flag); });
    if (state.kind == Kind::kRead) {
      for_each_before(state, pool, [&](TaskRef member) {
        if (!pool.is_settled(member)) keep(member);
      });
    }
  } catch (...) {
    give_chunks(pool, more);
    throw;
  }
  give_chunks(pool, state.more_now);
  give_chunks(pool, state.more_before);
  state = {{ref, 0}, first, 0, more, 0, 0, kind, 0};
}

/// Leaves the access behind: later ones find it.
template <class Pool>
[[gnu::always_inline]] inline void record(AccessState& state, Pool& pool, int mode, TaskRef ref) {
  const Kind kind = kind_of(mode);
  if (kind == Kind::kRead && state.kind == Kind::kWrite && (state.now[1] | state.more_now) == 0) [[likely]] {
    state.before = state.now[0] | kCarriesPoison;  // the first reader of a result, without the general case's loops
    state.now[0] = ref;
    state.kind = kind;
  } else if (kind == Kind::kWrite) {
    if (state.more_now != 0) give_chunks(pool, state.more_now);
    if (state.more_before != 0) give_chunks(pool, state.more_before);
    state = {{ref, 0}, 0, 0, 0, 0, 0, kind, 0};
  } else if (kind == state.kind) {
    join_now(state, pool, ref);
  } else {
    begin_group(state, pool, kind, ref);
  }
}

}  // namespace tilewise::tasks
