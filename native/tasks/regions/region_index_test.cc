// The region index compared with sets of bytes: no overlap is missed, boxes of one stride system are exact, and
// insertions and removals in any order leak nothing. The comparison is also shown to detect wrong answers.
#include "tasks/regions/region_index.h"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "base/testing.h"

using namespace tilewise::tasks;

namespace {

constexpr uint64_t kBufferBytes = 2048;
using Bytes = std::bitset<kBufferBytes>;
using Random = std::mt19937_64;

/// An index and its memory.
struct Pool {
  explicit Pool(uint32_t max_nodes) : bytes(RegionIndex::bytes_needed(max_nodes)) {
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    std::memset(memory.get(), 0, bytes);
    index = std::make_unique<RegionIndex>(memory.get(), max_nodes, true);
  }
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  uint64_t bytes;
  std::unique_ptr<std::byte, Free> memory;
  std::unique_ptr<RegionIndex> index;
};

Box make_box(uint64_t offset, std::vector<uint64_t> size, std::vector<uint64_t> stride) {
  Box box;
  box.offset = offset;
  box.ndim = static_cast<uint32_t>(size.size());
  std::copy(size.begin(), size.end(), box.size);
  std::copy(stride.begin(), stride.end(), box.stride);
  return box;
}

Bytes bytes_of(const Box& box) {
  Bytes set;
  uint64_t at[kMaxDims] = {};
  for (uint32_t d = 0; d < box.ndim; ++d) {
    if (box.size[d] == 0) return set;
  }
  for (;;) {
    uint64_t byte = box.offset;
    for (uint32_t d = 0; d < box.ndim; ++d) byte += at[d] * box.stride[d];
    set.set(byte);
    uint32_t d = box.ndim;
    while (d > 0 && ++at[d - 1] == box.size[d - 1]) at[--d] = 0;
    if (d == 0) return set;
  }
}

uint64_t below(Random& random, uint64_t limit) { return random() % limit; }

/// A box whose coordinates in the system are unique: it ends within its rows.
Box random_in_system(Random& random, const std::vector<uint64_t>& extent) {
  const uint32_t ndim = static_cast<uint32_t>(extent.size());
  Box box;
  box.ndim = ndim;
  uint64_t stride = 1;
  for (uint32_t d = ndim; d-- > 0;) {
    const uint64_t begin = below(random, extent[d]);
    box.size[d] = 1 + below(random, std::min<uint64_t>(extent[d] - begin, 1 + below(random, 8)));
    box.stride[d] = stride;
    box.offset += begin * stride;
    stride *= extent[d];
  }
  return box;
}

/// Any strides, including rows that overlap, cross their end or are empty.
Box random_anywhere(Random& random) {
  for (;;) {
    Box box;
    box.ndim = 1 + static_cast<uint32_t>(below(random, kMaxDims));
    uint64_t stride = 1, end = 0;
    for (uint32_t d = box.ndim; d-- > 0;) {
      box.size[d] = below(random, 50) == 0 ? 0 : 1 + below(random, 9);
      box.stride[d] = stride;
      end += box.size[d] * stride;
      stride = stride * (1 + below(random, 12)) + below(random, 3);
    }
    if (end + 1 >= kBufferBytes) continue;
    box.offset = below(random, kBufferBytes - end);
    return box;
  }
}

const std::vector<std::vector<uint64_t>> kSystems = {{2048}, {32, 64}, {31, 66}, {8, 16, 16}, {7, 9, 32}, {4, 8, 8, 8}};

Box random_box(Random& random, int system) {
  return system < 0 ? random_anywhere(random) : random_in_system(random, kSystems[static_cast<size_t>(system)]);
}

struct Answer {
  uint32_t node;
  Overlap overlap;
};
struct Recorded {
  uint32_t node;
  Bytes bytes;
};

/// The number of wrong answers: missed or visited twice, wrongly reported as covered, or, if answers must be exact,
/// visited or reported as partial without reason.
int count_mistakes(const Bytes& query, const std::vector<Recorded>& recorded, const std::vector<Answer>& visited,
                   bool exact) {
  std::map<uint32_t, Overlap> answers;
  int mistakes = 0;
  for (const Answer& f : visited) mistakes += !answers.emplace(f.node, f.overlap).second;
  for (const Recorded& k : recorded) {
    const auto answer = answers.find(k.node);
    const bool meets = (query & k.bytes).any(), covers = (k.bytes & ~query).none(), equals = k.bytes == query;
    if (answer == answers.end()) {
      mistakes += meets;
      continue;
    }
    const Overlap overlap = answer->second;
    mistakes += exact && !meets;
    const bool inside = (query & ~k.bytes).none();
    mistakes += (overlap == Overlap::kCovered && !covers) || (overlap == Overlap::kEqual && !equals) ||
                (overlap == Overlap::kInside && !inside);
    const Overlap right = equals   ? Overlap::kEqual
                          : covers ? Overlap::kCovered
                          : inside ? Overlap::kInside
                                   : Overlap::kPartial;
    mistakes += exact && overlap != right;
  }
  return mistakes;
}

template <class Ask>
int mistakes_in_random_boxes(int system, bool exact, Ask ask) {
  Random random(100 + static_cast<uint64_t>(system));
  int mistakes = 0;
  for (int round = 0; round < 20; ++round) {
    Pool pool(512);
    RegionTree tree;
    std::vector<Recorded> recorded;
    for (int i = 0; i < 120; ++i) {
      const Box box = random_box(random, system);
      if (pool.index->find(1, box) != kNone) continue;
      const uint32_t node = pool.index->insert(1, tree, box);
      if (node != kNone) recorded.push_back({node, bytes_of(box)});
    }
    for (int i = 0; i < 60; ++i) {
      const Box query = random_box(random, system);
      mistakes += count_mistakes(bytes_of(query), recorded, ask(*pool.index, tree, query), exact);
    }
  }
  return mistakes;
}

std::vector<Answer> ask_index(RegionIndex& index, const RegionTree& tree, const Box& query) {
  std::vector<Answer> visited;
  index.overlapping(tree, query, [&](uint32_t node, Overlap overlap) { visited.push_back({node, overlap}); });
  return visited;
}

Box tile(uint64_t row, uint64_t column, uint64_t rows, uint64_t columns, uint64_t row_bytes) {
  return make_box(row * row_bytes + column, {rows, columns}, {row_bytes, 1});
}

}  // namespace

