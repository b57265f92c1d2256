// Arena: zeroed, aligned, rejects sizes that cannot be mapped.
#include "memory/arena.h"

#include "base/check.h"
#include "base/testing.h"

using tilewise::memory::Arena;

CASE("an arena is zeroed, aligned and writable to its last byte") {
  Arena arena(100000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.data()) % 64, 0u);
  for (int64_t i = 0; i < arena.bytes(); ++i) EXPECT(arena.data()[i] == std::byte{0});
  arena.data()[99999] = std::byte{1};
}

CASE("an empty arena is allowed") { EXPECT_EQ(Arena(0).bytes(), 0); }

CASE("an arena the system cannot map is a ResourceError") {
  bool raised = false;
  try {
    Arena arena(int64_t{1} << 60);
  } catch (const tilewise::ResourceError&) {
    raised = true;
  }
  EXPECT(raised);
}

TILEWISE_TEST_MAIN
