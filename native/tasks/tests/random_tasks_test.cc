// Random programs compared with a sequential oracle. Every task hashes all that it reads and writes hashes, so that one
// access out of order changes the result. Modes, boxes, allocated outputs, nested tasks, predicates, priorities, edges,
// submitters.
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>

#include "tasks/tests/testing_runtime.h"

using namespace tilewise::tasks::testing;

namespace {

constexpr uint32_t kRows = 8;
constexpr uint32_t kColumns = 8;  // words
constexpr uint32_t kWords = kRows * kColumns;
constexpr int kOwnBuffers = 7;
constexpr int kSharedBuffers = 2;

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b + 0x9E3779B97F4A7C15ull + (a << 6) + (a >> 2))) * 0xBF58476D1CE4E5B9ull;
  return h ^ h >> 29;
}

struct Access {
  int mode = PTO_INPUT;
  int buffer = 0;
  pto_handle handle = 0;
  bool has_box = false;
  uint32_t first_row = 0, first_column = 0, rows = kRows, columns = kColumns;
  pto_region box{};
};

struct Desc {
  uint64_t seed = 0;
  uint64_t delay_us = 0;
  int predicate = -1;
  std::vector<Access> accesses;
  std::vector<std::unique_ptr<Desc>> children;
  PTORuntime* runtime = nullptr;
  pto_kernel leaf = 0;
};

template <class Visit>
void for_each_word(const Access& access, void* address, Visit&& visit) {
  auto* words = static_cast<uint64_t*>(address);
  for (uint32_t r = 0; r < access.rows; ++r) {
    for (uint32_t c = 0; c < access.columns; ++c) visit(words[r * kColumns + c]);
  }
}

/// Applies a task to its buffers. `adds`: a reduction goes to its target, not to a partial value.
void apply(const Desc& desc, void* const* buffers, bool adds) {
  uint64_t hash = desc.seed;
  for (size_t p = 0; p < desc.accesses.size(); ++p) {
    const int mode = desc.accesses[p].mode;
    if (mode != PTO_INPUT && mode != PTO_INOUT) continue;
    for_each_word(desc.accesses[p], buffers[p], [&](uint64_t word) { hash = mix(hash, word); });
  }
  for (size_t p = 0; p < desc.accesses.size(); ++p) {
    const int mode = desc.accesses[p].mode;
    uint64_t number = mix(mode == PTO_COMMUTE || mode == PTO_REDUCE ? desc.seed : hash, p);
    for_each_word(desc.accesses[p], buffers[p], [&](uint64_t& word) {
      number = mix(number, 1);
      if (mode == PTO_COMMUTE || (mode == PTO_REDUCE && adds)) {
        word += number;
      } else if (mode != PTO_INPUT) {
        word = number;
      }
    });
  }
}

std::vector<pto_param> params_of(const Desc& desc, pto_kernel sum) {
  std::vector<pto_param> params;
  for (const Access& access : desc.accesses) {
    params.push_back({static_cast<pto_mode>(access.mode),
                      sum,
                      access.handle,
                      {access.handle == 0 ? kWords * 8 : 0},
                      access.has_box ? &access.box : nullptr,
                      nullptr});
  }
  return params;
}

int leaf_kernel(void* const* buffers, const uint64_t* scalars) {
  const Desc& desc = *pointer<const Desc>(scalars[0]);
  if (desc.delay_us != 0) busy_kernel(nullptr, &desc.delay_us);
  apply(desc, buffers, false);
  return PTO_OK;
}

int nest_kernel(void* const*, const uint64_t* scalars) {
  const Desc& desc = *pointer<const Desc>(scalars[0]);
  for (const auto& child : desc.children) {
    std::vector<pto_param> params = params_of(*child, 0);
    const uint64_t word = scalar(child.get());
    pto_task_spec spec{};
    spec.kernel = desc.leaf;
    spec.worker_type = PTO_VECTOR;
    spec.params = params.data();
    spec.num_params = static_cast<uint32_t>(params.size());
    spec.scalars = &word;
    spec.num_scalars = 1;
    if (pto_submit(desc.runtime, &spec) != 0) continue;
    pto_fail(pto_last_error());
    return PTO_TASK_FAILED;
  }
  return PTO_OK;
}

