// Built-in kernels check the number and the size of their arguments before anything is submitted.
#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

struct Fixture {
  std::vector<float> a = std::vector<float>(16, 1), b = std::vector<float>(8, 2);
  std::vector<uint8_t> odd = std::vector<uint8_t>(30);
  Runtime runtime{1};
  pto_handle ha = runtime.add(a), hb = runtime.add(b);
  pto_kernel copy = pto_kernel_find(runtime, "copy"), fill = pto_kernel_find(runtime, "fill"),
             sum = pto_kernel_find(runtime, "sum_f32");

  /// The submission is rejected, and the error message contains `text`.
  void rejects(pto_kernel kernel, std::vector<pto_param> params, const Extra& extra, const char* text) {
    const uint64_t before = runtime.stats().num_submitted;
    EXPECT_EQ(runtime.submit(kernel, params, extra), 0u);
    EXPECT_EQ(pto_last_status(), PTO_BAD_ARGUMENT);
    if (!has(pto_last_error(), text)) std::fprintf(stderr, "  message: %s\n", pto_last_error());
    EXPECT(has(pto_last_error(), text));
    EXPECT_EQ(runtime.stats().num_submitted, before);
  }
};

}  // namespace

CASE("a built-in kernel takes its own number of parameters and scalars") {
  Fixture f;
  const char* text = "takes a target and a source";
  f.rejects(f.sum, {}, {}, text);
  f.rejects(f.sum, {inout(f.ha)}, {.scalars = {32}}, text);
  f.rejects(f.sum, {inout(f.ha), in(f.hb), in(f.hb)}, {.scalars = {32}}, text);
  f.rejects(f.sum, {inout(f.ha), in(f.hb)}, {}, text);
  f.rejects(f.sum, {inout(f.ha), in(f.hb)}, {.scalars = {32, 0}}, text);
  f.rejects(f.copy, {out(f.ha)}, {.scalars = {32}, .priority = 1}, text);
  f.rejects(f.fill, {out(f.ha)}, {.scalars = {32}}, "the value of each");
}

CASE("a built-in kernel stays inside its buffers and works on whole elements") {
  Fixture f;
  f.rejects(f.sum, {inout(f.ha), in(f.hb)}, {.scalars = {64}}, "got 64 for parameter 1, which has 32");
  f.rejects(f.sum, {inout(f.hb), in(f.ha)}, {.scalars = {64}}, "got 64 for parameter 0, which has 32");
  f.rejects(f.sum, {inout(f.ha), in(f.hb)}, {.scalars = {30}}, "no multiple");
  f.rejects(f.fill, {fresh(16)}, {.scalars = {17, 0}}, "which has 16");
  f.rejects(f.copy, {out(f.ha), no_dep(f.hb)}, {.scalars = {33}}, "which has 32");
  const pto_region row{0, 1, {16}, {1}}, tile{0, 2, {2, 8}, {16, 1}}, rows{0, 2, {2, 16}, {16, 1}};
  f.rejects(f.sum, {inout(f.ha), in(f.hb, &row)}, {.scalars = {20}}, "which has 16");
  f.rejects(f.sum, {inout(f.ha), in(f.hb, &tile)}, {.scalars = {16}}, "which has 8 before its first gap");
  EXPECT(f.runtime.submit(f.sum, {inout(f.ha), in(f.hb, &rows)}, {.scalars = {32}}) != 0);
  EXPECT(f.runtime.submit(f.sum, {inout(f.ha), in(f.hb, &tile)}, {.scalars = {8}}) != 0);
  EXPECT(f.runtime.submit(f.sum, {inout(f.ha), in(f.hb)}, {.scalars = {32}}) != 0);
  EXPECT_EQ(pto_wait_all(f.runtime, PTO_FOREVER), 0);  // writes to a raw address are not ordered
  EXPECT(f.runtime.submit(f.copy, {raw(f.a.data()), in(f.hb)}, {.scalars = {32}}) != 0);
  EXPECT_EQ(pto_wait_all(f.runtime, PTO_FOREVER), 0);
  EXPECT_EQ(f.a[0], 2.0f);
}

CASE("a built-in kernel must write its target and read its source") {
  Fixture f;
  const char* target = "in parameter 0";
  f.rejects(f.sum, {in(f.ha), in(f.hb)}, {.scalars = {32}}, target);
  f.rejects(f.sum, {out(f.ha), in(f.hb)}, {.scalars = {32}}, target);  // the target has no value to add to
  f.rejects(f.sum, {fresh(32), in(f.hb)}, {.scalars = {32}}, target);
  f.rejects(f.sum, {reduce(f.ha, f.sum), in(f.hb)}, {.scalars = {32}}, target);
  f.rejects(f.copy, {in(f.ha), in(f.hb)}, {.scalars = {32}}, target);
  f.rejects(f.fill, {in(f.ha)}, {.scalars = {32, 0}, .priority = 1}, target);
  const char* source = "in parameter 1";
  f.rejects(f.sum, {inout(f.ha), out(f.hb)}, {.scalars = {32}}, source);
  f.rejects(f.copy, {out(f.ha), fresh(32)}, {.scalars = {32}}, source);
  f.rejects(f.copy, {out(f.ha), reduce(f.hb, f.sum)}, {.scalars = {32}}, source);
  pto_param odd = in(f.hb);
  for (const int mode : {6, 33, -1}) {
    odd.mode = static_cast<pto_mode>(mode);
    f.rejects(f.copy, {out(f.ha), odd}, {.scalars = {32}}, source);
  }
  EXPECT(f.runtime.submit(f.sum, {commute(f.ha), inout(f.hb)}, {.scalars = {32}}) != 0);
  EXPECT_EQ(pto_wait_all(f.runtime, PTO_FOREVER), 0);
  EXPECT(f.runtime.submit(f.sum, {no_dep(f.ha), no_dep(f.hb)}, {.scalars = {32}}) != 0);  // without order
  EXPECT_EQ(pto_wait_all(f.runtime, PTO_FOREVER), 0);
  EXPECT(f.runtime.submit(f.copy, {reduce(f.ha, f.sum), commute(f.hb)}, {.scalars = {32}}) != 0);
  EXPECT(f.runtime.submit(f.fill, {fresh(16)}, {.scalars = {16, 0}}) != 0);
  EXPECT_EQ(pto_wait_all(f.runtime, PTO_FOREVER), 0);
}

CASE("a reduction's built-in kernel must fit the elements of its buffer") {
  Fixture f;
  const pto_handle ho = f.runtime.add(f.odd);
  const pto_kernel set = f.runtime.kernel("set", empty_kernel);
  f.rejects(set, {reduce(ho, f.sum)}, {}, "got 'sum_f32' for 30 bytes");
  f.rejects(set, {reduce(f.ha, f.fill)}, {}, "got 'fill'");
  EXPECT(f.runtime.submit(set, {reduce(f.ha, f.sum)}) != 0);
}

CASE("undefined flags of a kernel are rejected") {
  Runtime runtime(1);
  EXPECT(pto_kernel_add(runtime, "k", empty_kernel, 1u << 31) < 0);
  EXPECT(has(pto_last_error(), "undefined flags"));
}

TILEWISE_TEST_MAIN
