// See embedded.h.
#include "tasks/embedded.h"

#include <algorithm>
#include <bit>
#include <cfenv>

#include "tasks/dependencies.h"
#include "tasks/engine.h"
#include "tasks/hot.h"
#include "tasks/pool.h"
#include "tasks/queues.h"
#include "tasks/sleep.h"

namespace tilewise::tasks {

namespace {

Options options_of(uint32_t num_workers, uint32_t window, uint32_t num_objects) {
  Options options;
  options.num_workers = num_workers;
  options.window = window;
  options.max_lanes = 1;
  options.max_handles = std::max(num_objects, 1u);  // also the measure for chunks
  options.max_regions = 1;
  options.max_events = 1;
  options.heap_bytes = 1;
  options.starts_workers = false;
  std::fill_n(options.worker_types, num_workers, uint8_t{0xF});
  return options;
}

}  // namespace

Embedded::Embedded(Host& host, uint32_t num_workers, uint32_t window, uint32_t num_objects)
    : host_(host),
      window_(std::bit_ceil(std::max(window, 2u))),
      first_slot_(num_workers * window_),
      engine_(Engine::open(options_of(num_workers, window_, num_objects))),
      objects_(num_objects) {
  engine_->host_ = &host;
}

Embedded::~Embedded() { close(); }

void Embedded::close() {
  engine_->closed_ = true;  // nobody waits for tasks that will not start
  engine_->region_.header->closing.store(1, std::memory_order_seq_cst);
  wake_all();
}

void Embedded::wake_all() {
  Header& header = *engine_->region_.header;
  header.worker_word.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(header.worker_word, INT32_MAX, false);
}

uint32_t Embedded::take_task() {
  const uint32_t slot = engine_->find_free_slot(first_slot_ / window_);
  return slot == kNone ? kNone : slot - first_slot_;
}

void Embedded::submit(uint32_t task_index, const std::vector<Access>& accesses, int32_t priority, uint32_t worker) {
  Engine& engine = *engine_;
  const uint32_t slot = first_slot_ + task_index;
  Slot& task = engine.region_.slots[slot];
  const TaskRef self = make_ref(generation_in(task.wake.load(std::memory_order_relaxed)), slot);
  task.kernel = PTO_NO_KERNEL;
  task.priority = priority;
  task.next_waiter = 0;
  task.parent = 0;
  task.poison = 0;
  task.more_producers = 0;
  task.type_class = 0;
  task.num_producers = 0;
  task.num_params = 0;
  task.num_scalars = 0;
  task.flags = kIsEmbedded;
  task.num_tokens = 0;
  task.sequence.store(++num_submitted_, std::memory_order_relaxed);
  SeatPool pool{engine, engine.seat(worker)};
  const auto sink = [&](TaskRef producer) { engine.order_after(slot, producer, worker); };
  for (const Access& access : accesses) {
    collect(objects_[access.object], pool, access.use == Use::kRead ? PTO_INPUT : PTO_OUTPUT, sink);
  }
  for (const Access& access : accesses) {
    if (access.use == Use::kAfterAll) continue;
    record(objects_[access.object], pool, access.use == Use::kRead ? PTO_INPUT : PTO_OUTPUT, self);
  }
  engine.start_submitted(slot, worker);
}

// Called by threads of other engines too, which have no ring here. What the outside has released goes before what is
// merely ready: a peer waits for it.
void Embedded::resume(uint32_t task_index) {
  if (!host_.admit(task_index)) return;
  Engine& engine = *engine_;
  Header& header = *engine.region_.header;
  const uint32_t slot = first_slot_ + task_index;
  Slot& task = engine.region_.slots[slot];
  task.state.store(SlotState::kReady, std::memory_order_relaxed);
  push(engine.region_.queues[kUrgent], engine.region_.base,
       {task.priority, task.sequence.load(std::memory_order_relaxed), slot});
  header.num_urgent.fetch_add(1, std::memory_order_release);
  engine.wake_worker();
}

// After each task the host may submit, so that a chain of successors does not keep independent tasks from starting.
void Embedded::worker_loop(uint32_t worker) {
  std::fesetenv(FE_DFL_ENV);  // a thread inherits its maker's rounding and denormal modes; bits must not
  Engine& engine = *engine_;
  Header& header = *engine.region_.header;
  Idle idle;
  uint32_t slot = kNone;
  while (header.closing.load(std::memory_order_acquire) == 0) {
    const bool has_submitted = host_.submit_more(worker);
    if (slot != kNone && header.num_urgent.load(std::memory_order_relaxed) != 0) {
      engine.push_ready(slot, worker);
      engine.wake_worker();
      slot = kNone;
    }
    if (slot == kNone) slot = engine.take(worker, true);
    if (slot != kNone) {
      idle.reset();
      host_.execute(slot - first_slot_, worker);
      slot = engine.complete(slot, worker, PTO_OK, true);
      host_.completed();
    } else if (has_submitted) {
      idle.reset();
    } else if (!idle.is_idle()) {
      idle.begin();
    } else if (idle.should_sleep()) {
      engine.park_worker(worker);
      idle.reset();
    }
  }
}

uint64_t Embedded::num_ready() const {
  const Region& region = engine_->region_;
  uint64_t total = region.header->num_urgent.load(std::memory_order_relaxed);
  total += region.header->num_overflow.load(std::memory_order_relaxed);
  for (uint32_t w = 0; w < region.header->num_workers; ++w) {
    const uint64_t head = region.rings[w].head.load(std::memory_order_acquire);  // first: it never passes the tail
    total += region.rings[w].tail.load(std::memory_order_relaxed) - head;
  }
  return total;
}

uint64_t Embedded::num_completed() const { return engine_->num_completed(); }

bool Embedded::is_live(uint32_t task) const {
  return tasks::is_live(engine_->region_.slots[first_slot_ + task].wake.load(std::memory_order_acquire));
}

uint64_t Embedded::sequence(uint32_t task) const {
  return engine_->region_.slots[first_slot_ + task].sequence.load(std::memory_order_relaxed);
}

}  // namespace tilewise::tasks