using Memory = std::array<uint64_t, kWords>;

struct Kernels {
  pto_kernel leaf, nest, sum;
};

/// One submitting thread: its own buffers and their oracle; shared buffers are only added to.
class SubmitterProgram {
 public:
  /// may_nest: without workers a parent runs in the submitter that filled its window, and its children find no slot
  /// there.
  SubmitterProgram(Runtime& runtime, const Kernels& kernels, uint64_t seed, std::vector<pto_handle> shared,
                   bool may_nest)
      : runtime_(runtime), kernels_(kernels), random_(seed), shared_(std::move(shared)), may_nest_(may_nest) {
    for (int b = 0; b < kOwnBuffers; ++b) {
      memory_.push_back(std::make_unique<Memory>());
      for (uint64_t& word : *memory_.back()) word = random_();
      oracle_.push_back(*memory_.back());
      handles_.push_back(pto_register(runtime_, memory_.back()->data(), sizeof(Memory)));
    }
    oracle_.resize(kOwnBuffers + kSharedBuffers);
    for (int b = 0; b < kSharedBuffers; ++b) oracle_[kOwnBuffers + b].fill(0);
  }

  void run(int num_tasks) {
    for (int t = 0; t < num_tasks; ++t) {
      const uint64_t kind = random_() % 64;
      if (kind < 3 && depth_ < 4) {
        pto_scope_begin(runtime_);
        marks_.push_back(handles_.size());
        ++depth_;
      } else if (kind < 7 && depth_ > 0) {
        end_scope();
      } else if (kind < 10) {
        check_one(random_() % handles_.size());
      } else if (kind < 14) {
        submit_nested();
      } else {
        submit_one();
      }
    }
    while (depth_ > 0) end_scope();
    const int status = pto_wait_all(runtime_, PTO_FOREVER);
    EXPECT_EQ(status, 0);
    if (status != 0) std::fprintf(stderr, "%s\n", pto_last_error());
    for (int b = 0; b < kOwnBuffers; ++b) {
      EXPECT(*memory_[b] == oracle_[b]);
      EXPECT_EQ(pto_unregister(runtime_, handles_[b], PTO_FOREVER), 0);
    }
  }
  const Memory& shared_sum(int buffer) const { return oracle_[kOwnBuffers + buffer]; }

 private:
  // Buffers: own ones, then (in handles_) runtime-owned ones; in the oracle the shared ones are between them.
  size_t oracle_index(size_t buffer) const { return buffer < kOwnBuffers ? buffer : buffer + kSharedBuffers; }

  void end_scope() {
    EXPECT_EQ(pto_scope_end(runtime_), 0);
    --depth_;
    handles_.resize(marks_.back());
    oracle_.resize(marks_.back() + kSharedBuffers);
    marks_.pop_back();
  }

  void check_one(size_t buffer) {
    const void* seen = pto_read(runtime_, handles_[buffer], nullptr, PTO_FOREVER);
    if (seen == nullptr) std::fprintf(stderr, "%s\n", pto_last_error());
    EXPECT(seen != nullptr && std::memcmp(seen, oracle_[oracle_index(buffer)].data(), sizeof(Memory)) == 0);
  }

  void draw_box(Access& access) {
    if (random_() % 3 != 0) return;
    access.has_box = true;
    access.first_row = static_cast<uint32_t>(random_() % kRows);
    access.first_column = static_cast<uint32_t>(random_() % kColumns);
    access.rows = 1 + static_cast<uint32_t>(random_() % (kRows - access.first_row));
    access.columns = 1 + static_cast<uint32_t>(random_() % (kColumns - access.first_column));
    access.box = {(uint64_t{access.first_row} * kColumns + access.first_column) * 8,
                  2,
                  {access.rows, access.columns * 8},
                  {kColumns * 8, 1}};
  }

