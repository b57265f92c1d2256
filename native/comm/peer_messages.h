// The messages that processes of a device group exchange. See peers.h.
#pragma once
#include <cstdint>
#include <string>

namespace tilewise::comm {

/// Adds one to a signal of a device.
struct Post {
  uint64_t run = 0;
  int32_t device = 0;
  int32_t signal = 0;
  bool is_poisoned = false;
};

inline constexpr int64_t kMaxSymbols = 256;
inline constexpr int64_t kMaxText = 4096;

/// An order of the leader. kTalk: return from serve(), because the leader has sent something by other means.
struct Order {
  enum class Kind : uint8_t { kRun, kTalk };
  Kind kind = Kind::kTalk;
  bool clears_poison = false;  // the previous run has failed in some process
  int64_t program = 0;         // its number in every process
  int64_t list = 0;
  int64_t num_symbols = 0;
  int64_t symbols[kMaxSymbols] = {};
};

/// How a run has ended in one process. kStopped: it failed in another process.
struct Answer {
  enum class Kind : uint8_t { kDone, kTaskFailed, kTimeout, kStopped, kOther };
  Kind kind = Kind::kDone;
  int64_t tile = 0;
  int64_t worker = 0;
  int64_t device = 0;
  char op[256] = {};
  char message[kMaxText] = {};
  static void set(char* text, int64_t size, const std::string& value);
};

/// The progress of a process, which it reports about twenty times per second.
struct Progress {
  int64_t pid;
  uint64_t num_completed;
  bool is_at_work;  // a worker is inside a kernel
};

}  // namespace tilewise::comm
