// Lock and ring on their own.
#include "protocols/spin_lock.h"

#include <thread>

#include "base/testing.h"
#include "protocols/record_ring.h"

using namespace tilewise::protocols;

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
