// See engine.h.
#include "tasks/engine/engine.h"

#include <unistd.h>

#include "tasks/engine/thread_slots.h"
#include "tasks/sched/sleep.h"

namespace tilewise::tasks {

Engine::Engine(const Store& its_store)
    : store(its_store),
      boxes(its_store.regions, its_store.header->max_regions, false),
      fences(its_store.header->is_shared != 0 || !protocols::register_membarrier()),
      kernels(store) {
  enter_registry(*this);
}

Engine::~Engine() {
  leave_registry(*this);
  if (peer.fd >= 0) close(peer.fd);
  if (!peer.path.empty()) drop_part(peer.path.c_str());
  unmap_store(store);
}

}  // namespace tilewise::tasks
