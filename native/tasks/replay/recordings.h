// The recordings of one runtime: open ones, and those that can be replayed, by an instantiated graph
// (instantiated_graph.h) or task by task (replay.cc).
//
// Who may call: any thread outside of tasks. Blocks: a replay for slots and for the previous replay; otherwise for the
// submission lock and mutex_, which is taken after it. Memory: of the process.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tasks/engine/engine.h"
#include "tasks/replay/instantiated_graph.h"
#include "tasks/replay/recording.h"

namespace tilewise::tasks {

class Recordings final : public Replays {
 public:
  explicit Recordings(Engine& engine);

  void begin();
  pto_recording end();
  void replay(pto_recording name, const pto_handle* from, const pto_handle* to, uint32_t num_handles);
  void free(pto_recording name);

  void add(uint32_t slot, const pto_task_spec& spec, uint32_t thread, uint32_t fresh) override;
  void leave(uint32_t thread) override;
  void settle(Handle& handle, uint32_t thread) override;
  void settle_all(uint32_t thread) override;
  void inherit(uint32_t slot) override;
  const char* name_of(uint32_t slot) const override;
  bool has_replays(uint32_t thread) const override;
  void watch_replays(uint32_t thread) override;
  bool has_live_replays() const override;
  std::vector<std::pair<uint64_t, uint64_t>> live_replays() const override;

 private:
  void instantiate(Recording& recording);
  void reap();

  Engine& engine_;
  mutable std::mutex mutex_;  // guards the next three
  std::map<pto_recording, std::shared_ptr<Recording>> all_;
  std::vector<std::shared_ptr<Recording>> instantiated_;  // by first slot; includes freed ones whose tasks still run
  pto_recording next_ = 1;
  std::vector<std::unique_ptr<Recording>> open_;  // per thread
};

/// The recordings of a runtime that was opened by open_engine().
inline Recordings& recordings_of(const Engine& engine) { return static_cast<Recordings&>(*engine.replays); }

}  // namespace tilewise::tasks
