// The executor of one of several processes: joining the device group, arriving posts, orders and answers. See
// executor.h.
#include <algorithm>
#include <cstring>

#include "programs/run/executor.h"
#include "programs/run/group.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kPollNs = 50'000'000;

comm::Answer answer_of(const std::exception_ptr& error) {
  using Kind = comm::Answer::Kind;
  comm::Answer answer;
  if (error == nullptr) return answer;
  const auto set = [&](Kind kind, const char* message) {
    answer.kind = kind;
    comm::Answer::set(answer.message, sizeof(answer.message), message);
  };
  try {
    std::rethrow_exception(error);
  } catch (const TaskFailed& failed) {
    set(Kind::kTaskFailed, failed.what());
    comm::Answer::set(answer.op, sizeof(answer.op), failed.op);
    answer.tile = failed.tile;
    answer.worker = failed.worker;
    answer.device = failed.device;
  } catch (const CommTimeout& late) {
    set(Kind::kTimeout, late.what());
  } catch (const StoppedElsewhere& stopped) {
    set(Kind::kStopped, stopped.what());
  } catch (const std::exception& other) {
    set(Kind::kOther, other.what());
  }
  return answer;
}

std::string text_of(const char* text, size_t size) { return {text, strnlen(text, size)}; }

std::exception_ptr error_of(const comm::Answer& answer) {
  const std::string message = text_of(answer.message, sizeof(answer.message));
  switch (answer.kind) {
    case comm::Answer::Kind::kDone:
    case comm::Answer::Kind::kStopped:
      return nullptr;
    case comm::Answer::Kind::kTaskFailed:
      return std::make_exception_ptr(
          TaskFailed(message, text_of(answer.op, sizeof(answer.op)), answer.tile, answer.worker, answer.device));
    case comm::Answer::Kind::kTimeout:
      return std::make_exception_ptr(CommTimeout(message));
    case comm::Answer::Kind::kOther:
      break;
  }
  return std::make_exception_ptr(PeerLost(message));
}

/// Between runs: throws if the leader or a process of another host is lost. The leader reports other lost processes of
/// this host.
void check_order_will_come(comm::Peers& peers) {
  std::string how;
  const int64_t lost = peers.find_lost(kLostNs, &how);
  check<PeerLost>(lost < 0 || (lost != 0 && !peers.is_remote(lost)),
                  "[programs.Executor.serve] the leader and the processes of other hosts must not end; got process ",
                  lost, ", which ", how, "; start again from the last checkpoint");
}

