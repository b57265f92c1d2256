// The spin lock alone.
#include "protocols/spin_lock.h"

#include <thread>

#include "base/testing.h"

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

TILEWISE_TEST_MAIN