CASE("boxes of one stride system are answered exactly, in one to four dimensions") {
  for (int system = 0; system < static_cast<int>(kSystems.size()); ++system) {
    EXPECT_EQ(mistakes_in_random_boxes(system, true, ask_index), 0);
  }
}

CASE("boxes of mixed strides: no overlap is missed, none is wrongly reported as covered") {
  EXPECT_EQ(mistakes_in_random_boxes(-1, false, ask_index), 0);
}

CASE("the comparison detects wrong answers") {
  auto drop_one = [](RegionIndex& index, const RegionTree& tree, const Box& query) {
    std::vector<Answer> visited = ask_index(index, tree, query);
    if (!visited.empty()) visited.pop_back();
    return visited;
  };
  auto call_covered = [](RegionIndex& index, const RegionTree& tree, const Box& query) {
    std::vector<Answer> visited = ask_index(index, tree, query);
    for (Answer& f : visited) f.overlap = Overlap::kCovered;
    return visited;
  };
  auto by_range = [](RegionIndex& index, const RegionTree& tree, const Box& query) {
    std::vector<Answer> visited;
    uint64_t end = query.offset + 1;
    for (uint32_t d = 0; d < query.ndim; ++d) end += (query.size[d] - 1) * query.stride[d];
    index.for_each(tree, [&](uint32_t node) {
      if (index[node].lo() < end && query.offset < index[node].hi()) visited.push_back({node, Overlap::kPartial});
    });
    return visited;
  };
  EXPECT(mistakes_in_random_boxes(1, true, drop_one) > 0);
  EXPECT(mistakes_in_random_boxes(1, true, call_covered) > 0);
  EXPECT(mistakes_in_random_boxes(1, true, by_range) > 0);
  EXPECT(mistakes_in_random_boxes(-1, false, drop_one) > 0);
  EXPECT(mistakes_in_random_boxes(-1, false, call_covered) > 0);
}

