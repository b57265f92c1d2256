// See embedded.h.
#include "tasks/embed/embedded.h"

#include <algorithm>
#include <bit>

#include "tasks/engine/pool.h"
#include "tasks/engine/thread_slots.h"
#include "tasks/open.h"
#include "tasks/order/dependencies.h"
#include "tasks/order/growing_pool.h"
#include "tasks/run/link.h"
#include "tasks/run/run.h"
#include "tasks/run/workers.h"
#include "tasks/sched/queues.h"
#include "tasks/sched/sleep.h"
#include "tasks/submit/submit.h"
#include "tasks/wait/room.h"

namespace tilewise::tasks {

namespace {

constexpr uint32_t kPerChunk = 7;

Options options_of(uint32_t num_workers, uint32_t window) {
  Options options;
  options.num_workers = num_workers;
  options.window = window;
  options.max_submitters = 1;
  options.max_handles = 1;
  // Enough for every task to wait for every other one, plus the workers' stocks, so the pool cannot run out.
  options.max_chunks = window * (window / kPerChunk + 2) + num_workers * 5 * ChunkPool::kStock;
  options.max_replayable = 0;
  options.max_regions = 1;
  options.max_events = 1;
  options.heap_bytes = 1;
  options.starts_workers = false;
  std::fill_n(options.worker_types, num_workers, uint8_t{0xF});
  return options;
}

/// The kernel of every task here.
int run_hosted(void* const*, const uint64_t*) {
  const Engine& engine = *running.engine;
  return engine.host->execute(engine.store.place_of(running.slot), running.thread) ? PTO_OK : PTO_LATER;
}

}  // namespace

/// The dependency states of objects. Only the submitter uses them, so their chunks come from a separate pool.
struct Embedded::Objects : GrowingPool {
  Objects(const Store& its_store, uint32_t num_objects, uint32_t window)
      : store(its_store), states(num_objects), marks(window) {}

  bool is_settled(TaskRef task) const {
    return TaskWord::has_ended(store.slots[slot_of(task)].word, generation_of(task));
  }

