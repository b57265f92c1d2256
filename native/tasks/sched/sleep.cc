// See sleep.h.
#include "tasks/sched/sleep.h"

namespace tilewise::tasks {

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

}  // namespace tilewise::tasks
