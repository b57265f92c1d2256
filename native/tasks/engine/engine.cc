// See engine.h.
#include "tasks/engine/engine.h"

#include <unistd.h>

#include "tasks/engine/seats.h"
#include "tasks/sched/sleep.h"

namespace tilewise::tasks {

Engine::Engine(const Region& its_region)
    : region(its_region),
      boxes(its_region.regions, its_region.header->max_regions, false),
      fences(its_region.header->is_shared != 0 || !protocols::register_membarrier()),
      kernels(region) {
  enter_registry(*this);
}

Engine::~Engine() {
  leave_registry(*this);
  if (peer.fd >= 0) close(peer.fd);
  if (!peer.path.empty()) drop_part(peer.path.c_str());
  unmap_region(region);
}

}  // namespace tilewise::tasks