bool is_stopped_elsewhere(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const StoppedElsewhere&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

// An error of this process says more than that another process has failed.
std::exception_ptr error_here(const DeviceGroup& group) {
  std::exception_ptr first = group.state->first_error();
  return first != nullptr && is_stopped_elsewhere(first) ? group.state->last_error() : first;
}

std::exception_ptr error_anywhere(const DeviceGroup& group) {
  std::exception_ptr own = error_here(group);
  if (group.peers() == nullptr || !group.peers()->leads() || (own != nullptr && !is_stopped_elsewhere(own))) return own;
  for (int64_t p = 1; p < group.peers()->num_processes(); ++p) {
    if (std::exception_ptr error = error_of(group.peers()->answer_of(p)); error != nullptr) return error;
  }
  return own;
}

std::string find_loss(DeviceGroup& group) {
  std::string how;
  const int64_t lost = group.peers()->find_lost(kLostNs, &how);
  return lost < 0 ? "" : "process " + std::to_string(lost) + " " + how;
}

void join_group(DeviceGroup& group, const GroupOptions& options,
                const std::vector<std::shared_ptr<memory::Arena>>& arenas) {
  if (options.processes.empty()) return;
  group.processes = options.processes;
  std::vector<bool> is_remote;
  for (int64_t p = 0; p < std::ssize(options.hosts); ++p) is_remote.push_back(options.is_remote(p));
  if (!options.hosts.empty()) {
    std::vector<memory::Arena*> own;
    for (int64_t d = 0; d < std::ssize(arenas); ++d) {
      own.push_back(group.devices[d] != nullptr ? arenas[d].get() : nullptr);
      group.hosts.push_back(options.hosts[options.processes[d]]);
    }
    group.remote = std::make_unique<RemoteMemory>(
        options.connection, options.number, options.processes, std::move(own), [&group] { return find_loss(group); },
        [&group](int64_t from, const comm::Post& post) { group.state->peers->take_landed(from, post); });
  }
  group.state->peers = std::make_unique<comm::Peers>(comm::PeersOptions{
      .process = options.process,
      .num_processes = std::ssize(options.peer_files),
      .file = options.group_file,
      .ends = options.peer_files,
      .take = [&group](const comm::Post& post) { take_post(group, post); },
      .remote = options.hosts.empty() ? comm::RemoteOptions{}
                                      : comm::RemoteOptions{.connection = options.connection,
                                                            .group = options.number,
                                                            .is_remote = std::move(is_remote),
                                                            .take =
                                                                [&group](int64_t from, const comm::Message& message,
                                                                         const std::string& text) {
                                                                  group.remote->take(from, message, text);
                                                                }},
  });
}

// A message must name a device of this process, one of its signals and the current run; otherwise the run fails and no
// signal changes.
void take_post(DeviceGroup& group, const comm::Post& post) {
  const bool is_device = post.device >= 0 && post.device < std::ssize(group.devices);
  Device* const device = is_device ? group.devices[post.device].get() : nullptr;
  if (device == nullptr || post.signal < 0 || post.signal >= device->options().num_signals ||
      post.run != group.peers()->run()) {
    group.state->fail(std::make_exception_ptr(
        PeerLost("[comm.Peers] a message must name a device and a signal of this process in this run; got device " +
                 std::to_string(post.device) + ", signal " + std::to_string(post.signal) + ", run " +
                 std::to_string(post.run) + "; shared memory has been overwritten; start again")));
    return;
  }
  uint64_t poison = 0;
  if (post.is_poisoned) {
    poison = group.state->stopped();
    if (poison == 0) {
      poison = group.state->fail(
          std::make_exception_ptr(StoppedElsewhere("[programs.Executor.run] another process has failed")));
    }
  }
  device->signals()[post.signal].post(poison);
}

uint64_t order_run(const DeviceGroup& group, bool clears_poison, int64_t program, int64_t list,
                   const std::vector<int64_t>& symbols) {
  if (group.peers() == nullptr) return 0;
  check<ArgumentError>(group.peers()->leads(),
                       "[programs.Executor.run] only the leader (process 0) starts runs; got a call in process ",
                       group.peers()->process(), "; call serve()");
  check<ArgumentError>(std::ssize(symbols) <= comm::kMaxSymbols,
                       "[programs.Executor.run] a program of several processes must have at most ", comm::kMaxSymbols,
                       " symbols; got ", symbols.size(), "; use fewer");
  comm::Order order;
  order.kind = comm::Order::Kind::kRun;
  order.clears_poison = clears_poison;
  order.program = program;
  order.list = list;
  order.num_symbols = std::ssize(symbols);
  std::copy(symbols.begin(), symbols.end(), order.symbols);
  return group.peers()->send_order(order);
}

void Executor::call_peers() {
  check_idle("call_peers");
  check<ArgumentError>(
      group_->peers() != nullptr && group_->peers()->leads(),
      "[programs.Executor.call_peers] only the leader of a device group calls peers; got a call in another process, or "
      "without a device group; pass a device group to the executor");
  group_->peers()->send_order({});
}

void Executor::serve(const std::vector<std::shared_ptr<const Program>>& programs) {
  const Running running(*this);
  check<ArgumentError>(
      group_->peers() != nullptr && !group_->peers()->leads(),
      "[programs.Executor.serve] only processes that do not lead serve; got a call in the leader, or without a "
      "device group; call run()");
  while (true) {
    comm::Order order;
    uint64_t number = 0;
    while (!group_->peers()->await_order(kPollNs, &order, &number)) check_order_will_come(*group_->peers());
    if (order.kind == comm::Order::Kind::kTalk) return;
    const int64_t count = std::clamp<int64_t>(order.num_symbols, 0, comm::kMaxSymbols);
    std::vector<int64_t> symbols(order.symbols, order.symbols + count);
    check<ArgumentError>(order.program >= 0 && order.program < std::ssize(programs),
                         "[programs.Executor.serve] the leader must order a program that this process has; got number ",
                         order.program, " of ", programs.size(), "; send it first");
    const std::shared_ptr<const Program>& program = programs[order.program];
    check_run(*program, order.list, "of number " + std::to_string(order.list), symbols);
    begin_run(program, order.list, std::move(symbols), order.clears_poison, number);
    const std::exception_ptr error = end_run({});
    group_->peers()->report(num_completed(*group_), false);  // a short run may end before its first report
    group_->peers()->answer(answer_of(error));
    if (broken_) std::rethrow_exception(error);
  }
}

}  // namespace tilewise::programs
