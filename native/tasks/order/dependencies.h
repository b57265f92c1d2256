// The ordering rule: which tasks a new access waits for, and what it records for later accesses.
//
// Purpose: read-after-write, write-after-write and write-after-read on one AccessState, for handles, boxes and
// recordings alike. Who may call: the owner of the state (the submitter, with its lock). Blocks: never. Memory order:
// none of its own. Memory: chunks from the given pool.
//
// A Pool has: take() -> index + 1 of an empty chunk; give(index + 1); chunk(index + 1); is_settled(ref): whether the
// task has completed, and successfully if the reference carries poison.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "tasks/regions/access.h"
#include "tasks/store/layout.h"

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
  for (const TaskRef member : state.now) {
    if (member != 0) visit(member);
  }
  if (state.more_now != 0) for_each_in(pool, state.more_now, visit);
}

template <class Pool, class Visit>
[[gnu::always_inline]] inline void for_each_before(const AccessState& state, Pool& pool, Visit&& visit) {
  if (state.before != 0) visit(state.before);
  if (state.more_before != 0) [[unlikely]]
    for_each_in(pool, state.more_before, visit);
}

/// Whether an access of this kind joins the current group of accesses.
inline constexpr bool joins(const AccessState& state, Kind kind) { return kind == state.kind && kind != Kind::kWrite; }

/// Whether the access must also collect the writer before the current readers: its data is read, so its failure counts.
inline constexpr bool needs_before(const AccessState& state, int mode) {
  return joins(state, kind_of(mode)) || (state.kind == Kind::kRead && reads_data(mode));
}

inline constexpr uint32_t kMaxFew = 4;
static_assert(std::size(AccessState{}.now) + 1 == kMaxFew);  // collect_few and begin_write name each of them

/// Calls sink(producer with flags) for every task in the state itself that an access of this mode must wait for. These
/// are at most kMaxFew, and all producers unless the state has chunks.
template <class Sink>
[[gnu::always_inline]] inline void collect_few(const AccessState& state, int mode, Sink&& sink) {
  if (!joins(state, kind_of(mode))) {
    const TaskRef flag = state.kind != Kind::kRead && reads_data(mode) ? kCarriesPoison : 0;
    if (state.now[0] != 0) sink(state.now[0] | flag);
    if (state.now[1] != 0) {
      sink(state.now[1] | flag);
      if (state.now[2] != 0) sink(state.now[2] | flag);
    }
  }
  if (needs_before(state, mode) && state.before != 0) sink(state.before);
}

/// The same for the producers in chunks.
template <class Pool, class Sink>
void collect_rest(const AccessState& state, Pool& pool, int mode, Sink&& sink) {
  if (!joins(state, kind_of(mode))) {
    const TaskRef flag = state.kind != Kind::kRead && reads_data(mode) ? kCarriesPoison : 0;
    for_each_in(pool, state.more_now, [&](TaskRef ref) { sink(ref | flag); });
  }
  if (needs_before(state, mode)) for_each_in(pool, state.more_before, sink);
}

template <class Pool, class Sink>
[[gnu::always_inline]] inline void collect(const AccessState& state, Pool& pool, int mode, Sink&& sink) {
  collect_few(state, mode, sink);
  if (state.has_chunks()) [[unlikely]]
    collect_rest(state, pool, mode, sink);
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
  if (chunks == 0 || pool.chunk(chunks).count == kRefsPerChunk) {
    const uint32_t fresh = pool.take();
    Chunk& chunk = pool.chunk(fresh);
    chunk.next = chunks;
    chunk.count = 0;
    chunks = fresh;
  }
  Chunk& chunk = pool.chunk(chunks);
  chunk.refs[chunk.count++] = ref;
}