  const Store& store;
  std::vector<AccessState> states;
  std::vector<uint64_t> marks;  // per slot: the last task that waits for the slot's task
  uint64_t num_submitted = 0;
};

Embedded::Embedded(Host& host, uint32_t num_workers, uint32_t window, uint32_t num_objects)
    : host_(host),
      window_(std::bit_ceil(std::max(window, 2u))),
      first_slot_(num_workers * window_),
      engine_(open_engine(options_of(num_workers, window_))),
      objects_(std::make_unique<Objects>(engine_->store, num_objects, window_)) {
  engine_->host = &host;
  kernel_ = engine_->kernels.add("hosted", run_hosted, 0);
}

Embedded::~Embedded() { close(); }

uint64_t Embedded::bytes_needed(uint32_t num_workers, uint32_t window, uint32_t num_objects) {
  const uint64_t places = std::bit_ceil(std::max(window, 2u));
  return store_bytes(options_of(num_workers, static_cast<uint32_t>(places))) + places * sizeof(uint64_t) +
         uint64_t{num_objects} * sizeof(AccessState);
}

uint64_t Embedded::bytes() const {
  return engine_->store.header->total_bytes + objects_->marks.size() * sizeof(uint64_t) +
         objects_->states.size() * sizeof(AccessState);
}

void Embedded::close() {
  engine_->is_closed = true;  // so that no thread waits for tasks that will not start
  engine_->store.header->closing.store(1, std::memory_order_seq_cst);
  wake_all();
}

void Embedded::wake_all() { engine_->store.header->parked.wake_all(false); }

uint32_t Embedded::take_task() {
  const uint32_t slot = find_free_slot(*engine_, first_slot_ / window_);
  return slot == kNone ? kNone : slot - first_slot_;
}

void Embedded::submit(uint32_t task_index, const std::vector<Access>& accesses, int32_t priority, uint32_t worker,
                      Target target) {
  Engine& engine = *engine_;
  Objects& objects = *objects_;
  const uint64_t sequence = ++objects.num_submitted;
  const uint32_t slot = first_slot_ + task_index;
  Slot& task = engine.store.slots[slot];
  const TaskRef self = engine.store.name_at(slot);
  uint16_t flags = kIsEmbedded;
  if (target.worker != 0) [[unlikely]] {
    flags |= target.is_preference ? kHasTarget | kPrefersTarget : kHasTarget;
    engine.store.args[slot].target_worker = target.worker;
  }
  task.begin(kernel_, priority, 0, flags);
  task.sequence.store(sequence, std::memory_order_relaxed);
  TaskWord::watch(task.word, generation_of(self));  // so that its completion is reported to the host
  const auto sink = [&](TaskRef producer) {
    uint64_t& last = objects.marks[slot_of(producer) - first_slot_];
    if (last == sequence || objects.is_settled(producer)) return;
    last = sequence;
    add_producer(engine, task, producer, worker);
  };
  for (const Access& access : accesses) {
    collect(objects.states[access.object], objects, access.use == Use::kRead ? PTO_INPUT : PTO_OUTPUT, sink);
  }
  for (const Access& access : accesses) {
    if (access.use == Use::kAfterAll) continue;
    record(objects.states[access.object], objects, access.use == Use::kRead ? PTO_INPUT : PTO_OUTPUT, self);
  }
  if (engine.active_trace.load(std::memory_order_relaxed) != nullptr)
    note_submission(engine, engine.store.args[slot], worker);
  start_submitted(engine, slot, worker);
}

// Called by threads of other engines too.
void Embedded::resume(uint32_t task_index) {
  if (host_.admit(task_index)) make_ready_from_outside(*engine_, first_slot_ + task_index);
}

void Embedded::worker_loop(uint32_t worker) { tasks::worker_loop(*engine_, worker); }

void Embedded::trace(uint32_t max_records) {
  engine_->active_trace.store(nullptr);
  engine_->trace = max_records == 0 ? nullptr : std::make_unique<Trace>(engine_->store, max_records);
  engine_->active_trace.store(engine_->trace.get());
}

std::vector<TimelineRecord> Embedded::timeline() const {
  if (engine_->trace == nullptr) return {};
  std::vector<pto_trace_task> records(engine_->trace->tasks(nullptr, 0));
  engine_->trace->tasks(records.data(), records.size());
  std::vector<TimelineRecord> timeline;
  for (const pto_trace_task& r : records) {
    timeline.push_back({r.worker, r.kernel, static_cast<int64_t>(r.task), r.submit_ns, r.ready_ns, r.start_ns, r.end_ns,
                        r.priority, r.scope_depth});
  }
  return timeline;
}

int64_t Embedded::timeline_dropped() const {
  return engine_->trace == nullptr ? 0 : static_cast<int64_t>(engine_->trace->num_dropped());
}

uint64_t Embedded::num_ready(uint32_t worker) const {
  const Header& header = *engine_->store.header;
  uint64_t total =
      uint64_t{header.num_urgent.load(std::memory_order_relaxed)} +
      header.num_overflow.load(std::memory_order_relaxed) + header.num_background.load(std::memory_order_relaxed) +
      engine_->store.queues[kNumSharedQueues * header.num_classes + worker].size.load(std::memory_order_relaxed);
  for (uint32_t w = 0; w < header.num_workers; ++w) total += engine_->store.rings[w].size();
  return total;
}

uint64_t Embedded::num_completed() const { return tasks::num_completed(*engine_); }

bool Embedded::is_live(uint32_t task) const {
  return TaskWord::is_live(TaskWord::look(engine_->store.slots[first_slot_ + task].word));
}

uint64_t Embedded::sequence(uint32_t task) const {
  return engine_->store.slots[first_slot_ + task].sequence.load(std::memory_order_relaxed);
}

}  // namespace tilewise::tasks