CASE("insertions and removals in random order on a small pool leak nothing") {
  constexpr uint32_t kNodes = 48, kOwners = 3;
  Pool pool(kNodes);
  RegionIndex& index = *pool.index;
  Random random(5);
  RegionTree trees[kOwners];
  struct Live {
    uint32_t owner, node;
    Box box;
    Bytes bytes;
  };
  std::vector<Live> live;
  int num_refused = 0, num_isolated = 0, num_wrong = 0;
  uint64_t fill_to = kNodes;
  for (int step = 0; step < 100000; ++step) {
    if (step % 500 == 0) fill_to = below(random, kNodes + 8);
    const uint32_t owner = static_cast<uint32_t>(below(random, kOwners));
    if (live.size() < fill_to ? below(random, 8) != 0 : below(random, 8) == 0) {
      const int system = step / 3000 % 7 - 1;
      const Box box = below(random, 3) == 0 || system < 0 ? random_box(random, system)
                                                          : tile(below(random, 8) * 4, below(random, 8) * 8, 4, 8, 64);
      const Bytes bytes = bytes_of(box);
      const uint32_t existing = index.find(owner, box);
      if (existing != kNone) {
        num_wrong += index[existing].box.owner != owner;
        const bool is_live = std::any_of(live.begin(), live.end(),
                                         [&](const Live& l) { return l.node == existing && l.bytes == bytes; });
        num_wrong += !is_live;
        continue;
      }
      const RegionTree before = trees[owner];
      const uint32_t num_pages = index.num_live_pages();
      const uint32_t node = index.insert(owner, trees[owner], box);
      if (node == kNone) {
        num_refused += bytes.any();
        num_wrong += before.root != trees[owner].root || before.count != trees[owner].count ||
                     index.num_live() != live.size() || index.num_live_pages() != num_pages ||
                     index.find(owner, box) != kNone;
        continue;
      }
      num_wrong += index.find(owner, box) != node;
      live.push_back({owner, node, box, bytes});
    } else if (!live.empty()) {
      const size_t which = below(random, live.size());
      index.remove(live[which].owner, trees[live[which].owner], live[which].node);
      num_wrong += index.find(live[which].owner, live[which].box) != kNone;
      live[which] = live.back();
      live.pop_back();
    }
    num_wrong += index.num_live() != live.size();
    if (step % 16 != 0) continue;
    std::vector<Recorded> recorded;
    for (const Live& l : live) {
      if (l.owner == owner) recorded.push_back({l.node, l.bytes});
    }
    num_wrong += trees[owner].count != recorded.size();
    const Box query = random_box(random, step / 3000 % 7 - 1);
    num_wrong += count_mistakes(bytes_of(query), recorded, ask_index(index, trees[owner], query), false);
    for (const Recorded& k : recorded) {
      if (!index.isolated(trees[owner], k.node)) continue;
      ++num_isolated;
      for (const Recorded& other : recorded) num_wrong += other.node != k.node && (other.bytes & k.bytes).any();
    }
  }
  EXPECT_EQ(num_wrong, 0);
  EXPECT(num_refused > 100);
  EXPECT(num_isolated > 100);
  EXPECT_EQ(index.high_water(), kNodes);
  for (const Live& l : live) index.remove(l.owner, trees[l.owner], l.node);
  EXPECT_EQ(index.num_live(), 0u);
  EXPECT_EQ(index.num_live_pages(), 0u);
  for (const RegionTree& tree : trees) EXPECT_EQ(tree.root, kNone);
}

CASE("a box is found in every equivalent form") {
  Pool pool(64);
  RegionTree tree;
  const uint32_t rows = pool.index->insert(1, tree, make_box(128, {4, 64}, {64, 1}));
  EXPECT_EQ(pool.index->find(1, make_box(128, {256}, {1})), rows);
  EXPECT_EQ(pool.index->find(1, make_box(128, {2, 1, 2, 64}, {128, 999, 64, 1})), rows);
  EXPECT_EQ(pool.index->find(1, make_box(128, {193, 64}, {1, 1})), rows);
  EXPECT_EQ(pool.index->find(2, make_box(128, {256}, {1})), kNone);
  EXPECT_EQ(pool.index->find(1, make_box(128, {255}, {1})), kNone);
  const uint32_t column = pool.index->insert(1, tree, make_box(3, {8, 1}, {64, 1}));
  EXPECT_EQ(pool.index->find(1, make_box(3, {2, 4, 1}, {256, 64, 1})), column);
  EXPECT(pool.index->find(1, make_box(3, {8, 0}, {64, 1})) == kNone);
  EXPECT(pool.index->insert(1, tree, make_box(3, {8, 0}, {64, 1})) == kNone);
}

