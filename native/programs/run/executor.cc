// See executor.h.
#include "programs/run/executor.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <system_error>

#include "base/quiet_thread.h"

namespace tilewise::programs {

namespace {

using std::chrono::milliseconds;

constexpr int64_t kMovers =
    4;  // threads that move tiles between memory and files: several requests at once keep a disk busy
constexpr int64_t kSettleNs = 30'000'000'000;
constexpr milliseconds kBrokenExit{2'000};   // close() of a broken executor leaves hung workers behind after this

std::thread start_worker(const std::shared_ptr<DeviceGroup>& group, int64_t device, int64_t worker) {
  return quiet_thread([group, device, worker] {
    const std::string name = "tw-d" + std::to_string(device) + "-w" + std::to_string(worker);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    group->devices[device]->engine().worker_loop(static_cast<uint32_t>(worker));
    group->state->worker_exited();
  });
}

/// check_options has checked that the process may use the core.
void bind_to_core(std::thread& worker, int64_t core) {
  if (core < 0) return;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  const int error = pthread_setaffinity_np(worker.native_handle(), sizeof(only), &only);
  if (error != 0) throw std::system_error(error, std::generic_category(), "core " + std::to_string(core));
}

std::thread start_mover(const std::shared_ptr<DeviceGroup>& group) {
  return quiet_thread([group] {
    pthread_setname_np(pthread_self(), "tw-file");
    group->state->files().work();
    group->state->worker_exited();
  });
}

std::thread start_listener(const std::shared_ptr<DeviceGroup>& group) {
  return quiet_thread([group] {
    pthread_setname_np(pthread_self(), "tw-peers");
    group->peers()->listen();
    group->state->worker_exited();
  });
}

}  // namespace

Executor::Executor(const ExecutorOptions& options)
    : options_(options), group_(std::make_shared<DeviceGroup>()), process_(getpid()) {
  check_options(options);
  int64_t num_local = 0;
  for (int64_t d = 0; d < options.num_devices; ++d) {
    const DeviceOptions of = device_options(options, d);
    auto device = is_local(options.group, d) ? std::make_unique<Device>(group_->state, of) : nullptr;
    num_local += device != nullptr ? 1 : 0;
    arenas_.push_back(device != nullptr ? device->arena() : make_arena(of));
    group_->devices.push_back(std::move(device));
    group_->arenas.push_back(arenas_.back()->data());
  }
  join_group(*group_, options.group, arenas_);
  const int64_t num_movers = options.file_bytes > 0 ? kMovers : 0;
  const int64_t num_listeners = group_->peers() != nullptr ? 1 : 0;
  group_->state->set_workers(num_local * options.workers_per_device + num_movers + num_listeners);
  try {
    for (int64_t m = 0; m < num_movers; ++m) threads_.push_back(start_mover(group_));
    if (num_listeners > 0) threads_.push_back(start_listener(group_));
    for (int64_t d = 0; d < options.num_devices; ++d) {
      if (!is_local(options.group, d)) continue;
      for (int64_t w = 0; w < options.workers_per_device; ++w) {
        threads_.push_back(start_worker(group_, d, w));
        bind_to_core(threads_.back(), core_of(options, d, w));
      }
    }
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    close();
    check<ResourceError>(false, "[programs.Executor] every worker needs a thread on its core; got '", error.what(),
                         "' after ", started, " threads; use fewer devices or workers");
  }
}

Executor::~Executor() { close(); }  // NOLINT(bugprone-exception-escape): throws only during a run, which owns it

void Executor::check_run(const Program& program, int64_t list, const std::string& name,
                         const std::vector<int64_t>& symbols) const {
  check<ArgumentError>(!closed_, "[programs.Executor.run] the executor must be open; got a closed one; make a new one");
  check<ArgumentError>(
      process_ == getpid(),
      "[programs.Executor.run] devices belong to the process that made them; got a run in a forked child, "
      "which has none of their workers; make an executor there");
  check<ArgumentError>(!broken_,
                       "[programs.Executor.run] an executor cannot be used after a deadline passed (a worker ",
                       "may never return); got another run; make a new one");
  check<ArgumentError>(program.finished(), "[programs.Executor.run] a program must be finished first; got an open one",
                       "; call finish()");
  check<ArgumentError>(program.num_devices() == options_.num_devices,
                       "[programs.Executor.run] program and executor must have the same devices; got ",
                       program.num_devices(), " and ", options_.num_devices, "; plan for this executor's mesh");
  for (int64_t d = 0; d < options_.num_devices; ++d) {
    const Needs& needs = program.needs(d);
    check<ArgumentError>(needs.arena_bytes <= options_.arena_bytes[d] && needs.num_handles <= options_.num_handles &&
                             needs.num_signals <= options_.num_signals,
                         "[programs.Executor.run] a program must fit the executor; got ", needs.arena_bytes, " bytes, ",
                         needs.num_handles, " handles, ", needs.num_signals, " signals on device ", d, " against ",
                         options_.arena_bytes[d], ", ", options_.num_handles, ", ", options_.num_signals,
                         "; make the executor with the plan's sizes");
    check<ArgumentError>(needs.num_workers <= options_.workers_per_device,
                         "[programs.Executor.run] a program must name workers that its devices have; got worker ",
                         needs.num_workers - 1, " on device ", d, " with ", options_.workers_per_device,
                         " workers; plan with as many workers per device");
    const int64_t file_begin = memory::Arena::file_begin(options_.arena_bytes[d]);
    check<ArgumentError>(needs.file_bytes == 0 || (program.class_of(d).memory_bytes == file_begin &&
                                                   needs.file_bytes <= options_.file_bytes),
                         "[programs.Executor.run] a program must fit the devices' files; got ", needs.file_bytes,
                         " bytes from ", program.class_of(d).memory_bytes, " on against ", options_.file_bytes,
                         " from ", file_begin, " on device ", d, "; make the executor with the plan's sizes");
  }
  check<ArgumentError>(list >= 0 && list < program.num_lists(),
                       "[programs.Executor.run] the program must have calls to run; got none under the name '", name,
                       "'; pass a name that was given to add_call()");
  const std::vector<int64_t>& bounds = program.symbols_max();
  check<ArgumentError>(symbols.size() == bounds.size(), "[programs.Executor.run] every symbol needs a value; got ",
                       symbols.size(), " for ", bounds.size(), "; pass one per symbol");
  for (size_t s = 0; s < symbols.size(); ++s) {
    check<ArgumentError>(symbols[s] >= 0 && symbols[s] <= bounds[s], "[programs.Executor.run] symbol ", s,
                         " must lie in [0, ", bounds[s], "]; got ", symbols[s], "; plan for a larger bound");
  }
}

Executor::Running::Running(Executor& executor) : running_(executor.running_) {
  check<ArgumentError>(!running_.exchange(true), "[programs.Executor.run] one run at a time; got a second from another",
                       " thread; wait for the first");
}

void Executor::run(std::shared_ptr<const Program> program, std::vector<int64_t> symbols, const std::string& name,
                   const Poll& poll, const std::function<void()>& meanwhile, int64_t program_number) {
  const Running running(*this);
  const int64_t list = program->find_list(name);
  check_run(*program, list, name, symbols);
  const uint64_t number = order_run(*group_, failed_, program_number, list, symbols);
  begin_run(std::move(program), list, std::move(symbols), failed_, number);
  if (meanwhile) meanwhile();
  const std::exception_ptr error = end_run(poll);
  if (error) std::rethrow_exception(error);
}

std::exception_ptr Executor::end_run(const Poll& poll) {
  if (!watch_run(*group_, options_.deadline_s, poll)) {
    broken_ = true;
    return error_here(*group_);
  }
  if (group_->peers() != nullptr) group_->peers()->end_posts();
  count_transfers();
  const std::exception_ptr error = error_anywhere(*group_);
  failed_ = error != nullptr;
  return error;
}

// Signals count on from their values at a device's begin(), so no message of an earlier run may arrive later.
void Executor::begin_run(std::shared_ptr<const Program> program, int64_t list, std::vector<int64_t> symbols,
                         bool clears_poison, uint64_t number) {
  DeviceGroup& group = *group_;
  if (group.peers() != nullptr && !group.peers()->settle(kSettleNs)) {
    broken_ = true;
    check<PeerLost>(
        false, "[programs.Executor.run] every process must end a run before the next; got no message from one for ",
        kSettleNs / 1'000'000'000, " s; start again from the last checkpoint");
  }
  group.program = std::move(program);
  group.symbols = std::move(symbols);
  group.state->begin_run(
      std::count_if(group.devices.begin(), group.devices.end(), [](auto& d) { return d != nullptr; }));
  ++num_runs_;
  const std::vector<std::string>& labels = group.program->labels();
  const RunContext run{.program = group.program.get(),
                       .list = list,
                       .symbols = &group.symbols,
                       .arenas = &group.arenas,
                       .devices = &group.devices,
                       .processes = &group.processes,
                       .hosts = &group.hosts,
                       .remote = group.remote.get(),
                       .tracing = tracing_};
  for (int64_t d = 0; d < options_.num_devices; ++d) {
    if (group.devices[d] == nullptr) continue;
    std::vector<Injection> planted;
    for (const PlannedInjection& fault : injections_) {
      const auto label = std::find(labels.begin(), labels.end(), fault.label);
      if (fault.device != d || label == labels.end()) continue;
      planted.push_back({fault.kind, label - labels.begin(), fault.index});
    }
    if (clears_poison) group.devices[d]->signals().clear_poison();
    group.devices[d]->begin(run, std::move(planted));
  }
  injections_.clear();
  if (group.peers() != nullptr) group.peers()->open_run(number);
  for (auto& device : group.devices) {
    if (device != nullptr) device->start();
  }
}

void Executor::count_transfers() {
  const std::vector<std::string>& labels = group_->program->labels();
  for (int64_t d = 0; d < options_.num_devices; ++d) {
    for (size_t label = 0; group_->devices[d] != nullptr && label < labels.size(); ++label) {
      const int64_t elements = group_->devices[d]->transfers(static_cast<int64_t>(label));
      if (elements == 0) continue;
      std::vector<int64_t>& per_device = transfers_[labels[label]];
      per_device.resize(options_.num_devices);
      per_device[d] += elements;
    }
  }
}

void Executor::close() {
  if (closed_) return;
  if (process_ != getpid()) {  // a fork has no threads to stop, and mutexes they held stay locked
    closed_ = true;
    group_->program = nullptr;
    new std::shared_ptr<DeviceGroup>(group_);
    new std::vector<std::thread>(std::move(threads_));
    return;
  }
  check_idle("close");
  closed_ = true;
  group_->state->close();
  for (auto& device : group_->devices) {
    if (device != nullptr) device->engine().close();
  }
  group_->state->files().close();
  if (group_->peers() != nullptr) group_->peers()->close();
  const bool all_left = !broken_ || group_->state->wait_exited(kBrokenExit);
  for (std::thread& thread : threads_) {
    if (all_left) {
      thread.join();
    } else {
      thread.detach();  // it shares ownership of the state that it uses
    }
  }
}

void Executor::check_device(int64_t device, const char* where) const {
  check<ArgumentError>(device >= 0 && device < options_.num_devices, "[programs.Executor.", where,
                       "] device must be one of ", options_.num_devices, "; got ", device, "; count from 0");
}

void Executor::check_idle(const char* where) const {
  check<ArgumentError>(!running_.load(), "[programs.Executor.", where,
                       "] no run may be in progress; got a call during one; wait for its end");
}

std::byte* Executor::memory(int64_t device, int64_t offset, int64_t bytes) const {
  check_device(device, "buffer");
  const int64_t size = options_.arena_bytes[device];
  check<ArgumentError>(offset >= 0 && bytes >= 0 && offset <= size - bytes,
                       "[programs.Executor.buffer] a buffer must lie inside the device's arena of ", size,
                       " bytes; got offset ", offset, " and ", bytes, " bytes; use the plan's offsets");
  check<ArgumentError>(arenas_[device]->is_mapped(),
                       "[programs.Executor.buffer] a buffer must be on this host; got device ", device,
                       " of another host; use move()");
  return group_->arenas[device] + offset;
}

void Executor::move(memory::SpillFile::Way way, int64_t device, int64_t offset, std::byte* memory,
                    int64_t bytes) const {
  check_device(device, "move");
  if (!arenas_[device]->is_mapped()) {
    group_->remote->move(way, device, offset, memory, bytes);
  } else {
    arenas_[device]->move(way, offset, memory, bytes);
  }
}

std::shared_ptr<memory::Arena> Executor::arena(int64_t device) const {
  check_device(device, "arena");
  return arenas_[device];
}

void Executor::trace(bool enable) {
  check_idle("trace");
  if (enable == tracing_) return;
  tracing_ = enable;
  for (auto& device : group_->devices) {
    if (device != nullptr) device->enable_trace(enable);
  }
}

std::vector<TimelineEntry> Executor::timeline() const {
  check_idle("timeline");
  std::vector<TimelineEntry> entries;
  if (broken_) return entries;  // a hung worker may still write
  for (int64_t d = 0; d < options_.num_devices; ++d) {
    if (group_->devices[d] == nullptr) continue;
    for (const tasks::TimelineRecord& record : group_->devices[d]->engine().timeline()) entries.push_back({d, record});
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.record.start_ns < b.record.start_ns; });
  return entries;
}

const std::vector<std::string>& Executor::timeline_labels() const {
  static const std::vector<std::string> kNoLabels;
  return group_->program ? group_->program->labels() : kNoLabels;
}

const std::map<std::string, std::vector<int64_t>>& Executor::transfers() const {
  check_idle("transfers");
  return transfers_;
}

void Executor::reset_transfers() {
  check_idle("reset_transfers");
  transfers_.clear();
}

std::vector<int64_t> Executor::allocated_bytes() const {
  std::vector<int64_t> bytes;
  for (const auto& device : group_->devices) bytes.push_back(device != nullptr ? device->bytes() : 0);
  return bytes;
}

ExecutorStats Executor::stats() const {
  check_idle("stats");
  ExecutorStats stats{
      .num_runs = num_runs_, .num_tasks = num_completed(*group_), .files = group_->state->files().traffic()};
  if (group_->remote != nullptr) stats.bytes_fetched = group_->remote->bytes_fetched();
  if (broken_) return stats;
  for (const auto& device : group_->devices) {
    if (device == nullptr) continue;
    stats.window_high_water = std::max(stats.window_high_water, device->window_high_water());
    stats.timeline_dropped += device->engine().timeline_dropped();
  }
  return stats;
}

void Executor::inject(Injected kind, int64_t device, std::string label, int64_t index) {
  check_idle("inject");
  check_device(device, "inject");
  injections_.push_back({kind, device, std::move(label), index});
}

}  // namespace tilewise::programs
