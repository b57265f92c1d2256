// See waking.h.
#include "tasks/engine/waking.h"

namespace tilewise::tasks {

// Workers of one class are equal, so waking one suffices; otherwise all are woken, so that the right one is.
void wake_sleeper(Engine& engine, bool all) {
  Header& header = *engine.store.header;
  if (!header.parked.has_any()) return wake_waiters(engine);
  header.parked.wake(all || header.num_classes > 1 ? INT32_MAX : 1, header.is_shared != 0);
}

void wake_waiters(Engine& engine) {
  Header& header = *engine.store.header;
  header.waiting.wake_all_if_any(engine.fences, header.is_shared != 0);
}

}  // namespace tilewise::tasks