CASE("10,000 tiles: each is isolated, and a query visits few pages") {
  constexpr uint64_t kSide = 100, kRows = 32, kColumns = 128, kRowBytes = kSide * kColumns;
  for (const bool by_columns : {false, true}) {
    Pool pool(10000);
    RegionTree tree;
    uint32_t num_refused = 0, most_pages = 0, num_wrong = 0;
    for (uint64_t i = 0; i < kSide * kSide; ++i) {
      const uint64_t row = by_columns ? i % kSide : i / kSide, column = by_columns ? i / kSide : i % kSide;
      const Box box = tile(row * kRows, column * kColumns, kRows, kColumns, kRowBytes);
      num_refused += pool.index->insert(1, tree, box) == kNone;
    }
    EXPECT_EQ(num_refused, 0u);
    for (uint64_t i = 0; i < kSide * kSide; ++i) {
      const Box box = tile(i / kSide * kRows, i % kSide * kColumns, kRows, kColumns, kRowBytes);
      const uint32_t node = pool.index->find(1, box);
      num_wrong += !pool.index->isolated(tree, node);
      most_pages = std::max(most_pages, pool.index->overlapping(tree, box, [&](uint32_t other, Overlap overlap) {
        num_wrong += other != node || overlap != Overlap::kEqual;
      }));
    }
    EXPECT_EQ(num_wrong, 0u);
    EXPECT(most_pages <= 24);
    uint32_t num_met = 0;
    pool.index->overlapping(tree, tile(16, 64, kRows, kColumns, kRowBytes), [&](uint32_t, Overlap) { ++num_met; });
    EXPECT_EQ(num_met, 4u);
    num_met = 0;
    pool.index->overlapping(tree, make_box(0, {kRows * kRowBytes}, {1}),
                            [&](uint32_t, Overlap overlap) { num_met += overlap == Overlap::kCovered; });
    EXPECT_EQ(num_met, kSide);
  }
}

CASE("tiles at the edges are smaller and still isolated; a box across tiles ends that until it is removed") {
  Pool pool(512);
  RegionTree tree;
  constexpr uint64_t kRows = 33, kRowBytes = 100;  // the last row of tiles is one row high
  for (uint64_t row = 0; row < kRows; row += 8) {
    for (uint64_t column = 0; column < kRowBytes; column += 16) {
      pool.index->insert(
          1, tree,
          tile(row, column, std::min<uint64_t>(8, kRows - row), std::min<uint64_t>(16, kRowBytes - column), kRowBytes));
    }
  }
  EXPECT_EQ(tree.count, 35u);
  pool.index->for_each(tree, [&](uint32_t node) { EXPECT(pool.index->isolated(tree, node)); });
  const uint32_t across = pool.index->insert(1, tree, tile(4, 4, 8, 16, kRowBytes));
  pool.index->for_each(tree, [&](uint32_t node) { EXPECT(!pool.index->isolated(tree, node)); });
  pool.index->remove(1, tree, across);
  pool.index->for_each(tree, [&](uint32_t node) { EXPECT(pool.index->isolated(tree, node)); });
  const uint32_t inside = pool.index->insert(1, tree, tile(0, 0, 4, 4, kRowBytes));  // starts where a tile does
  EXPECT(!pool.index->isolated(tree, inside));
}

CASE(
    "tiles are listed until the first query about overlaps; then each is visited, in the reserved pages, for any "
    "order") {
  Random random(7);
  for (const uint64_t num_tiles : {1, 2, 16, 17, 256, 257, 1100}) {
    for (const int order : {0, 1, 2}) {  // rising, falling, any
      Pool pool(1100);
      RegionTree tree;
      std::vector<Box> boxes;
      for (uint64_t i = 0; i < num_tiles; ++i) boxes.push_back(tile(i / 37 * 4, i % 37 * 16, 4, 16, 37 * 16));
      if (order == 1) std::reverse(boxes.begin(), boxes.end());
      if (order == 2) std::shuffle(boxes.begin(), boxes.end(), random);
      for (const Box& box : boxes) pool.index->insert(1, tree, box);
      for (const bool is_filed : {false, true}) {
        std::shuffle(boxes.begin(), boxes.end(), random);
        for (size_t n = boxes.size() / 3; n > 0; --n, boxes.pop_back()) {
          pool.index->remove(1, tree, pool.index->find(1, boxes.back()));
        }
        size_t num_visited = 0;
        pool.index->for_each(tree, [&](uint32_t node) { num_visited += pool.index->isolated(tree, node); });
        EXPECT_EQ(num_visited, boxes.size());
        const uint32_t num_pages = pool.index->num_live_pages();
        for (const Box& box : boxes) {
          const std::vector<Answer> visited = ask_index(*pool.index, tree, box);
          EXPECT(visited.size() == 1 && visited[0].node == pool.index->find(1, box) &&
                 visited[0].overlap == Overlap::kEqual);
          if (!is_filed) EXPECT_EQ(pool.index->num_live_pages(), num_pages);
        }
      }
      for (const Box& box : boxes) pool.index->remove(1, tree, pool.index->find(1, box));
      EXPECT_EQ(pool.index->num_live_pages(), 0u);
    }
  }
}