  void apply_to_oracle(const Desc& desc) {
    if (desc.predicate >= 0 && static_cast<uint32_t>(oracle_[oracle_index(desc.predicate)][0]) == 0) return;
    std::vector<void*> buffers;
    for (const Access& access : desc.accesses) {
      uint64_t* base = oracle_[static_cast<size_t>(access.buffer)].data();
      buffers.push_back(base + access.first_row * kColumns + access.first_column);
    }
    apply(desc, buffers.data(), true);
  }

  Desc& draw(const std::vector<size_t>& candidates, bool is_child) {
    auto owned = std::make_unique<Desc>();
    Desc& desc = *owned;
    all_.push_back(std::move(owned));
    desc.seed = random_();
    desc.delay_us = random_() % 16 == 0 ? random_() % 40 : 0;
    std::vector<size_t> left = candidates;
    const size_t count = 1 + random_() % 4;
    for (size_t p = 0; p < count && !left.empty(); ++p) {
      const size_t pick = random_() % left.size();
      Access access;
      const size_t buffer = left[pick];
      left.erase(left.begin() + static_cast<long>(pick));
      access.handle = handles_[buffer];
      access.buffer = static_cast<int>(oracle_index(buffer));
      const int modes[] = {PTO_INPUT, PTO_INPUT, PTO_INPUT, PTO_OUTPUT, PTO_INOUT, PTO_INOUT, PTO_COMMUTE, PTO_REDUCE};
      access.mode = modes[random_() % (is_child ? 7 : 8)];
      if (access.mode != PTO_REDUCE) draw_box(access);
      desc.accesses.push_back(access);
    }
    return desc;
  }

  void submit_one() {
    std::vector<size_t> candidates;
    for (size_t b = 0; b < handles_.size(); ++b) candidates.push_back(b);
    Desc& desc = draw(candidates, false);
    if (random_() % 8 == 0) {
      Access access;
      const auto which = static_cast<int>(random_() % kSharedBuffers);
      access.mode = PTO_COMMUTE;
      access.handle = shared_[static_cast<size_t>(which)];
      access.buffer = kOwnBuffers + which;
      desc.accesses.push_back(access);
    }
    const bool makes_buffer = depth_ > 0 && random_() % 6 == 0;
    if (makes_buffer) {
      Access access;
      access.mode = PTO_OUTPUT;
      access.buffer = static_cast<int>(oracle_.size());
      oracle_.emplace_back().fill(0);
      desc.accesses.push_back(access);
    }
    Extra extra;
    extra.scalars = {scalar(&desc)};
    if (random_() % 8 == 0) extra.priority = static_cast<int32_t>(random_() % 5) - 2;
    if (random_() % 8 == 0 && last_ != 0) extra.after = {last_};
    if (random_() % 16 == 0 && !makes_buffer) {
      desc.predicate = static_cast<int>(random_() % kOwnBuffers);
      extra.predicate = handles_[static_cast<size_t>(desc.predicate)];
      for (const Access& access : desc.accesses) {  // a skipped partial value would still be added
        if (access.mode == PTO_REDUCE) extra.predicate = 0;
      }
      if (extra.predicate == 0) desc.predicate = -1;
    }
    apply_to_oracle(desc);
    std::vector<pto_param> params = params_of(desc, kernels_.sum);
    last_ = runtime_.submit(kernels_.leaf, params, extra);
    EXPECT(last_ != 0);
    if (last_ == 0) std::fprintf(stderr, "%s\n", pto_last_error());
    if (makes_buffer) handles_.push_back(params.back().handle);
  }

