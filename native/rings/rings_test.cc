// Lock, pool, heap and ring on their own.
#include <thread>

#include "base/testing.h"
#include "rings/index_pool.h"
#include "rings/ready_heap.h"
#include "rings/record_ring.h"
#include "rings/spin_lock.h"

using namespace tilewise::rings;

CASE("spin lock excludes, also with more threads than cores") {
  SpinLock lock;
  int64_t count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        lock.lock();
        ++count;
        lock.unlock();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count, 30000);
}

CASE("a pool that gives back what it takes never grows (mistake: pools never reclaimed)") {
  IndexPool<int> pool;
  for (int round = 0; round < 10000; ++round) {
    const int32_t a = pool.take(), b = pool.take();
    EXPECT(a != b);
    pool.give(a);
    pool.give(b);
  }
  EXPECT_EQ(pool.capacity(), 2);
  EXPECT_EQ(pool.num_live(), 0);
}

CASE("ready heap: priority first, then submission order") {
  ReadyHeap heap(8);
  heap.push({0, 3, 30});
  heap.push({5, 9, 90});
  heap.push({0, 1, 10});
  heap.push({5, 2, 20});
  heap.push({-1, 0, 0});
  for (int want : {20, 90, 10, 30, 0}) EXPECT_EQ(heap.pop(), want);
  EXPECT_EQ(heap.size(), 0);
}

CASE("record ring keeps the last records in order and counts the others") {
  RecordRing<int> ring;
  ring.push(7);
  EXPECT_EQ(ring.num_dropped(), 0);
  ring.resize(4);
  for (int i = 0; i < 11; ++i) ring.push(i);
  std::vector<int> seen;
  ring.for_each([&](int v) { seen.push_back(v); });
  EXPECT(seen == (std::vector<int>{7, 8, 9, 10}));
  EXPECT_EQ(ring.num_dropped(), 7);
}

TILEWISE_TEST_MAIN
