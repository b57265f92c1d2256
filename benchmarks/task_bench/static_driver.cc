// Task Bench without a runtime: the limit of this machine for any that keeps the points where they are.
//
// Every thread owns a block of neighbouring points and walks through the time steps; a point's only synchronisation is
// one counter, how many steps it has done, on a cache line of its own with its buffers. A point waits until those whose
// results it reads have done the last step, and those that read what it overwrites. No queue, no task, no balance.
// Run: static_driver -worker THREADS and the options of Task Bench (-steps, -width, -type, -kernel, -iter, -field).
#include <sched.h>

#include <atomic>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core.h"
#include "pinning.h"
#include "timer.h"

#ifdef NDEBUG
#error "Task Bench checks by assert: build without NDEBUG"
#endif

namespace {

constexpr size_t kLine = 64;

struct alignas(kLine) Progress {
  std::atomic<long> num_steps{0};
};

class Grid {
 public:
  explicit Grid(const TaskGraph& graph)
      : graph_(graph),
        pitch_((graph.output_bytes_per_task + kLine - 1) / kLine * kLine),
        progress_(static_cast<size_t>(graph.max_width)),
        bytes_(static_cast<char*>(
            std::aligned_alloc(kLine, pitch_ * static_cast<size_t>(graph.nb_fields * graph.max_width)))) {
    for (long set = 0; set < graph.max_dependence_sets(); ++set)
      for (long point = 0; point < graph.max_width; ++point) {
        inputs_.push_back(points_of(graph.dependencies(set, point)));
        readers_.push_back(points_of(graph.reverse_dependencies(set, point)));
      }
  }
  Grid(const Grid&) = delete;

  void run(long first, long last) {
    for (long step = 0; step < graph_.timesteps; ++step)
      for (long point = first; point < last; ++point) run_point(step, point);
  }

 private:
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };

  static std::vector<long> points_of(const std::vector<std::pair<long, long>>& intervals) {
    std::vector<long> points;
    for (const auto& [first, last] : intervals)
      for (long point = first; point <= last; ++point) points.push_back(point);
    return points;
  }

  char* buffer(long step, long point) const {
    return bytes_.get() + static_cast<size_t>(step % graph_.nb_fields * graph_.max_width + point) * pitch_;
  }

  void wait_for(const std::vector<long>& points, long num_steps) const {
    for (long point : points)
      while (progress_[static_cast<size_t>(point)].num_steps.load(std::memory_order_acquire) < num_steps)
        __builtin_ia32_pause();
  }

  bool has_point(long step, long point) const {
    const long first = graph_.offset_at_timestep(step);
    return point >= first && point < first + graph_.width_at_timestep(step);
  }

  void run_point(long step, long point) {
    if (has_point(step, point)) {
      const char* inputs[32];
      size_t input_bytes[32];
      size_t num_inputs = 0;
      if (step > 0) {
        const auto in_set = [&](const auto& lists, long of) -> const std::vector<long>& {
          return lists[static_cast<size_t>(graph_.dependence_set_at_timestep(of) * graph_.max_width + point)];
        };
        wait_for(in_set(inputs_, step), step);
        // What it overwrites is of step - fields, read in the step after that.
        const long read_at = step - graph_.nb_fields + 1;
        if (read_at > 0) wait_for(in_set(readers_, read_at), read_at + 1);
        for (long source : in_set(inputs_, step)) {
          if (!has_point(step - 1, source)) continue;
          assert(num_inputs < 32);
          inputs[num_inputs] = buffer(step - 1, source);
          input_bytes[num_inputs++] = graph_.output_bytes_per_task;
        }
      }
      graph_.execute_point(step, point, buffer(step, point), graph_.output_bytes_per_task, inputs, input_bytes,
                           num_inputs, nullptr, 0);
    }
    progress_[static_cast<size_t>(point)].num_steps.store(step + 1, std::memory_order_release);
  }

  const TaskGraph& graph_;
  const size_t pitch_;
  std::vector<Progress> progress_;
  std::unique_ptr<char[], Free> bytes_;
  std::vector<std::vector<long>> inputs_, readers_;  // by set, then point
};

long num_threads(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i)
    if (!std::strcmp(argv[i], "-worker")) return std::atol(argv[i + 1]);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  App app(argc, argv);
  app.display();
  for (const TaskGraph& graph : app.graphs) {
    if (graph.nb_fields >= 2) continue;
    std::fprintf(stderr, "a point must keep its last result while it makes the next: choose -field 2 or more\n");
    return 2;
  }
  const long count = num_threads(argc, argv);
  std::vector<std::unique_ptr<Grid>> grids;
  for (const TaskGraph& graph : app.graphs) grids.push_back(std::make_unique<Grid>(graph));
  std::atomic<long> num_ready{0};
  std::atomic<bool> begun{false};
  const auto work = [&](long thread) {
    pin_to(thread);
    num_ready.fetch_add(1);
    while (!begun.load(std::memory_order_acquire)) sched_yield();
    for (size_t g = 0; g < grids.size(); ++g) {
      const long width = app.graphs[g].max_width;
      grids[g]->run(width * thread / count, width * (thread + 1) / count);
    }
  };
  std::vector<std::thread> threads;
  for (long thread = 1; thread < count; ++thread) threads.emplace_back(work, thread);
  threads.emplace_back(work, 0);
  while (num_ready.load() < count) sched_yield();
  Timer::time_start();
  begun.store(true, std::memory_order_release);
  for (std::thread& thread : threads) thread.join();
  app.report_timing(Timer::time_end());
}
