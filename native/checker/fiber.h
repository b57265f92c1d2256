// Threads of a checked program, one at a time on one real thread: a stack each, and the switch between them.
//
// Who may call: explorer.cc. Memory: a stack per fiber, kept from one execution to the next. A fiber that is left in
// the middle is simply begun anew: nothing on its stack is destroyed, so nothing there may own memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace tilewise::checker {

#if defined(__x86_64__)
// Saves what a call preserves on this stack, and goes on from where another stack was left.
asm(R"(
.pushsection .text
.p2align 4
.type tilewise_checker_switch, @function
tilewise_checker_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size tilewise_checker_switch, . - tilewise_checker_switch
.popsection
)");
extern "C" void tilewise_checker_switch(void** save, void* load) asm("tilewise_checker_switch");

/// A stack and a place on it. The first switch to it calls `entry`, which never returns.
class Fiber {
 public:
  void begin(void (*entry)()) {
    if (stack_ == nullptr) stack_ = std::make_unique<std::byte[]>(kBytes);
    auto top = (reinterpret_cast<uintptr_t>(stack_.get()) + kBytes) & ~uintptr_t{15};
    auto* words = reinterpret_cast<void**>(top) - 2;
    words[0] = reinterpret_cast<void*>(entry);
    words[1] = nullptr;
    place_ = words - 6;
  }
  void switch_to(Fiber& other) { tilewise_checker_switch(&place_, other.place_); }

 private:
  static constexpr size_t kBytes = 128 << 10;
  std::unique_ptr<std::byte[]> stack_;
  void* place_ = nullptr;
};
#else
class Fiber {
 public:
  void begin(void (*entry)()) {
    if (stack_ == nullptr) stack_ = std::make_unique<std::byte[]>(kBytes);
    getcontext(&place_);
    place_.uc_stack.ss_sp = stack_.get();
    place_.uc_stack.ss_size = kBytes;
    place_.uc_link = nullptr;
    makecontext(&place_, entry, 0);
  }
  void switch_to(Fiber& other) { swapcontext(&place_, &other.place_); }

 private:
  static constexpr size_t kBytes = 128 << 10;
  std::unique_ptr<std::byte[]> stack_;
  ucontext_t place_{};
};
#endif

}  // namespace tilewise::checker
