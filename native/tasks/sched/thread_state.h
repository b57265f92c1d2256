// What the calling thread is doing, and for which runtime.
//
// Purpose: submit() must know whether it is called inside a task, and by which thread. Memory: thread-local.
#pragma once
#include <cstdint>
#include <string>

namespace tilewise::tasks {

struct Engine;

/// The submission context that this thread used last.
struct LastContext {
  uint64_t engine = 0;
  uint32_t thread = 0;
};

/// The kernel that runs on this thread, if any.
struct Running {
  const Engine* engine = nullptr;
  uint32_t thread = 0;
  uint32_t slot = 0;
  uint32_t parent = 0;     // slot + 1 of a task that may submit; 0: a leaf
  bool has_reason = false;  // pto_fail was called
};

// In the thread's static TLS block: an access is one instruction instead of a call, also in a shared library.
#define TILEWISE_HOT_TLS __attribute__((tls_model("initial-exec")))

inline constinit thread_local Running running TILEWISE_HOT_TLS;
inline constinit thread_local LastContext last_context TILEWISE_HOT_TLS;
inline constinit thread_local bool checks_at_once TILEWISE_HOT_TLS =
    false;  // a kernel on this thread returned PTO_INTERRUPTED
inline thread_local std::string failure_reason;  // pto_fail

/// pto_set_hooks: called around every blocking wait. Set once, before any wait.
struct Hooks {
  void* (*enter)() = nullptr;
  void (*leave)(void*) = nullptr;
  int (*interrupted)() = nullptr;
};
inline Hooks hooks;

/// Calls the host's hooks in its constructor and destructor.
class Blocking {
 public:
  Blocking() : state_(hooks.enter != nullptr ? hooks.enter() : nullptr) {}
  ~Blocking() {
    if (state_ != nullptr) hooks.leave(state_);
  }
  Blocking(const Blocking&) = delete;
  Blocking& operator=(const Blocking&) = delete;

 private:
  void* state_;
};

}  // namespace tilewise::tasks