/// Drops the settled references of a list and compacts the others; `flag` is set in each before the test. Returns the
/// number left. Takes no chunk, so it cannot fail.
template <class Pool>
uint32_t prune_chunks(Pool& pool, uint32_t& chunks, TaskRef flag) {
  uint32_t compacted = 0;  // the new list; only its first chunk has room
  uint32_t num_kept = 0;
  while (chunks != 0) {
    const uint32_t index = chunks;
    Chunk& chunk = pool.chunk(index);
    chunks = chunk.next;
    uint32_t count = 0;
    for (uint32_t i = 0; i < chunk.count; ++i) {
      if (!pool.is_settled(chunk.refs[i] | flag)) chunk.refs[count++] = chunk.refs[i];
    }
    num_kept += count;
    while (count > 0 && compacted != 0 && pool.chunk(compacted).count < kRefsPerChunk) {
      Chunk& first = pool.chunk(compacted);
      first.refs[first.count++] = chunk.refs[--count];
    }
    if (count == 0) {
      pool.give(index);
      continue;
    }
    chunk.count = count;
    chunk.next = compacted;
    compacted = index;
  }
  chunks = compacted;
  return num_kept;
}

/// Drops the settled members of more_now. Called whenever their number has doubled, so that it costs O(1) per member.
template <class Pool>
void prune_now(AccessState& state, Pool& pool) {
  state.num_more = prune_chunks(pool, state.more_now, state.kind == Kind::kRead ? 0 : kCarriesPoison);
  state.limit = static_cast<uint16_t>(std::min<uint32_t>(std::max<uint32_t>(14, 2 * state.num_more), 0xFFFF));
}

/// Drops all settled members in chunks.
template <class Pool>
void prune(AccessState& state, Pool& pool) {
  if (state.more_now != 0) prune_now(state, pool);
  if (state.more_before != 0) prune_chunks(pool, state.more_before, 0);  // these have their own flags
}

template <class Pool>
[[gnu::noinline]] void join_now(AccessState& state, Pool& pool, TaskRef ref) {
  if (state.num_more >= std::max<uint32_t>(state.limit, 14)) prune_now(state, pool);
  push_ref(pool, state.more_now, ref);
  ++state.num_more;
}

/// Moves the group `now` to `before` of a new group that can grow.
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

/// Makes a task the only accessor. Assigns each member, which compiles to faster code than clearing the whole state.
[[gnu::always_inline]] inline void begin_write(AccessState& state, TaskRef ref) {
  state.now[0] = ref;
  state.now[1] = state.now[2] = state.before = 0;
  state.more_now = state.more_before = state.num_more = 0;
  state.limit = 0;
  state.kind = Kind::kWrite;
}

/// Records the access for later ones if that neither takes nor frees chunks. Returns false if nothing has changed; then
/// call record(). is_settled: as for a Pool.
template <class Settled>
[[gnu::always_inline]] inline bool record_few(AccessState& state, int mode, TaskRef ref, Settled&& is_settled) {
  const Kind kind = kind_of(mode);
  if (kind == Kind::kWrite) {
    if (state.has_chunks()) [[unlikely]]
      return false;
    begin_write(state, ref);
    return true;
  }
  if (state.kind == kind) {
    const TaskRef flag = kind == Kind::kRead ? 0 : kCarriesPoison;
    for (TaskRef& member : state.now) {
      if (member != 0 && !is_settled(member | flag)) continue;
      member = ref;
      return true;
    }
    return false;
  }
  if (state.has_chunks() || state.now[1] != 0 || (state.kind == Kind::kRead && state.before != 0)) return false;
  // The first access of its kind, after at most one task.
  const TaskRef flag = state.kind == Kind::kRead ? 0 : kCarriesPoison;
  state.before = state.now[0] != 0 ? state.now[0] | flag : 0;
  state.now[0] = ref;
  state.kind = kind;
  return true;
}

template <class Pool>
[[gnu::always_inline]] inline void record(AccessState& state, Pool& pool, int mode, TaskRef ref) {
  if (record_few(state, mode, ref, [&](TaskRef member) { return pool.is_settled(member); })) return;
  const Kind kind = kind_of(mode);
  if (kind == Kind::kWrite) {
    give_chunks(pool, state.more_now);
    give_chunks(pool, state.more_before);
    begin_write(state, ref);
  } else if (kind == state.kind) {
    join_now(state, pool, ref);
  } else {
    begin_group(state, pool, kind, ref);
  }
}

}  // namespace tilewise::tasks
