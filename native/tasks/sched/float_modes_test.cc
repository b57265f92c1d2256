// Kernels compute with the default floating-point modes, whatever modes are set in the thread that opened the runtime
// or that helps while it waits.
#include <cfenv>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

void flush_denormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush results and operands to zero
#elif defined(__aarch64__)
  __builtin_aarch64_set_fpcr(__builtin_aarch64_get_fpcr() | 1u << 24);
#endif
}

/// results[0] = x + y / 2^24: the next float when it rounds upwards; results[1] = a quarter of the smallest normal
/// number.
int round_kernel(void* const* buffers, const uint64_t*) {
  auto* results = static_cast<volatile float*>(buffers[0]);
  volatile float one = 1.0f, tiny = 0x1p-30f, least = 0x1p-126f, quarter = 0.25f;
  results[0] = one + tiny;
  results[1] = least * quarter;
  return PTO_OK;
}

}  // namespace

CASE("rounding and denormals of the opener's thread do not reach the workers") {
  std::vector<float> of_opener(2), of_worker(2);
  std::fesetround(FE_UPWARD);
  flush_denormals();
  {
    Runtime runtime(1);
    void* const buffers[] = {of_opener.data()};
    round_kernel(buffers, nullptr);
    const pto_task task = runtime.submit(runtime.kernel("round", round_kernel), {out(runtime.add(of_worker))});
    while (pto_is_complete(runtime, task) == 0) std::this_thread::yield();  // pto_wait might run it on this thread
  }
  std::fesetenv(FE_DFL_ENV);
  EXPECT_EQ(of_worker[0], 1.0f);
  EXPECT_EQ(of_worker[1], 0x1p-128f);
  EXPECT(of_opener[0] > 1.0f);  // the opener's modes were set
  EXPECT_EQ(of_opener[1], 0.0f);
}

CASE("a thread that helps runs kernels with the default modes, then has its own again") {
  std::vector<float> of_helper(2), as_before(2), replayed(2), in_window(2);
  Runtime runtime(0);  // without workers
  const pto_kernel round = runtime.kernel("round", round_kernel);
  runtime.submit(round, {out(runtime.add(of_helper))});
  EXPECT_EQ(pto_record_begin(runtime), 0);
  runtime.submit(round, {out(runtime.add(replayed))});
  const pto_recording recording = pto_record_end(runtime);
  const pto_handle hw = runtime.add(in_window);
  std::fesetround(FE_UPWARD);
  flush_denormals();
  EXPECT_EQ(pto_wait_all(runtime, PTO_FOREVER), 0);
  for (int rounds = 0; rounds < 3; ++rounds) EXPECT_EQ(pto_replay(runtime, recording, nullptr, nullptr, 0), 0);
  for (int t = 0; t < 3000; ++t) runtime.submit(round, {out(hw)});  // submissions beyond the window help
  void* const buffers[] = {as_before.data()};
  round_kernel(buffers, nullptr);
  const int rounding = std::fegetround();
  std::fesetenv(FE_DFL_ENV);
  EXPECT(replayed[0] == 1.0f && replayed[1] == 0x1p-128f && in_window[0] == 1.0f && in_window[1] == 0x1p-128f);
  EXPECT_EQ(of_helper[0], 1.0f);
  EXPECT_EQ(of_helper[1], 0x1p-128f);
  EXPECT(as_before[0] > 1.0f);
  EXPECT_EQ(as_before[1], 0.0f);
  EXPECT_EQ(rounding, FE_UPWARD);
}

TILEWISE_TEST_MAIN
