// Runs kernels with the default floating-point modes on every thread.
//
// Purpose: a result must not depend on the thread that ran the task. Workers begin with the default modes. A thread
// that helps while it waits has its own (rounding, flushing of denormal numbers, traps), which are saved and restored
// around the help. Who may call: any thread. Cost: two reads; writes only if the modes differ. Memory: on the stack.
#pragma once
#include <cfenv>
#include <cstdint>

namespace tilewise::tasks {

class DefaultFloatModes {
 public:
  DefaultFloatModes() : differs_(read()) {
    if (!differs_) return;
    std::fegetenv(&env_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatModes() {
    if (differs_) std::fesetenv(&env_);
  }
  DefaultFloatModes(const DefaultFloatModes&) = delete;
  DefaultFloatModes& operator=(const DefaultFloatModes&) = delete;

 private:
  /// Whether any mode is not the default; exception flags do not count.
  static bool read() {
#if defined(__x86_64__)
    uint32_t sse = 0;
    uint16_t x87 = 0;
    asm volatile("stmxcsr %0" : "=m"(sse));
    asm volatile("fnstcw %0" : "=m"(x87));
    return (sse & 0xFFC0) != 0x1F80 || (x87 & 0x0F3F) != 0x033F;
#elif defined(__aarch64__)
    uint64_t control = 0;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control != 0;
#else
    return true;
#endif
  }

  bool differs_;
  std::fenv_t env_{};
};

}  // namespace tilewise::tasks
