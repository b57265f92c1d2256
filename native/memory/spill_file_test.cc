// The file of a device: written data is read again for any pages covered; ranges that share a page; rejections.
#include "memory/spill_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
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

CASE("neighbouring ranges of any size are read as written, including shared pages") {
  const SpillFile file(".", 8 << 20);
  std::mt19937 random(7);
  std::vector<std::byte> expected(file.bytes());
  for (int round = 0; round < 3; ++round) {
    for (int64_t at = 0; at < file.bytes();) {
      const int64_t most = round == 0 ? 3 * kFilePage : 2'500'000;
      const int64_t bytes = std::min<int64_t>(1 + static_cast<int64_t>(random() % most), file.bytes() - at);
      std::vector<std::byte> data = noise(bytes + 64, random());
      file.move(kWrite, data.data() + at % 64, at, bytes);
      std::memcpy(expected.data() + at, data.data() + at % 64, bytes);
      at += bytes;
    }
    for (int64_t at = 0; at < file.bytes();) {
      const int64_t bytes = std::min<int64_t>(1 + static_cast<int64_t>(random() % 1'000'000), file.bytes() - at);
      std::vector<std::byte> data(bytes);
      file.move(kRead, data.data(), at, bytes);
      EXPECT_EQ(std::memcmp(data.data(), expected.data() + at, bytes), 0);
      at += bytes;
    }
  }
}

CASE("an arena has addresses after its memory for its file, which is never mapped") {
  Arena arena(100'000, std::make_unique<SpillFile>(".", 3 * kFilePage));
  EXPECT_EQ(arena.file_begin() % kFilePage, 0);
  EXPECT(arena.file_begin() >= arena.bytes());
  std::vector<std::byte> data(3 * kFilePage, std::byte{1});
  arena.file()->move(kRead, data.data(), 0, 3 * kFilePage);
  for (const std::byte b : data) EXPECT(b == std::byte{0});
  arena.data()[99'999] = std::byte{1};
  // the system cannot read from there to write it to a pipe
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  EXPECT_EQ(write(ends[1], arena.data() + arena.file_begin(), 1), -1);
  EXPECT_EQ(errno, EFAULT);
  close(ends[0]);
  close(ends[1]);
}

CASE("a second opening that fails without descriptors is an error with a message, and leaks none") {
  const int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
  close(next);
  rlimit before{};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit for_one{static_cast<rlim_t>(next) + 1, before.rlim_max};
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &for_one), 0);
  std::string message;
  try {
    const SpillFile file(".", 4096);
  } catch (const tilewise::ResourceError& error) {
    message = error.what();
  }
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT(message.find(std::strerror(EMFILE)) != std::string::npos);
  EXPECT(message.find("past the page cache") != std::string::npos);
  const int again = open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(again, next);
  close(again);
}

CASE("an invalid directory, a full disk and reading beyond the end are ResourceErrors") {
  EXPECT(is_refused([] { const SpillFile file("no/such/directory", 4096); }));
  EXPECT(is_refused([] { const SpillFile file(".", int64_t{1} << 55); }));
  const SpillFile file(".", 4096);
  std::vector<std::byte> data(64);
  EXPECT(is_refused([&] { file.move(kRead, data.data(), 1 << 20, 64); }));
}

TILEWISE_TEST_MAIN