CASE("listed nodes have reserved pages, even if other trees use all the rest") {
  Pool pool(64);  // 24 pages
  std::vector<RegionTree> trees(22);
  const auto insert = [&](uint32_t owner, uint64_t n) {
    return pool.index->insert(owner, trees[owner], tile(n / 4 * 4, n % 4 * 16, 4, 16, 64));
  };
  for (uint32_t owner = 0; owner < 21; ++owner) insert(owner, 0);
  uint32_t num_listed = 0;
  while (insert(21, num_listed) != kNone) ++num_listed;
  EXPECT_EQ(num_listed, 32u);  // two leaves and their root
  for (const RegionTree& tree : trees) {
    EXPECT_EQ(ask_index(*pool.index, tree, make_box(0, {4096}, {1})).size(), tree.count);
    EXPECT_EQ(pool.index->num_live_pages(), 24u);
  }
  EXPECT_EQ(insert(21, num_listed), kNone);
  pool.index->remove(0, trees[0], pool.index->find(0, tile(0, 0, 4, 16, 64)));
  EXPECT(insert(21, num_listed) != kNone);
}

CASE("a box is on the grid exactly if it starts where a cell does and is alone in the cell, for any cells") {
  Random random(11);
  int num_wrong = 0, num_on = 0, num_small = 0;
  for (int round = 0; round < 20000; ++round) {
    Box first, second;
    first.ndim = second.ndim = 1 + static_cast<uint32_t>(below(random, kMaxDims));
    const bool is_small = below(random, 4) == 0, has_whole_rows = below(random, 2) == 0;
    bool fits = true;  // begins with a cell, ends within its row
    uint64_t stride = 1;
    for (uint32_t d = first.ndim; d-- > 0;) {
      const uint64_t cell = 2 + below(random, uint64_t{1} << below(random, 11));
      const uint64_t extent = cell * (2 + below(random, 4)) + (has_whole_rows ? 0 : below(random, cell));
      const uint64_t from = below(random, extent - cell + 1), phase = from % cell;
      uint64_t to = below(random, extent);
      if (below(random, 6) != 0) to = std::min(phase + to / cell * cell, extent - 1);
      first.size[d] = cell;
      second.size[d] = is_small ? 1 + below(random, cell) : cell;
      first.stride[d] = second.stride[d] = stride;
      first.offset += from * stride;
      second.offset += to * stride;
      fits &= to % cell == phase && (d == 0 || to + second.size[d] <= extent);
      stride *= extent;
    }
    Pool pool(4);
    RegionIndex& index = *pool.index;
    RegionTree tree;
    index.insert(1, tree, first);
    if (index.find(1, second) != kNone) continue;
    const bool expected = fits && first.offset != second.offset;
    const uint32_t node = index.insert(1, tree, second);
    num_wrong += index[node].on_grid != expected;
    num_on += index[node].on_grid;
    std::copy(first.size, first.size + kMaxDims, second.size);
    if (index.find(1, second) != kNone) continue;
    num_wrong += index[index.insert(1, tree, second)].on_grid && expected;  // the whole of the small one's cell
    num_small += expected;
  }
  EXPECT_EQ(num_wrong, 0);
  EXPECT(num_on > 5000 && num_on < 15000 && num_small > 1000);
}

