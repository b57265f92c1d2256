// The executor of a process among several: joining the team, raises that come, orders and answers. See executor.h.
#include <algorithm>
#include <cstring>

#include "programs/run/executor.h"
#include "programs/run/team.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kPollNs = 50'000'000;

comm::Answer answer_of(const std::exception_ptr& error) {
  using Kind = comm::Answer::Kind;
  comm::Answer answer;
  if (error == nullptr) return answer;
  const auto say = [&](Kind kind, const char* message) {
    answer.kind = kind;
    comm::Answer::set(answer.message, sizeof(answer.message), message);
  };
  try {
    std::rethrow_exception(error);
  } catch (const TaskFailed& failed) {
    say(Kind::kTaskFailed, failed.what());
    comm::Answer::set(answer.op, sizeof(answer.op), failed.op);
    answer.tile = failed.tile;
    answer.worker = failed.worker;
    answer.device = failed.device;
  } catch (const CommTimeout& late) {
    say(Kind::kTimeout, late.what());
  } catch (const StoppedElsewhere& stopped) {
    say(Kind::kStopped, stopped.what());
  } catch (const std::exception& other) {
    say(Kind::kOther, other.what());
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

/// Between runs: the leader is there, and what leads to other hosts. That another process of this host is gone is for
/// the leader to say.
void check_order_will_come(comm::Peers& peers) {
  std::string how;
  const int64_t lost = peers.find_lost(kLostNs, &how);
  check<PeerLost>(lost < 0 || (lost != 0 && !peers.is_remote(lost)),
                  "[runtime.Executor.serve] the process that leads must stay, and all of other hosts; got process ",
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

// That another process has failed says less than what has come to light here since.
std::exception_ptr error_here(const Team& team) {
  std::exception_ptr first = team.state->first_error();
  return first != nullptr && is_stopped_elsewhere(first) ? team.state->last_error() : first;
}

std::exception_ptr error_anywhere(const Team& team) {
  std::exception_ptr own = error_here(team);
  if (team.peers() == nullptr || !team.peers()->leads() || (own != nullptr && !is_stopped_elsewhere(own))) return own;
  for (int64_t p = 1; p < team.peers()->num_processes(); ++p) {
    if (std::exception_ptr error = error_of(team.peers()->answer_of(p)); error != nullptr) return error;
  }
  return own;
}

std::string find_loss(Team& team) {
  std::string how;
  const int64_t lost = team.peers()->find_lost(kLostNs, &how);
  return lost < 0 ? "" : "process " + std::to_string(lost) + " " + how;
}

void join_team(Team& team, const TeamOptions& options, const std::vector<std::shared_ptr<memory::Arena>>& arenas) {
  if (options.processes.empty()) return;
  team.processes = options.processes;
  std::vector<bool> is_remote;
  for (int64_t p = 0; p < std::ssize(options.hosts); ++p) is_remote.push_back(options.is_remote(p));
  if (!options.hosts.empty()) {
    std::vector<memory::Arena*> own;
    for (int64_t d = 0; d < std::ssize(arenas); ++d) {
      own.push_back(team.devices[d] != nullptr ? arenas[d].get() : nullptr);
      team.hosts.push_back(options.hosts[options.processes[d]]);
    }
    team.remote = std::make_unique<RemoteMemory>(options.connection, options.number, options.processes, std::move(own),
                                                 [&team] { return find_loss(team); });
  }
  team.state->peers = std::make_unique<comm::Peers>(comm::PeersOptions{
      .process = options.process,
      .num_processes = std::ssize(options.peer_files),
      .file = options.team_file,
      .ends = options.peer_files,
      .take = [&team](const comm::Raise& raise) { take_raise(team, raise); },
      .remote = options.hosts.empty() ? comm::RemoteOptions{}
                                      : comm::RemoteOptions{.connection = options.connection,
                                                            .team = options.number,
                                                            .is_remote = std::move(is_remote),
                                                            .take =
                                                                [&team](int64_t from, const comm::Message& message,
                                                                        const std::string& text) {
                                                                  team.remote->take(from, message, text);
                                                                }},
  });
}

// A message names a device of this process and one of its signals, of the run that goes on, or nothing is touched.
void take_raise(Team& team, const comm::Raise& raise) {
  const bool is_device = raise.device >= 0 && raise.device < std::ssize(team.devices);
  Device* const device = is_device ? team.devices[raise.device].get() : nullptr;
  if (device == nullptr || raise.signal < 0 || raise.signal >= device->options().num_signals ||
      raise.run != team.peers()->run()) {
    team.state->fail(std::make_exception_ptr(
        PeerLost("[comm.Peers] a message must name a device and a signal of this process in this run; got device " +
                 std::to_string(raise.device) + ", signal " + std::to_string(raise.signal) + ", run " +
                 std::to_string(raise.run) + "; memory that processes share has been written over; start again")));
    return;
  }
  uint64_t poison = 0;
  if (raise.is_poisoned) {
    poison = team.state->stopped();
    if (poison == 0) {
      poison = team.state->fail(
          std::make_exception_ptr(StoppedElsewhere("[runtime.Executor.run] another process has failed")));
    }
  }
  device->signals()[raise.signal].raise(poison);
}

uint64_t order_run(const Team& team, bool clears_poison, int64_t list, const std::vector<int64_t>& symbols) {
  if (team.peers() == nullptr) return 0;
  check<ArgumentError>(team.peers()->leads(),
                       "[runtime.Executor.run] the process that leads orders runs; got a call in process ",
                       team.peers()->process(), "; call serve()");
  check<ArgumentError>(std::ssize(symbols) <= comm::kMaxSymbols,
                       "[runtime.Executor.run] a program of several processes has at most ", comm::kMaxSymbols,
                       " symbols; got ", symbols.size(), "; use fewer");
  comm::Order order;
  order.kind = comm::Order::Kind::kRun;
  order.clears_poison = clears_poison;
  order.list = list;
  order.num_symbols = std::ssize(symbols);
  std::copy(symbols.begin(), symbols.end(), order.symbols);
  return team.peers()->give(order);
}

void Executor::call_peers() {
  check_idle("call_peers");
  check<ArgumentError>(
      team_->peers() != nullptr && team_->peers()->leads(),
      "[runtime.Executor.call_peers] the process that leads calls the others; got a call in another, or without "
      "a team; make the executor with one");
  team_->peers()->give({});
}

void Executor::serve(const std::shared_ptr<const Program>& program) {
  const Running running(*this);
  check<ArgumentError>(
      team_->peers() != nullptr && !team_->peers()->leads(),
      "[runtime.Executor.serve] processes that do not lead serve; got a call in the leader, or without "
      "a team; call run()");
  while (true) {
    comm::Order order;
    uint64_t number = 0;
    while (!team_->peers()->await_order(kPollNs, &order, &number)) check_order_will_come(*team_->peers());
    if (order.kind == comm::Order::Kind::kTalk) return;
    const int64_t count = std::clamp<int64_t>(order.num_symbols, 0, comm::kMaxSymbols);
    std::vector<int64_t> symbols(order.symbols, order.symbols + count);
    check_run(*program, order.list, "of number " + std::to_string(order.list), symbols);
    begin_run(program, order.list, std::move(symbols), order.clears_poison, number);
    const std::exception_ptr error = end_run({});
    team_->peers()->tell(num_completed(*team_), false);  // what a run shorter than a look at the peers has not said
    team_->peers()->answer(answer_of(error));
    if (broken_) std::rethrow_exception(error);
  }
}

}  // namespace tilewise::programs
