// A processor for each thread of a driver.
#pragma once
#include <sched.h>

/// Keeps this thread on one of the processors that it may use, counted from 0; a hint.
inline void pin_to(long number) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (size_t processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (!CPU_ISSET(processor, &allowed) || number-- != 0) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    sched_setaffinity(0, sizeof(own), &own);
    return;
  }
}
