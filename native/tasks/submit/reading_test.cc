// Reading and writing a part of a buffer: which tasks it waits for, which failures it throws, and which it clears.
#include <bitset>
#include <random>

#include "tasks/api/testing_cpp.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint32_t kRows = 6, kCols = 6;
using Bytes = std::bitset<kRows * kCols>;

/// A box of a matrix of bytes, and its bytes.
struct Part {
  pto_region region;
  Bytes bytes;
};

Part part(uint32_t row, uint32_t col, uint32_t rows, uint32_t cols) {
  Part made{{uint64_t{row} * kCols + col, 2, {rows, cols}, {kCols, 1}}, {}};
  for (uint32_t r = row; r < row + rows; ++r) {
    for (uint32_t c = col; c < col + cols; ++c) made.bytes.set(r * kCols + c);
  }
  return made;
}

Part random_part(std::minstd_rand& random) {
  const auto below = [&](uint32_t limit) { return static_cast<uint32_t>(random() >> 8) % limit; };
  const uint32_t row = below(kRows), col = below(kCols);
  return below(8) == 0 ? part(0, 0, kRows, kCols) : part(row, col, 1 + below(kRows - row), 1 + below(kCols - col));
}

/// The expected failures: every write, in order.
struct Model {
  struct Write {
    Bytes bytes;
    bool failed;
  };
  std::vector<Write> writes;

  void write(const Bytes& bytes, bool failed) {
    std::erase_if(writes, [&](const Write& older) { return (older.bytes & ~bytes).none(); });
    writes.push_back({bytes, failed});
  }
  /// Whether a failed write shares a byte and no later write covers all that is read.
  bool is_poisoned(const Bytes& bytes) const {
    for (size_t w = writes.size(); w-- > 0;) {
      if (writes[w].failed && (writes[w].bytes & bytes).any()) return true;
      if ((bytes & ~writes[w].bytes).none()) return false;
    }
    return false;
  }
};

}  // namespace

CASE("a failure in one half of a buffer survives a write of the other half, and is cleared by a write of its own") {
  Runtime runtime(1);
  std::vector<uint8_t> data(8);
  const pto_handle h = runtime.add(data);
  const pto_region low{0, 1, {4}, {1}}, high{4, 1, {4}, {1}};
  runtime.submit(runtime.kernel("fail", fail_kernel), {out(h, &low)});
  EXPECT(pto_write(runtime, h, &high, 60) == &data[4]);
  EXPECT(pto_read(runtime, h, &high, 60) == &data[4]);
  EXPECT(pto_read(runtime, h, &low, 60) == nullptr);
  EXPECT(pto_read(runtime, h, nullptr, 60) == nullptr);
  EXPECT(has(pto_last_error(), "planted failure"));
  EXPECT(pto_write(runtime, h, &low, 60) == data.data());
  EXPECT(pto_read(runtime, h, nullptr, 60) == data.data());
  EXPECT_EQ(pto_wait_all(runtime, 60), PTO_TASK_FAILED);
}

CASE("a part that was written after the whole had failed is valid, and the rest is not") {
  Runtime runtime(1);
  std::vector<uint8_t> data(8);
  const pto_handle h = runtime.add(data);
  const pto_region low{0, 1, {4}, {1}}, inner{1, 1, {2}, {1}}, high{4, 1, {4}, {1}}, middle{2, 1, {4}, {1}};
  runtime.submit(runtime.kernel("fail", fail_kernel), {out(h)});
  EXPECT(pto_write(runtime, h, &low, 60) != nullptr);
  const pto_task heir = runtime.submit(PTO_NO_KERNEL, {in(h, &inner)}, {.flags = PTO_KEEP});
  EXPECT_EQ(pto_wait(runtime, heir, 60), PTO_OK);
  EXPECT(pto_read(runtime, h, &inner, 60) == &data[1]);
  EXPECT(pto_read(runtime, h, &low, 60) != nullptr);
  for (const pto_region* bad : {&high, &middle, static_cast<const pto_region*>(nullptr)}) {
    EXPECT(pto_read(runtime, h, bad, 60) == nullptr);
  }
  pto_task_release(runtime, heir);
  pto_wait_all(runtime, 60);
}

