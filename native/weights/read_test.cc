// read_weights: panels from files, by several threads at once; invalid files and rectangles.
#include "weights/read.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/testing.h"

namespace tilewise::kernels::TILEWISE_ISA_NS {
bool store_weights(const StoredBlock& block, const WeightPart& part, int64_t row, int64_t col, bool transposed);
}

using namespace tilewise;
using kernels::Stored;
using kernels::WeightPart;
using weights::Destination;
using weights::Outcome;
using weights::Rectangle;

namespace {

constexpr auto kStore = kernels::TILEWISE_ISA_NS::store_weights;

/// An unnamed file with some bytes after `begin` others.
class File {
 public:
  File(const void* data, size_t bytes, int64_t begin = 40) : begin_(begin) {
    char name[] = "/tmp/tilewise-read-test-XXXXXX";
    file_ = mkstemp(name);
    unlink(name);
    const bool is_written = file_ >= 0 && pwrite(file_, data, bytes, begin) == static_cast<ssize_t>(bytes);
    check<ResourceError>(is_written, "a test needs a temporary file");
  }
  ~File() { close(file_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  Rectangle rectangle(int64_t rows, int64_t cols, Stored dtype) const {
    return {file_, begin_, cols * size_of(dtype), rows, cols, dtype};
  }

 private:
  int file_;
  int64_t begin_;
};

std::vector<float> numbers(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(static_cast<int64_t>(i * 2654435761u % 509) - 254) / 8;
  return values;
}

uint16_t upper_half(float x) {  // of values exact in bf16
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

/// Reads all columns of a rectangle into [row][col] of a part.
Outcome read_all(const Rectangle& from, bool transposed, std::initializer_list<WeightPart> parts, int64_t row,
                 int64_t col) {
  std::vector<Destination> into;
  for (const WeightPart& part : parts) into.push_back({part, row, col, 0, from.cols});
  return weights::read_weights(from, transposed, into, kStore);
}

struct Memory {
  int64_t rows, cols;
  DType dtype;
  bool packed;
  std::vector<uint64_t> words;

  Memory(int64_t r, int64_t c, DType type, bool in_panels) : rows(r), cols(c), dtype(type), packed(in_panels) {
    words.assign(static_cast<size_t>(num_bytes() + 7) / 8, 0xa5a5a5a5a5a5a5a5u);
  }
  int64_t padded_cols() const { return (cols + 1) / 2 * 2; }
  int64_t num_bytes() const { return (packed ? (rows + 31) / 32 * 32 * padded_cols() : rows * cols) * size_of(dtype); }
  WeightPart part() { return {reinterpret_cast<std::byte*>(words.data()), dtype, packed, rows, cols}; }

  /// Element [row][col], which may be padding.
  float at(int64_t row, int64_t col) const {
    const auto* bytes = reinterpret_cast<const char*>(words.data());
    const int64_t panel = row / 32 * 32 * padded_cols(), lane = row % 32;
    int64_t place = row * cols + col;
    if (packed) place = panel + (dtype == DType::kBF16 ? (col / 2 * 32 + lane) * 2 + col % 2 : col * 32 + lane);
    uint32_t bits = 0;
    if (dtype == DType::kBF16) {
      uint16_t half = 0;
      std::memcpy(&half, bytes + 2 * place, 2);
      bits = static_cast<uint32_t>(half) << 16;
    } else {
      std::memcpy(&bits, bytes + 4 * place, 4);
    }
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

/// The number of wrong elements, including padding.
int64_t count_wrong(const Memory& memory, const std::vector<float>& values, bool transposed) {
  int64_t wrong = 0;
  const int64_t rows = memory.packed ? (memory.rows + 31) / 32 * 32 : memory.rows;
  const int64_t cols = memory.packed ? memory.padded_cols() : memory.cols;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const bool is_there = r < memory.rows && c < memory.cols;
      const int64_t place = transposed ? c * memory.rows + r : r * memory.cols + c;
      wrong += memory.at(r, c) != (is_there ? values[static_cast<size_t>(place)] : 0.0f);
    }
  return wrong;
}

std::vector<uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<uint16_t> halves;
  for (const float value : values) halves.push_back(upper_half(value));
  return halves;
}

}  // namespace

CASE("odd sizes in every layout, transposed and not, from fp32 and bf16") {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {33, 3}, {64, 30}, {70, 515}}) {
    const std::vector<float> values = numbers(rows * cols);
    const std::vector<uint16_t> halves = to_bf16(values);
    const File wide(values.data(), values.size() * 4), narrow(halves.data(), halves.size() * 2);
    for (const bool transposed : {false, true})
      for (const bool packed : {false, true})
        for (const DType dtype : {DType::kF32, DType::kBF16})
          for (const Stored stored : {Stored::kF32, Stored::kBF16}) {
            Memory memory(rows, cols, dtype, packed);
            const WeightPart part = memory.part();
            const File& file = stored == Stored::kF32 ? wide : narrow;
            const Rectangle from = transposed ? file.rectangle(cols, rows, stored) : file.rectangle(rows, cols, stored);
            const Outcome outcome = read_all(from, transposed, {part}, 0, 0);
            EXPECT(outcome.is_finite && outcome.is_whole && outcome.system_error == 0);
            EXPECT_EQ(outcome.bytes_read, rows * cols * size_of(stored));
            EXPECT_EQ(count_wrong(memory, values, transposed), 0);
          }
  }
}

CASE("one wrong bit in a file is a wrong element (counterpart of the test above)") {
  std::vector<float> values = numbers(33 * 3);
  const std::vector<float> right = values;
  values[50] += 0.125f;
  const File file(values.data(), values.size() * 4);
  Memory memory(33, 3, DType::kF32, true);
  const WeightPart part = memory.part();
  read_all(file.rectangle(33, 3, Stored::kF32), false, {part}, 0, 0);
  EXPECT_EQ(count_wrong(memory, right, false), 1);
}

CASE("threads can read neighbouring panels, or neighbouring columns of all panels") {
  constexpr int64_t kRows = 256, kCols = 96;
  const std::vector<float> values = numbers(kRows * kCols);
  const File file(values.data(), values.size() * 4);
  for (const bool transposed : {false, true}) {
    Memory weight(kRows, kCols, DType::kBF16, true), master(kRows, kCols, DType::kF32, true);
    const WeightPart parts[] = {weight.part(), master.part()};
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        const int64_t count = (transposed ? kCols : kRows) / 4;
        Rectangle from =
            transposed ? file.rectangle(count, kRows, Stored::kF32) : file.rectangle(count, kCols, Stored::kF32);
        from.begin += t * count * from.row_bytes;
        read_all(from, transposed, {parts[0], parts[1]}, transposed ? 0 : t * count, transposed ? t * count : 0);
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(count_wrong(weight, values, transposed), 0);
    EXPECT_EQ(count_wrong(master, values, transposed), 0);
  }
}

CASE("columns of a tensor are read without their neighbours") {
  const std::vector<float> values = numbers(40 * 12);
  const File file(values.data(), values.size() * 4);
  Memory memory(40, 5, DType::kF32, true);
  const WeightPart part = memory.part();
  Rectangle from = file.rectangle(40, 12, Stored::kF32);
  from.begin += 4 * 7;
  from.cols = 5;
  EXPECT_EQ(read_all(from, false, {part}, 0, 0).bytes_read, 40 * 5 * 4);
  std::vector<float> expected;
  for (int64_t r = 0; r < 40; ++r)
    for (int64_t c = 7; c < 12; ++c) expected.push_back(values[static_cast<size_t>(r * 12 + c)]);
  EXPECT_EQ(count_wrong(memory, expected, false), 0);
}

CASE("the columns of several parts come from one read") {
  const std::vector<float> values = numbers(70 * 13);
  const File file(values.data(), values.size() * 4);
  for (const bool transposed : {false, true}) {
    Memory left(transposed ? 7 : 70, transposed ? 70 : 7, DType::kBF16, true);
    Memory right(transposed ? 6 : 70, transposed ? 70 : 6, DType::kF32, true);
    const Destination into[] = {{left.part(), 0, 0, 0, 7}, {right.part(), 0, 0, 7, 6}};
    const Rectangle from = file.rectangle(70, 13, Stored::kF32);
    EXPECT_EQ(weights::read_weights(from, transposed, into, kStore).bytes_read, 70 * 13 * 4);
    std::vector<float> expected[2];
    for (size_t i = 0; i < values.size(); ++i) expected[i % 13 >= 7].push_back(values[i]);
    EXPECT_EQ(count_wrong(left, expected[0], transposed), 0);
    EXPECT_EQ(count_wrong(right, expected[1], transposed), 0);
  }
}

CASE("rows in memory are stored like those of a file, with the same checks") {
  const std::vector<float> values = numbers(37 * 12);
  Memory memory(37, 11, DType::kBF16, true);
  const Destination into[] = {{memory.part(), 0, 0, 0, 11}};
  kernels::StoredBlock block = {reinterpret_cast<const std::byte*>(values.data() + 1), 12 * 4, 37, 11, Stored::kF32};
  EXPECT(weights::store_block(block, false, into, kStore));
  std::vector<float> expected;
  for (size_t i = 0; i < values.size(); ++i)
    if (i % 12 > 0) expected.push_back(values[i]);
  EXPECT_EQ(count_wrong(memory, expected, false), 0);
  block.rows = 36;
  bool is_refused = false;
  try {
    weights::store_block(block, false, into, kStore);
  } catch (const ArgumentError&) {
    is_refused = true;
  }
  EXPECT(is_refused);
}

CASE("infinity, NaN and values that round to infinity are reported; the largest finite number is not") {
  const float infinity = std::numeric_limits<float>::infinity(), largest = std::numeric_limits<float>::max();
  for (const auto& [value, dtype, is_finite] : {std::tuple{infinity, DType::kF32, false},
                                                {-infinity, DType::kBF16, false},
                                                {std::nanf(""), DType::kF32, false},
                                                {largest, DType::kBF16, false},
                                                {largest, DType::kF32, true},
                                                {3.0e38f, DType::kBF16, true}}) {
    std::vector<float> values = numbers(37 * 19);
    values[36 * 19 + 18] = value;
    const File file(values.data(), values.size() * 4);
    Memory memory(37, 19, dtype, true);
    const WeightPart part = memory.part();
    EXPECT_EQ(read_all(file.rectangle(37, 19, Stored::kF32), false, {part}, 0, 0).is_finite, is_finite);
  }
}

CASE("a file that ends early, and one that cannot be read, are outcomes") {
  const std::vector<float> values = numbers(32 * 4);
  const File file(values.data(), values.size() * 4);
  Memory memory(33, 4, DType::kF32, true);
  const WeightPart part = memory.part();
  Rectangle from = file.rectangle(33, 4, Stored::kF32);
  EXPECT(!read_all(from, false, {part}, 0, 0).is_whole);
  from.file = -1;
  EXPECT_EQ(read_all(from, false, {part}, 0, 0).system_error, EBADF);
}

CASE("a rectangle that does not fit its part is rejected") {
  const std::vector<float> values = numbers(64 * 8);
  const File file(values.data(), values.size() * 4);
  Memory memory(64, 8, DType::kF32, true);
  const WeightPart part = memory.part();
  const auto refused = [&](int64_t rows, int64_t cols, int64_t row, int64_t col) {
    try {
      read_all(file.rectangle(rows, cols, Stored::kF32), false, {part}, row, col);
    } catch (const ArgumentError&) {
      return true;
    }
    return false;
  };
  EXPECT(!refused(32, 8, 32, 0) && !refused(64, 2, 0, 6));
  EXPECT(refused(33, 8, 32, 0) && refused(32, 8, 16, 0) && refused(16, 8, 0, 0) && refused(64, 8, 0, 2));
  const Destination beyond[] = {{part, 0, 0, 2, 8}};
  bool is_refused = false;
  try {
    weights::read_weights(file.rectangle(64, 8, Stored::kF32), false, beyond, kStore);
  } catch (const ArgumentError&) {
    is_refused = true;
  }
  EXPECT(is_refused);
  EXPECT(refused(64, 3, 0, 0) && refused(64, 8, -32, 0) && refused(-1, 8, 0, 0));
}

TILEWISE_TEST_MAIN
