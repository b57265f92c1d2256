// The file of a device: what is written is read again, whatever pages it covers; ranges that share a page; refusals.
#include "memory/spill_file.h"

#include <cstring>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/testing.h"
#include "memory/arena.h"

using tilewise::memory::Arena;
using tilewise::memory::kFilePage;
using tilewise::memory::SpillFile;

namespace {

constexpr auto kRead = SpillFile::Way::kRead;
constexpr auto kWrite = SpillFile::Way::kWrite;

std::vector<std::byte> noise(int64_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& b : made) b = static_cast<std::byte>(random());
  return made;
}

template <class Body>
bool is_refused(Body body) {
  try {
    body();
  } catch (const tilewise::ResourceError&) {
    return true;
  }
  return false;
}

}  // namespace

CASE("neighbouring ranges of any size and place come back as they were written, pages that they share too") {
  const SpillFile file(".", 8 << 20);
  std::mt19937 random(7);
  std::vector<std::byte> expected(file.bytes());
  for (int round = 0; round < 3; ++round) {
    for (int64_t at = 0; at < file.bytes();) {
      const int64_t most = round == 0 ? 3 * kFilePage : 2'500'000;
      const int64_t bytes = std::min<int64_t>(1 + static_cast<int64_t>(random() % most), file.bytes() - at);
      std::vector<std::byte> held = noise(bytes + 64, random());
      file.move(kWrite, held.data() + at % 64, at, bytes);
      std::memcpy(expected.data() + at, held.data() + at % 64, bytes);
      at += bytes;
    }
    for (int64_t at = 0; at < file.bytes();) {
      const int64_t bytes = std::min<int64_t>(1 + static_cast<int64_t>(random() % 1'000'000), file.bytes() - at);
      std::vector<std::byte> held(bytes);
      file.move(kRead, held.data(), at, bytes);
      EXPECT_EQ(std::memcmp(held.data(), expected.data() + at, bytes), 0);
      at += bytes;
    }
  }
}

CASE("the host sees behind an arena what transfers have written, and the other way round, page cache or not") {
  Arena arena(100'000, std::make_unique<SpillFile>(".", 3 * kFilePage));
  EXPECT_EQ(arena.file_begin() % kFilePage, 0);
  EXPECT(arena.file_begin() >= arena.bytes());
  std::byte* const mapped = arena.data() + arena.file_begin();
  for (int64_t i = 0; i < 3 * kFilePage; ++i) EXPECT(mapped[i] == std::byte{0});
  std::vector<std::byte> held = noise(3 * kFilePage, 1);
  arena.file()->move(kWrite, held.data(), 0, 3 * kFilePage);
  EXPECT_EQ(std::memcmp(mapped, held.data(), 3 * kFilePage), 0);
  mapped[kFilePage + 5] = ~held[kFilePage + 5];
  arena.drop_file_pages();
  std::vector<std::byte> again(3 * kFilePage);
  arena.file()->move(kRead, again.data(), 0, 3 * kFilePage);
  EXPECT(again[kFilePage + 5] == ~held[kFilePage + 5]);
  EXPECT(again[kFilePage + 6] == held[kFilePage + 6]);
  arena.data()[99'999] = std::byte{1};
}

CASE("a directory that is none, a disk without room, and reading beyond the end are ResourceErrors") {
  EXPECT(is_refused([] { const SpillFile file("no/such/directory", 4096); }));
  EXPECT(is_refused([] { const SpillFile file(".", int64_t{1} << 55); }));
  const SpillFile file(".", 4096);
  std::vector<std::byte> held(64);
  EXPECT(is_refused([&] { file.move(kRead, held.data(), 1 << 20, 64); }));
}

TILEWISE_TEST_MAIN