CASE("a read and a write of a part wait for the tasks that use its bytes, and for no others") {
  Runtime runtime(2);
  std::vector<uint8_t> data(8);
  const pto_handle h = runtime.add(data);
  const pto_region low{0, 1, {4}, {1}}, high{4, 1, {4}, {1}};
  Gate gate;
  runtime.submit(runtime.kernel("gate", Gate::kernel), {out(h, &low)}, {.scalars = {scalar(&gate)}});
  EXPECT(pto_read(runtime, h, &high, 60) != nullptr);
  EXPECT(pto_write(runtime, h, &high, 60) != nullptr);
  EXPECT(pto_read(runtime, h, &low, 0.01) == nullptr);
  EXPECT_EQ(pto_last_status(), PTO_TIMEOUT);
  EXPECT(pto_read(runtime, h, nullptr, 0.01) == nullptr);
  gate.open();
  EXPECT(pto_write(runtime, h, &low, 60) == data.data());
}

CASE("a part must lie in its buffer") {
  Runtime runtime(1);
  std::vector<uint8_t> data(8);
  const pto_handle h = runtime.add(data);
  const pto_region beyond{4, 1, {5}, {1}}, none{0, 0, {}, {}};
  for (const pto_region* bad : {&beyond, &none}) {
    EXPECT(pto_read(runtime, h, bad, 60) == nullptr);
    EXPECT(has(pto_last_error(), "[runtime.read] a region must have"));
    EXPECT(pto_write(runtime, h, bad, 60) == nullptr);
    EXPECT(has(pto_last_error(), "[runtime.write] a region must have"));
  }
}

CASE("random failures and writes of parts: each read gets exactly the failures that no write has cleared") {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::minstd_rand random(seed);
    Runtime runtime(seed % 3);
    std::vector<uint8_t> data(kRows * kCols);
    const pto_handle h = runtime.add(data);
    const pto_kernel fail = runtime.kernel("fail", fail_kernel);
    Model model;
    for (int step = 0; step < 100; ++step) {
      const Part at = random_part(random);
      switch ((random() >> 8) % 5) {
        case 0:
          runtime.submit(fail, {out(h, &at.region)});
          model.write(at.bytes, true);
          break;
        case 1:
          EXPECT(pto_write(runtime, h, &at.region, PTO_FOREVER) != nullptr);
          model.write(at.bytes, false);
          break;
        case 2:
          runtime.submit(PTO_NO_KERNEL, {out(h, &at.region)});
          model.write(at.bytes, false);
          break;
        case 3:
          runtime.submit(PTO_NO_KERNEL, {inout(h, &at.region)});
          model.write(at.bytes, model.is_poisoned(at.bytes));
          break;
        default:
          EXPECT_EQ(pto_read(runtime, h, &at.region, PTO_FOREVER) == nullptr, model.is_poisoned(at.bytes));
      }
    }
    pto_wait_all(runtime, PTO_FOREVER);
  }
}

CASE("in C++ a box is read and written as a span") {
  using namespace tilewise::pto;
  tilewise::pto::Runtime rt({.num_workers = 1});
  std::vector<float> data{1, 2, 3, 4, 5, 6};
  const Buffer x = rt.buffer(data);
  const auto middle = x.read<float>(range(4, 8));
  EXPECT(middle.size() == 2 && middle.data() == &data[1]);
  const auto column = x.write<float>(tile(0, 1, 2, 1, 3, sizeof(float)));  // of 2 x 3
  EXPECT(column.size() == 4 && column.data() == &data[1]);
}

TILEWISE_TEST_MAIN
