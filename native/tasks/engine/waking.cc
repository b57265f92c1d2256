// See waking.h.
#include "tasks/engine/waking.h"

namespace tilewise::tasks {

// Workers of one class are alike, so one is enough; otherwise the right one must be among the woken.
void wake_sleeper(Engine& engine, bool all) {
  Header& header = *engine.region.header;
  if (header.num_parked.load(std::memory_order_relaxed) == 0) return wake_waiters(engine);
  header.worker_word.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(header.worker_word, all || header.num_classes > 1 ? INT32_MAX : 1, header.is_shared != 0);
}

void wake_waiters(Engine& engine) {
  Header& header = *engine.region.header;
  light_barrier(engine.fences);
  if (header.num_waiting.load(std::memory_order_relaxed) == 0) return;
  header.wait_word.fetch_add(1, std::memory_order_acq_rel);
  futex_wake(header.wait_word, INT32_MAX, header.is_shared != 0);
}

}  // namespace tilewise::tasks
