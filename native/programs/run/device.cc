// See device.h.
#include "programs/run/device.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <sstream>
#include <thread>

#include "programs/remote/remote_tiles.h"
#include "programs/run/errors.h"
#include "protocols/spin_lock.h"

namespace tilewise::programs {

namespace {

constexpr std::chrono::milliseconds kDelay{1};  // of a planted fault
constexpr int64_t kIssueBatch = 32;             // submissions per turn
constexpr uint32_t kTimelineRecords = 1 << 16;

std::unique_ptr<memory::SpillFile> file_of(const DeviceOptions& options) {
  if (options.file_bytes == 0) return nullptr;
  if (options.spill_file < 0) return std::make_unique<memory::SpillFile>(options.file_directory, options.file_bytes);
  return std::make_unique<memory::SpillFile>(fcntl(options.spill_file, F_DUPFD_CLOEXEC, 0), options.file_bytes);
}

}  // namespace

std::shared_ptr<memory::Arena> make_arena(const DeviceOptions& options) {
  if (options.is_remote) {
    return std::make_shared<memory::Arena>(memory::Arena::Addresses{options.arena_bytes, options.file_bytes});
  }
  if (options.arena_file < 0) return std::make_shared<memory::Arena>(options.arena_bytes, file_of(options));
  return std::make_shared<memory::Arena>(options.arena_file, options.arena_bytes, file_of(options));
}

Device::Device(std::shared_ptr<RunState> state, const DeviceOptions& options)
    : state_(std::move(state)),
      options_(options),
      arena_(make_arena(options)),
      signals_(options.num_signals),
      engine_(*this, static_cast<uint32_t>(options.num_workers), static_cast<uint32_t>(options.window),
              static_cast<uint32_t>(options.num_handles + options.num_signals)),
      tasks_(engine_.window()) {
  for (uint32_t t = 0; t < engine_.window(); ++t) {
    TaskWaiter& waiter = tasks_[t].waiter;
    waiter.device = this;
    waiter.task = t;
    waiter.on_posted = [](comm::Waiter* posted, uint64_t poison) {
      const auto* of_task = static_cast<TaskWaiter*>(posted);
      of_task->device->signal_posted(of_task->task, poison);
    };
  }
  for (int64_t w = 0; w < options.num_workers; ++w) {
    workers_.push_back(std::make_unique<Worker>(w, options.scratch_bytes));
  }
}

DeviceBytes bytes_needed(const DeviceOptions& options) {
  const auto window = static_cast<uint32_t>(options.window);
  const auto engine = tasks::Embedded::bytes_needed(static_cast<uint32_t>(options.num_workers), window,
                                                    static_cast<uint32_t>(options.num_handles + options.num_signals));
  const auto own = std::bit_ceil(uint64_t{std::max(window, 2u)}) * sizeof(Task) + options.num_workers * sizeof(Worker);
  return {options.num_workers * options.scratch_bytes, options.num_signals * static_cast<int64_t>(sizeof(comm::Signal)),
          static_cast<int64_t>(engine + own)};
}

int64_t Device::bytes() const {
  int64_t total = arena_->bytes() + signals_.bytes() + static_cast<int64_t>(engine_.bytes());
  for (const auto& worker : workers_) total += worker->bytes();
  return total + static_cast<int64_t>(tasks_.size() * sizeof(Task));
}

void Device::begin(const RunContext& run, std::vector<Injection> injections) {
  run_ = run;
  const ExpandContext context{run.program, options_.index,       run.symbols,
                              run.arenas,  options_.num_handles, run.remote != nullptr ? run.hosts : nullptr};
  issuer_.begin(context, run.list, signals_, std::move(injections));
  transfers_ = std::vector<std::atomic<int64_t>>(run.program->labels().size());
  if (run.tracing) enable_trace(true);
}

void Device::start() {
  issue_turn_.open();
  engine_.wake_all();
}

void Device::enable_trace(bool enable) { engine_.trace(enable ? kTimelineRecords : 0); }

bool Device::has_more() const {
  return issue_turn_.is_free() && issue_turn_.num_live() <= options_.window - std::max<int64_t>(options_.window / 8, 1);
}

bool Device::submit_more(uint32_t worker) {
  if (state_->peers != nullptr) state_->peers->look();
  const auto low_water = static_cast<uint64_t>(2 * options_.num_workers + 2);
  if (!has_more() || engine_.num_ready(worker) >= low_water) return false;
  if (issue_turn_.take()) issue(worker);
  return true;
}

// The number of live tasks is updated when issuing pauses, not per task.
void Device::issue(uint32_t worker) {
  const int64_t live = issue_turn_.num_live();
  const int64_t limit = std::min(kIssueBatch, options_.window - live);
  bool is_done = false;
  int64_t count = 0;
  for (; count < limit; ++count) {
    is_done = !issuer_.prepare();
    if (is_done) break;
    const uint32_t task = engine_.take_task();
    if (task == tasks::kNone) break;
    submit(task, worker);
  }
  window_high_water_ = std::max(window_high_water_, live + count);
  if (!is_done) {
    issue_turn_.pause(count);
    return;
  }
  if (issue_turn_.close(count)) state_->device_finished();
}

void Device::submit(uint32_t number, uint32_t worker) {
  Task& task = tasks_[number];
  issuer_.fill(task, accesses_);
  const auto priority = static_cast<int32_t>(std::clamp<int64_t>(task.priority, INT32_MIN, INT32_MAX));
  engine_.submit(number, accesses_, priority, worker, task.target);
}

// After a wait has registered the task, this thread must not access it: the poster owns it.
bool Device::admit(uint32_t number) {
  Task& task = tasks_[number];
  const bool are_met = protocols::wait_in_turn(task.num_waits_begun, task.waits.size(), [&](size_t which) {
    const TaskWait& wait = task.waits[which];
    task.waiter.threshold = wait.threshold;
    uint64_t poison = 0;
    if (!signals_[wait.signal].wait(&task.waiter, &poison)) return false;
    if (task.poison == 0) task.poison = poison;
    return true;
  });
  if (!are_met) return false;
  if (task.is_moved) return true;
  if (task.instr->moves != Moves::kNothing) return !start_transfer(number);
  if (task.remote.empty() || task.poison != 0 || state_->stopped() != 0) return true;
  bring_tiles(
      *run_.remote, task, [&](const RemoteRows& rows) { return post_to_owner(task, rows); },
      [this, number] { signal_posted(number, 0); });
  return false;
}

// Returns false if there is nothing to move. Once the transfer is queued, this thread must not access the task.
bool Device::start_transfer(uint32_t place) {
  Task& task = tasks_[place];
  if (task.poison != 0 || state_->stopped() != 0 || task.injected != Injected::kNothing) return false;
  const bool is_read = task.instr->moves == Moves::kFromFile;
  const kernels::TileView& to = task.views()[0];
  const kernels::TileView& from = task.views()[1];
  const int64_t number = task.call->binding[task.instr->operands[0].slot];
  const Tensor& tensor = run_.program->class_of(options_.index).tensors[number];
  const int64_t rows = std::min(to.rows, from.rows);
  const int64_t bytes = rows * std::min(to.stride, from.stride) * size_of(tensor.dtype);
  if (bytes <= 0) return false;
  const auto* const in_file = static_cast<std::byte*>(is_read ? from.data : to.data);
  const Transfer transfer{arena_->file(), is_read ? memory::SpillFile::Way::kRead : memory::SpillFile::Way::kWrite,
                          static_cast<std::byte*>(is_read ? to.data : from.data),
                          in_file - arena_->data() - arena_->file_begin(), bytes};
  task.is_moved = true;
  state_->files().push(transfer, [this, place](const std::exception_ptr& error) {
    uint64_t poison = 0;
    if (error != nullptr) {
      const Task& moved = tasks_[place];
      const std::string& label = run_.program->labels()[moved.instr->label];
      poison = state_->fail(std::make_exception_ptr(failure_of(moved, label, options_.index, -1, error)));
    }
    signal_posted(place, poison);
  });
  return true;
}

void Device::signal_posted(uint32_t number, uint64_t poison) {
  Task& task = tasks_[number];
  if (task.poison == 0) task.poison = poison;
  engine_.resume(number);
}

bool Device::execute(uint32_t task_number, uint32_t number) {
  Task& task = tasks_[task_number];
  uint64_t poison = 0;
  if (!task.has_sent_tiles) {
    Worker& worker = *workers_[number];
    worker.begin(task);
    if (task.injected == Injected::kStall) worker.stall(*state_);
    if (task.injected == Injected::kDelay) std::this_thread::sleep_for(kDelay);
    poison = task.poison != 0 ? task.poison : state_->stopped();
    if (poison == 0) {
      const std::string& label = run_.program->labels()[task.instr->label];
      if (!task.skips_kernel) poison = worker.run_kernel(task, label, options_.index, *state_);
      if (poison == 0 && task.transfers > 0) {
        transfers_[task.instr->label].fetch_add(task.transfers, std::memory_order_relaxed);
      }
    }
    if (poison == 0 && task.sends_tiles) {
      worker.end();
      task.has_sent_tiles = true;
      send_tiles(
          *run_.remote, task, [&](const RemoteRows& rows) { return post_to_owner(task, rows); },
          [this, task_number] { signal_posted(task_number, 0); });
      return false;
    }
  }
  if (task.staging.data != nullptr) {
    run_.remote->give_back(task.staging);
    task.staging = {};
  }
  post_signals(task, poison);
  workers_[number]->end();
  return true;
}

tasks::TraceLabel Device::label_of(uint32_t number) const {
  const Task& task = tasks_[number];
  return {static_cast<int32_t>(task.instr->label), task.row_begin};
}

void Device::stay() {
  if (state_->peers != nullptr) state_->peers->stay();
}

bool Device::leave() { return state_->peers == nullptr || state_->peers->leave(); }

void Device::completed() {
  if (issue_turn_.left()) state_->device_finished();
}

std::optional<TravellingPost> Device::post_to_owner(const Task& task, const RemoteRows& rows) const {
  const Values values{run_.symbols->data(), nullptr, task.call->numbers.data()};
  for (size_t n = 0; n < task.instr->notifies.size(); ++n) {
    const BoundNotify& notify = task.instr->notifies[n];
    if (notify.device != rows.device) continue;
    return TravellingPost{static_cast<int64_t>(n),
                          {.run = state_->peers->run(),
                           .device = static_cast<int32_t>(notify.device),
                           .signal = static_cast<int32_t>(notify.signal.at(values, task.index))}};
  }
  return std::nullopt;
}

void Device::post_signals(const Task& task, uint64_t poison) {
  const Values values{run_.symbols->data(), nullptr, task.call->numbers.data()};
  for (size_t n = 0; n < task.instr->notifies.size(); ++n) {
    if (static_cast<int64_t>(n) == task.num_sent_post) continue;
    const BoundNotify& notify = task.instr->notifies[n];
    const int64_t signal = notify.signal.at(values, task.index);
    if (Device* const target = (*run_.devices)[notify.device].get(); target != nullptr) {
      target->signals()[signal].post(poison);
    } else {
      state_->peers->post((*run_.processes)[notify.device], {.run = state_->peers->run(),
                                                             .device = static_cast<int32_t>(notify.device),
                                                             .signal = static_cast<int32_t>(signal),
                                                             .is_poisoned = poison != 0});
    }
  }
}

std::vector<BlockedWait> Device::blocked() {
  const auto before = issue_turn_.hold();
  std::vector<BlockedWait> waits;
  for (uint32_t t = 0; t < engine_.window(); ++t) {
    if (!engine_.is_live(t)) continue;
    for (const TaskWait& wait : tasks_[t].waits) {
      if (signals_[wait.signal].value() >= wait.threshold) continue;
      waits.push_back({engine_.sequence(t), tasks_[t].instr, tasks_[t].index, wait.signal, wait.threshold});
    }
  }
  issue_turn_.release(before);
  std::sort(waits.begin(), waits.end(), [](auto& a, auto& b) { return a.sequence < b.sequence; });
  return waits;
}

}  // namespace tilewise::programs
