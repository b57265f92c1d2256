// The threads of a checked program, which take turns on one real thread: a stack per thread, and the switch between
// them.
//
// Who may call: explorer.cc. Memory: a stack per fiber, reused for every execution. An abandoned fiber is restarted
// without destructors of the objects on its stack, so these must not own memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace tilewise::checker {

// Saves the callee-saved registers on this stack, and continues on another stack.
#if defined(__x86_64__)
inline constexpr int kSavedWords = 7;
inline constexpr int kReturnWord = 6;
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
#elif defined(__aarch64__)
inline constexpr int kSavedWords = 20;
inline constexpr int kReturnWord = 11;
asm(R"(
.pushsection .text
.p2align 4
.type tilewise_checker_switch, %function
tilewise_checker_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size tilewise_checker_switch, . - tilewise_checker_switch
.popsection
)");
#else
#error "the checker switches stacks on x86-64 and aarch64"
#endif
extern "C" void tilewise_checker_switch(void** save, void* load) asm("tilewise_checker_switch");

/// A stack and a position on it. The first switch to it calls `entry`, which never returns.
class Fiber {
 public:
  void begin(void (*entry)()) {
    if (stack_ == nullptr) stack_ = std::make_unique<std::byte[]>(kBytes);
    const auto top = (reinterpret_cast<uintptr_t>(stack_.get()) + kBytes) & ~uintptr_t{15};
    auto** const words = reinterpret_cast<void**>(top) - 2 - kSavedWords + kSavedWords % 2;
    words[kReturnWord] = reinterpret_cast<void*>(entry);
    place_ = static_cast<void*>(words);
  }
  void switch_to(Fiber& other) { tilewise_checker_switch(&place_, other.place_); }

 private:
  static constexpr size_t kBytes = 128 << 10;
  std::unique_ptr<std::byte[]> stack_;
  void* place_ = nullptr;
};

}  // namespace tilewise::checker
