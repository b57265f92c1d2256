// Errors of a run, as run() throws them. bind/ maps each to its Python class.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilewise::programs {

/// A kernel threw. Only the run in which that happened throws it; the executor stays usable.
struct TaskFailed : std::runtime_error {
  TaskFailed(const std::string& message, std::string op, int64_t tile, int64_t worker, int64_t device)
      : std::runtime_error(message), op(std::move(op)), tile(tile), worker(worker), device(device) {}
  std::string op;
  int64_t tile;
  int64_t worker;
  int64_t device;
};

/// No device made progress for the deadline. The executor cannot be used afterwards.
struct CommTimeout : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A process of the device group has ended or does not respond. The executor cannot be used afterwards.
struct PeerLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A run ends because it has failed in another process, which reports the cause.
struct StoppedElsewhere : PeerLost {
  using PeerLost::PeerLost;
};

/// The caller's poll cancelled the run; tasks that had not started were skipped. The executor stays usable.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tilewise::programs