CASE("rows of a matrix and its tiles are compared exactly, in either order") {
  for (const bool rows_first : {false, true}) {
    Pool pool(64);
    RegionTree tree;
    uint32_t rows = kNone, square = kNone;
    auto add_rows = [&] { rows = pool.index->insert(1, tree, make_box(8 * 64, {8 * 64}, {1})); };
    if (rows_first) add_rows();
    square = pool.index->insert(1, tree, tile(6, 16, 4, 16, 64));
    if (!rows_first) add_rows();
    EXPECT_EQ(ask_index(*pool.index, tree, tile(6, 32, 2, 16, 64)).size(), 0u);
    std::vector<Answer> visited = ask_index(*pool.index, tree, tile(9, 31, 1, 2, 64));
    EXPECT_EQ(visited.size(), 2u);
    visited = ask_index(*pool.index, tree, make_box(6 * 64, {10 * 64}, {1}));
    EXPECT_EQ(visited.size(), 2u);
    for (const Answer& f : visited) EXPECT(f.overlap == Overlap::kCovered);
    EXPECT(rows != square);
  }
}

CASE("buffers beyond 4 GiB") {
  Pool pool(256);
  RegionTree tree;
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  for (uint64_t i = 0; i < 100; ++i) pool.index->insert(1, tree, make_box(i * kGiB, {kGiB}, {1}));
  for (uint64_t i = 0; i < 100; ++i) {
    const std::vector<Answer> visited = ask_index(*pool.index, tree, make_box(i * kGiB + 5, {10, 10}, {20, 1}));
    EXPECT_EQ(visited.size(), 1u);
    EXPECT_EQ(ask_index(*pool.index, tree, make_box(i * kGiB, {kGiB}, {1})).size(), 1u);
  }
}

CASE("equal boxes of many buffers share the hash table") {
  constexpr uint32_t kOwners = 200;
  Pool pool(4 * kOwners);  // limited by a page per tree
  std::vector<RegionTree> trees(kOwners);
  std::vector<uint32_t> nodes;
  const Box box = make_box(0, {64}, {1});
  for (uint32_t owner = 0; owner < kOwners; ++owner) nodes.push_back(pool.index->insert(owner, trees[owner], box));
  for (uint32_t owner = 0; owner < kOwners; owner += 2) pool.index->remove(owner, trees[owner], nodes[owner]);
  for (uint32_t owner = 0; owner < kOwners; ++owner) {
    EXPECT_EQ(pool.index->find(owner, box), owner % 2 == 0 ? kNone : nodes[owner]);
  }
}

CASE("insertions without pages are rejected and change nothing; pages are reused") {
  Pool pool(64);
  std::vector<RegionTree> trees(64);
  const Box box = make_box(0, {64}, {1});
  uint32_t num_trees = 0;
  while (pool.index->insert(num_trees, trees[num_trees], box) != kNone) ++num_trees;
  EXPECT_EQ(num_trees, pool.index->num_live_pages());
  EXPECT_EQ(trees[num_trees].root, kNone);
  EXPECT_EQ(pool.index->num_live(), num_trees);
  for (int round = 0; round < 3; ++round) {
    for (uint32_t i = 0; i < num_trees; ++i) pool.index->remove(i, trees[i], pool.index->find(i, box));
    EXPECT_EQ(pool.index->num_live_pages(), 0u);
    for (uint32_t i = 0; i < num_trees; ++i) EXPECT(pool.index->insert(i, trees[i], box) != kNone);
  }
}

CASE("the memory can be mapped at another address") {
  Pool pool(128);
  RegionTree tree;
  for (uint64_t i = 0; i < 100; ++i) pool.index->insert(1, tree, make_box(i * 16, {16}, {1}));
  Pool other(128);
  std::memcpy(other.memory.get(), pool.memory.get(), pool.bytes);
  RegionIndex moved(other.memory.get(), 128, false);
  std::memset(pool.memory.get(), 0xFF, pool.bytes);
  for (uint64_t i = 0; i < 100; ++i) {
    const Box box = make_box(i * 16, {16}, {1});
    const std::vector<Answer> visited = ask_index(moved, tree, box);
    EXPECT_EQ(visited.size(), 1u);
    EXPECT(!visited.empty() && visited[0].node == moved.find(1, box));
  }
  for (uint64_t i = 0; i < 100; ++i) moved.remove(1, tree, moved.find(1, make_box(i * 16, {16}, {1})));
  EXPECT_EQ(moved.num_live_pages(), 0u);
}

TILEWISE_TEST_MAIN