  void submit_nested() {
    if (!may_nest_) return;
    auto owned = std::make_unique<Desc>();
    Desc& parent = *owned;
    all_.push_back(std::move(owned));
    parent.runtime = runtime_;
    parent.leaf = kernels_.leaf;
    std::vector<size_t> declared;
    std::vector<pto_param> params;
    for (size_t b = 0; b < kOwnBuffers && declared.size() < 3; ++b) {  // names that outlive every scope
      if (random_() % 3 != 0) continue;
      declared.push_back(b);
      params.push_back(inout(handles_[b]));
    }
    if (declared.empty()) return;
    for (uint64_t c = random_() % 12; c > 0; --c) {
      Desc& child = draw(declared, true);
      apply_to_oracle(child);
      parent.children.push_back(std::move(all_.back()));
      all_.pop_back();
    }
    last_ = runtime_.submit(kernels_.nest, params, {.scalars = {scalar(&parent)}});
    EXPECT(last_ != 0);
  }

  Runtime& runtime_;
  Kernels kernels_;
  std::mt19937_64 random_;
  std::vector<pto_handle> shared_;
  bool may_nest_;
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<Memory> oracle_;
  std::vector<pto_handle> handles_;
  std::vector<size_t> marks_;
  std::vector<std::unique_ptr<Desc>> all_;
  int depth_ = 0;
  pto_task last_ = 0;
};

void run_program(uint64_t seed, uint32_t workers, uint32_t window, int num_submitters, int num_tasks) {
  const int failures_before = tilewise::testing::failures();
  pto_config config = Runtime::config(workers, window);
  config.heap_bytes = 8 << 20;
  Runtime runtime(config);
  const Kernels kernels{runtime.kernel("leaf", leaf_kernel), runtime.kernel("nest", nest_kernel, PTO_SUBMITS),
                        pto_kernel_find(runtime, "sum_i64")};
  std::vector<Memory> shared(kSharedBuffers);
  std::vector<pto_handle> handles;
  for (Memory& memory : shared) {
    memory.fill(0);
    handles.push_back(pto_register(runtime, memory.data(), sizeof(Memory)));
  }
  std::vector<std::unique_ptr<SubmitterProgram>> submitters;
  std::vector<std::thread> threads;
  for (int l = 0; l < num_submitters; ++l) {
    submitters.push_back(std::make_unique<SubmitterProgram>(runtime, kernels, seed * 1000 + static_cast<uint64_t>(l),
                                                            handles, workers > 0));
  }
  for (auto& submitter : submitters) threads.emplace_back([&submitter, num_tasks] { submitter->run(num_tasks); });
  for (std::thread& thread : threads) thread.join();
  for (int b = 0; b < kSharedBuffers; ++b) {
    Memory sum{};
    for (const auto& submitter : submitters) {
      for (uint32_t w = 0; w < kWords; ++w) sum[w] += submitter->shared_sum(b)[w];
    }
    EXPECT(sum == shared[static_cast<size_t>(b)]);
  }
  if (tilewise::testing::failures() != failures_before) {
    std::fprintf(stderr, "%s\n", pto_last_error());
    std::fprintf(stderr, "seed %lu, %u workers, window %u, %d submitters\n", static_cast<unsigned long>(seed), workers,
                 window, num_submitters);
  }
}

}  // namespace

CASE("random programs on one submitter end like the sequential oracle") {
  uint64_t seed = 1;
  for (const uint32_t window : {2u, 4u, 16u, 128u, 1024u}) {
    for (const uint32_t workers : {0u, 1u, 2u, 3u, 4u}) {
      for (int repeat = 0; repeat < (kSlowdown == 1 ? 40 : 6); ++repeat) run_program(seed++, workers, window, 1, 400);
    }
  }
}

CASE("random programs on several submitters end like the sequential oracle") {
  uint64_t seed = 1001;
  for (const int submitters : {2, 3}) {
    for (const uint32_t window : {2u, 8u, 64u}) {
      for (const uint32_t workers : {0u, 1u, 2u, 4u}) {
        for (int repeat = 0; repeat < (kSlowdown == 1 ? 20 : 3); ++repeat) {
          run_program(seed++, workers, window, submitters, 300);
        }
      }
    }
  }
}

TILEWISE_TEST_MAIN
