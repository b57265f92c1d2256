// Rings and ordered queues: no task is lost or duplicated, and the order is as specified.
#include "tasks/sched/queues.h"

#include <memory>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks;
using tilewise::tasks::testing::kSlowdown;

namespace {

/// An ordered queue with its own memory.
struct Ordered {
  OrderedQueue queue{};
  std::vector<OrderedEntry> entries = std::vector<OrderedEntry>(4096);
  std::byte* base() { return reinterpret_cast<std::byte*>(entries.data()); }
};

bool anything(uint32_t) { return true; }

}  // namespace

CASE("ring: first in, first out, over thousands of wraps") {
  auto ring = std::make_unique<Ring>();
  uint32_t next = 0;
  uint32_t expected = 0;
  for (int round = 0; round < 5000; ++round) {
    for (int n = round % 97; n >= 0; --n) EXPECT(ring->push(next++ % 1000));
    for (int n = round % 97; n >= 0; --n) EXPECT_EQ(ring->take_one(), expected++ % 1000);
    EXPECT_EQ(ring->take_one(), kNone);
    EXPECT(!ring->has_any());
  }
}

CASE("ring: exactly full and exactly empty are distinguished") {
  auto ring = std::make_unique<Ring>();
  for (int round = 0; round < 3; ++round) {
    for (uint32_t n = 0; n < kRingCells; ++n) EXPECT(ring->push(n));
    EXPECT(!ring->push(7));
    EXPECT_EQ(ring->take_one(), 0u);
    EXPECT(ring->push(kRingCells));
    EXPECT(!ring->push(7));
    for (uint32_t n = 1; n <= kRingCells; ++n) EXPECT_EQ(ring->take_one(), n);
    EXPECT_EQ(ring->take_one(), kNone);
  }
}

CASE("ring: counts wrap") {
  auto ring = std::make_unique<Ring>();
  const uint64_t begin = Ring::kCountMask - 40;
  ring->head.store(begin);
  ring->seen_head = begin;
  ring->tail.store(Ring::make_tail(begin, 0));
  uint32_t slots[64];
  for (uint32_t round = 0; round < 5; ++round) {
    EXPECT(!ring->has_any());
    for (uint32_t n = 0; n < kRingCells; ++n) EXPECT(ring->push(n));
    EXPECT(ring->is_full() && !ring->push(7));
    for (uint32_t n = 0; n < 64; ++n) EXPECT_EQ(ring->take_one(), n);
    EXPECT_EQ(ring->take_half(slots, 64), 64u);
    EXPECT(slots[0] == 64 && slots[63] == 127);
    for (uint32_t n = 128; n < kRingCells; ++n) EXPECT_EQ(ring->take_one(), n);
    EXPECT_EQ(ring->take_one(), kNone);
  }
}

CASE("ring: half is taken, rounded up, oldest first, at most the limit") {
  auto ring = std::make_unique<Ring>();
  uint32_t slots[64];
  EXPECT_EQ(ring->take_half(slots, 64), 0u);
  for (uint32_t n = 0; n < 9; ++n) ring->push(n);
  EXPECT_EQ(ring->take_half(slots, 64), 5u);
  EXPECT(slots[0] == 0 && slots[4] == 4);
  EXPECT_EQ(ring->take_half(slots, 1), 1u);
  EXPECT_EQ(slots[0], 5u);
  EXPECT_EQ(ring->take_one(), 6u);
}

CASE("ring: an owner and concurrent takers lose and duplicate nothing") {
  constexpr uint32_t kCount = 400'000 / kSlowdown;
  auto ring = std::make_unique<Ring>();
  std::vector<std::atomic<uint8_t>> seen(kCount);
  std::atomic<uint32_t> num_taken{0};
  const auto note = [&](uint32_t slot) {
    EXPECT_EQ(seen[slot].fetch_add(1), 0);
    num_taken.fetch_add(1);
  };
  std::vector<std::thread> takers;
  for (int t = 0; t < 3; ++t) {
    takers.emplace_back([&, t] {
      uint32_t slots[32];
      while (num_taken.load() < kCount) {
        const uint32_t count = t == 0 ? 0 : ring->take_half(slots, 32);
        for (uint32_t i = 0; i < count; ++i) note(slots[i]);
        const uint32_t slot = ring->take_one();
        if (slot != kNone) note(slot);
        if (slot == kNone && count == 0) std::this_thread::yield();
      }
    });
  }
  for (uint32_t n = 0; n < kCount;) {
    if (ring->push(n)) {
      ++n;
    } else if (const uint32_t slot = ring->take_one(); slot != kNone) {
      note(slot);
    }
  }
  for (std::thread& taker : takers) taker.join();
  EXPECT_EQ(num_taken.load(), kCount);
}

CASE("ordered queue: by priority, then by submission, for any order of pushes") {
  Ordered ordered;
  for (uint32_t n = 0; n < 1000; ++n) {
    const uint32_t shuffled = n * 379 % 1000;
    push(ordered.queue, ordered.base(), {static_cast<int64_t>(shuffled % 7) - 3, shuffled, shuffled});
  }
  int64_t last_priority = 100;
  uint32_t last = 0;
  for (int n = 0; n < 1000; ++n) {
    const uint32_t slot = take_first(ordered.queue, ordered.base(), anything);
    const int64_t priority = static_cast<int64_t>(slot % 7) - 3;
    EXPECT(priority < last_priority || (priority == last_priority && slot > last));
    last_priority = priority;
    last = slot;
  }
  EXPECT_EQ(take_first(ordered.queue, ordered.base(), anything), kNone);
}

CASE("ordered queue: the first if welcome, or the best welcome one") {
  Ordered ordered;
  for (uint32_t n = 0; n < 10; ++n) push(ordered.queue, ordered.base(), {0, n, n});
  EXPECT_EQ(take_first(ordered.queue, ordered.base(), [](uint32_t slot) { return slot != 0; }), kNone);
  EXPECT_EQ(take_best(ordered.queue, ordered.base(), [](uint32_t slot) { return slot == 6 ? 1u : 0u; }), 6u);
  EXPECT_EQ(take_best(ordered.queue, ordered.base(), [](uint32_t slot) { return slot == 6 ? 1u : 0u; }), kNone);
  for (const uint32_t expected : {0u, 1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u}) {
    EXPECT_EQ(take_first(ordered.queue, ordered.base(), anything), expected);
  }
}

CASE("ordered queue: concurrent pushes and takes lose and duplicate nothing") {
  constexpr uint32_t kCount = 40'000 / kSlowdown;
  Ordered ordered;
  std::vector<std::atomic<uint8_t>> seen(2 * kCount);
  std::atomic<uint32_t> num_taken{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t n = 0; n < kCount; ++n) {
        while (ordered.queue.size.load() > 4000) std::this_thread::yield();
        push(ordered.queue, ordered.base(), {n % 3, n, t * kCount + n});
        const uint32_t slot = take_first(ordered.queue, ordered.base(), anything);
        if (slot == kNone) continue;
        EXPECT_EQ(seen[slot].fetch_add(1), 0);
        num_taken.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  while (take_first(ordered.queue, ordered.base(), anything) != kNone) num_taken.fetch_add(1);
  EXPECT_EQ(num_taken.load(), 2 * kCount);
}

TILEWISE_TEST_MAIN
