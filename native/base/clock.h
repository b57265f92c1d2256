// The clock of deadlines, waits and timelines.
#pragma once
#include <time.h>

#include <cstdint>

namespace tilewise {

/// Nanoseconds of CLOCK_MONOTONIC.
inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

}  // namespace tilewise
