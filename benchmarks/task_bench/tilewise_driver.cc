// Task Bench on this project's task runtime: one task per point and time step, ordered by its buffers alone.
//
// Step t of point x overwrites buffer (t mod fields, x) and reads the buffers of its dependencies of step t - 1. The
// core's execute_point checks every input byte by assert, so a missed dependency stops the program; -field 2 lets
// two steps share the buffers, so that writers must wait for readers. At the end the driver checks that every task
// ran. Tasks with more than 23 dependencies are refused: a task has at most 24 parameters.
// With -replay, steps that repeat are recorded once and replayed; the recording counts into the time. Where steps do
// not repeat (every step has buffers of its own, or its own width) it changes nothing. Run: tilewise_driver -worker
// THREADS [-replay] and the options of Task Bench (-steps, -width, -type, -kernel, -iter, -field); one of the threads
// is the submitter, which helps.
#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "core.h"
#include "pinning.h"
#include "tilewise/pto_api.h"
#include "timer.h"

#ifdef NDEBUG
#error "Task Bench checks by assert: build without NDEBUG"
#endif

namespace {

constexpr size_t kLine = 64;
constexpr long kTasksPerRecording = 128;

void require(bool is_good, const char* what) {
  if (is_good) return;
  std::fprintf(stderr, "%s: %s\n", what, pto_last_error());
  std::exit(1);
}

/// Which task it is, in one scalar: with up to four buffers its arguments then stand next to its producers.
struct Name {
  uint64_t step : 32;
  uint64_t point : 16;
  uint64_t num_inputs : 7;
  uint64_t is_recorded : 1;
  uint64_t graph : 8;
};
static_assert(sizeof(Name) == sizeof(uint64_t));

const App* the_app = nullptr;

char* thread_scratch(size_t bytes) {
  thread_local std::vector<uint64_t> scratch;
  if (scratch.size() * sizeof(uint64_t) < bytes) {
    scratch.resize((bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    TaskGraph::prepare_scratch(reinterpret_cast<char*>(scratch.data()), scratch.size() * sizeof(uint64_t));
  }
  return reinterpret_cast<char*>(scratch.data());
}

// The time step of the task that writes a buffer next, behind the buffer's own bytes: a recorded task learns from it
// how far the replays are.
long& next_step(void* buffer, size_t bytes) {
  return *reinterpret_cast<long*>(static_cast<char*>(buffer) +
                                  (bytes + sizeof(long) - 1) / sizeof(long) * sizeof(long));
}

// buffers: the output, then the inputs. scalars: the Name.
int execute_point(void* const* buffers, const uint64_t* scalars) {
  const auto name = std::bit_cast<Name>(scalars[0]);
  const TaskGraph& graph = the_app->graphs[name.graph];
  const size_t num_inputs = name.num_inputs;
  const char* inputs[PTO_MAX_PARAMS];
  size_t input_bytes[PTO_MAX_PARAMS];
  for (size_t i = 0; i < num_inputs; ++i) {
    inputs[i] = static_cast<const char*>(buffers[i + 1]);
    input_bytes[i] = graph.output_bytes_per_task;
  }
  const size_t scratch_bytes = graph.scratch_bytes_per_task;
  long step = name.step;
  if (name.is_recorded != 0) {
    long& next = next_step(buffers[0], graph.output_bytes_per_task);
    step = next;
    next += graph.nb_fields;
  }
  graph.execute_point(step, name.point, static_cast<char*>(buffers[0]), graph.output_bytes_per_task, inputs,
                      input_bytes, num_inputs, scratch_bytes ? thread_scratch(scratch_bytes) : nullptr, scratch_bytes);
  return PTO_OK;
}

// The buffers of one graph, and who depends on whom: the core's answers, asked once for each set of dependencies.
class Grid {
 public:
  explicit Grid(const TaskGraph& graph)
      : graph_(graph),
        pitch_((graph.output_bytes_per_task + 2 * sizeof(long) - 1 + kLine - 1) / kLine * kLine),
        handles_(num_buffers()) {
    bytes_.reset(static_cast<char*>(std::aligned_alloc(kLine, pitch_ * num_buffers())));
    require(bytes_ != nullptr, "no memory for the buffers");
    for (long set = 0; set < graph.max_dependence_sets(); ++set)
      for (long point = 0; point < graph.max_width; ++point) dependencies_.push_back(find_dependencies(set, point));
  }

  size_t num_buffers() const { return static_cast<size_t>(graph_.nb_fields) * graph_.max_width; }

  void register_buffers(PTORuntime* runtime) {
    for (size_t i = 0; i < handles_.size(); ++i) {
      handles_[i] = pto_register(runtime, bytes_.get() + i * pitch_, graph_.output_bytes_per_task);
      require(handles_[i] != 0, "pto_register");
    }
  }

  // Submits every step; with `replays` those that repeat are recorded once and replayed.
  void submit_all(PTORuntime* runtime, pto_kernel kernel, bool replays) {
    const long period = replays ? find_period() : 0;
    long step = 0;
    if (period > 0) {
      submit_step(runtime, kernel, step++);
      expect_step(step);
      require(pto_record_begin(runtime) == PTO_OK, "pto_record_begin");
      for (const long end = step + period; step < end; ++step) submit_step(runtime, kernel, step, true);
      const pto_recording recording = pto_record_end(runtime);
      require(recording != 0, "pto_record_end");
      for (; step + period <= graph_.timesteps; step += period) {
        require(pto_replay(runtime, recording, nullptr, nullptr, 0) == PTO_OK, "pto_replay");
      }
    }
    for (; step < graph_.timesteps; ++step) submit_step(runtime, kernel, step);
  }

  void submit_step(PTORuntime* runtime, pto_kernel kernel, long step, bool is_recorded = false) {
    const long offset = graph_.offset_at_timestep(step), width = graph_.width_at_timestep(step);
    const long last_offset = graph_.offset_at_timestep(step - 1);
    const long last_end = last_offset + graph_.width_at_timestep(step - 1);
    const auto* sets = &dependencies_[graph_.dependence_set_at_timestep(step) * graph_.max_width];
    const pto_handle* outputs = &handles_[step % graph_.nb_fields * graph_.max_width];
    const pto_handle* inputs = step > 0 ? &handles_[(step - 1) % graph_.nb_fields * graph_.max_width] : nullptr;
    for (long point = offset; point < offset + width; ++point) {
      uint32_t num_params = 1;
      params_[0].mode = PTO_OUTPUT;
      params_[0].handle = outputs[point];
      for (long source : sets[point]) {
        if (source < last_offset || source >= last_end) continue;
        params_[num_params].mode = PTO_INPUT;
        params_[num_params++].handle = inputs[source];
      }
      submit(runtime, kernel, step, point, num_params, is_recorded);
    }
  }

 private:
  struct Free {
    void operator()(char* bytes) const { std::free(bytes); }
  };

  std::vector<long> find_dependencies(long set, long point) const {
    std::vector<long> points;
    for (const std::pair<long, long>& interval : graph_.dependencies(set, point))
      for (long source = interval.first; source <= interval.second; ++source) points.push_back(source);
    if (points.size() < PTO_MAX_PARAMS) return points;
    std::fprintf(stderr, "a task takes at most %d dependencies; got %zu; choose a smaller -width or -radix\n",
                 PTO_MAX_PARAMS - 1, points.size());
    std::exit(2);
  }

  // The next step to write a buffer will be the first from `step` on that has it.
  void expect_step(long step) {
    const long fields = graph_.nb_fields;
    for (long field = 0; field < fields; ++field) {
      const long first = step + (field - step % fields + fields) % fields;
      for (long point = 0; point < graph_.max_width; ++point) {
        char* const buffer = bytes_.get() + (field * graph_.max_width + point) * pitch_;
        next_step(buffer, graph_.output_bytes_per_task) = first;
      }
    }
  }

  // Steps after which the same tasks come again, on the same buffers: from step 1 on. 0: they never do.
  long find_period() const {
    const long sets = graph_.max_dependence_sets();
    long period = std::lcm(graph_.nb_fields, sets);
    period *= std::max(1L, kTasksPerRecording / (period * graph_.max_width));
    if (1 + 2 * period > graph_.timesteps) return 0;
    for (long step = 0; step < graph_.timesteps; ++step) {
      if (graph_.width_at_timestep(step) != graph_.max_width) return 0;
      const long later = std::min(step + period, graph_.timesteps - 1);
      const bool is_same = graph_.dependence_set_at_timestep(step) == graph_.dependence_set_at_timestep(later);
      if (later == step + period && !is_same) return 0;
    }
    return period;
  }

  void submit(PTORuntime* runtime, pto_kernel kernel, long step, long point, uint32_t num_params, bool is_recorded) {
    const auto graph = static_cast<uint64_t>(&graph_ - the_app->graphs.data());
    const Name name{static_cast<uint64_t>(step), static_cast<uint64_t>(point), num_params - 1, is_recorded, graph};
    const auto scalar = std::bit_cast<uint64_t>(name);
    pto_task_spec spec = {};
    spec.kernel = kernel;
    spec.worker_type = PTO_VECTOR;
    spec.params = params_;
    spec.num_params = num_params;
    spec.scalars = &scalar;
    spec.num_scalars = 1;
    require(pto_submit(runtime, &spec) != 0, "pto_submit");
  }

  const TaskGraph& graph_;
  const size_t pitch_;
  std::unique_ptr<char[], Free> bytes_;
  std::vector<pto_handle> handles_;
  std::vector<std::vector<long>> dependencies_;  // by set, then point
  pto_param params_[PTO_MAX_PARAMS] = {};
};

uint32_t num_threads(int argc, char** argv) {
  for (int i = 1; i + 1 < argc; ++i)
    if (!std::strcmp(argv[i], "-worker")) return static_cast<uint32_t>(std::atoi(argv[i + 1]));
  return 1;
}

PTORuntime* open_runtime(uint32_t threads, size_t num_buffers) {
  pto_config config;
  pto_config_init(&config);
  config.num_workers = threads > 1 ? threads - 1 : PTO_NO_WORKERS;
  config.max_handles = static_cast<uint32_t>(num_buffers) + 64;
  config.flags = PTO_PIN;  // workers on all but the first of the processors we may use
  PTORuntime* runtime = nullptr;
  require(pto_runtime_open(&config, &runtime) == PTO_OK, "pto_runtime_open");
  pin_to(0);
  return runtime;
}

uint64_t count_tasks(const App& app) {
  uint64_t count = 0;
  for (const TaskGraph& graph : app.graphs)
    for (long step = 0; step < graph.timesteps; ++step) count += graph.width_at_timestep(step);
  return count;
}

void check_counts(PTORuntime* runtime, uint64_t num_tasks) {
  pto_stats stats = {};
  require(pto_get_stats(runtime, &stats) == PTO_OK, "pto_get_stats");
  if (stats.num_completed == num_tasks && stats.num_failed == 0) return;
  std::fprintf(stderr, "%llu tasks must run; %llu completed, %llu failed\n", static_cast<unsigned long long>(num_tasks),
               static_cast<unsigned long long>(stats.num_completed), static_cast<unsigned long long>(stats.num_failed));
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  App app(argc, argv);
  app.display();
  the_app = &app;
  for (const TaskGraph& graph : app.graphs) {
    if (graph.max_width < 1 << 16 && app.graphs.size() <= 256) continue;
    std::fprintf(stderr, "a graph is at most 65,535 wide, and there are at most 256\n");
    return 2;
  }
  std::vector<std::unique_ptr<Grid>> grids;
  size_t num_buffers = 0;
  for (const TaskGraph& graph : app.graphs) {
    grids.push_back(std::make_unique<Grid>(graph));
    num_buffers += grids.back()->num_buffers();
  }
  PTORuntime* runtime = open_runtime(num_threads(argc, argv), num_buffers);
  const pto_kernel kernel = pto_kernel_add(runtime, "execute_point", execute_point, 0);
  require(kernel >= 0, "pto_kernel_add");
  for (auto& grid : grids) grid->register_buffers(runtime);

  Timer::time_start();
  const bool replays = std::find(argv, argv + argc, std::string_view("-replay")) != argv + argc;
  for (auto& grid : grids) grid->submit_all(runtime, kernel, replays);
  require(pto_wait_all(runtime, PTO_FOREVER) == PTO_OK, "pto_wait_all");
  const double elapsed = Timer::time_end();

  check_counts(runtime, count_tasks(app));
  app.report_timing(elapsed);
  require(pto_runtime_close(runtime) == PTO_OK, "pto_runtime_close");
}
