// References to tasks, and the dependency state of one buffer (or one box of it).
//
// A TaskRef is a slot and the generation of the slot. If the slot's generation has changed, the task has completed. So
// a reference never dangles, needs no reference count, and no array is indexed by an ever-growing id.
#pragma once
#include <cstdint>

namespace tilewise::tasks {

inline constexpr uint32_t kNone = 0xFFFFFF;  // no slot, node or handle: 24 bits

/// [generation 40 | slot 20 | flags 4]. The public id of a task is its reference without flags. 0: none.
using TaskRef = uint64_t;

inline constexpr int kFlagBits = 4;
inline constexpr int kSlotBits = 20;
inline constexpr uint64_t kFlagMask = (1u << kFlagBits) - 1;
inline constexpr TaskRef kCarriesPoison = 1;  // as a producer: its failure is passed on to the consumer
inline constexpr TaskRef kIsEvent = 2;  // as a producer: [event 32 | unused | flags], preceded by the value

inline constexpr TaskRef make_ref(uint64_t generation, uint32_t slot) {
  return generation << (kFlagBits + kSlotBits) | static_cast<uint64_t>(slot) << kFlagBits;
}
inline constexpr uint32_t slot_of(TaskRef ref) { return (ref >> kFlagBits) & ((1u << kSlotBits) - 1); }
inline constexpr uint64_t generation_of(TaskRef ref) { return ref >> (kFlagBits + kSlotBits); }
inline constexpr TaskRef without_flags(TaskRef ref) { return ref & ~kFlagMask; }

/// The kind of the newest accesses of a buffer. Readers, and commuting tasks, form a group.
enum class Kind : uint8_t { kNothing = 0, kRead, kWrite, kCommute };

/// The newest accesses of a buffer, and those that later members of the newest group must wait for.
/// now: the newest group (readers, one writer, or commuting tasks). before: the group that `now` waits for; stored only
/// while `now` can grow. Completed writers stay until they are replaced, so that their failures can be looked up.
/// Members of `before` that wrote have kCarriesPoison. All zero: no access yet. Chunk links count from 1.
struct AccessState {
  TaskRef now[3] = {0, 0, 0};  // filled from the front
  TaskRef before = 0;
  uint32_t more_now = 0;  // chunks of further members
  uint32_t more_before = 0;
  uint32_t num_more = 0;  // members in more_now
  uint16_t limit = 0;  // prune when num_more reaches it
  Kind kind = Kind::kNothing;
  uint8_t unused = 0;

  bool has_chunks() const { return (more_now | more_before) != 0; }
};
static_assert(sizeof(AccessState) == 48);

}  // namespace tilewise::tasks
