// See graph_log.h.
#include "tasks/observe/graph_log.h"

#include <algorithm>
#include <fstream>

#include "tasks/sched/sleep.h"
#include "tasks/store/status.h"

namespace tilewise::tasks {

namespace {

constexpr const char* kModes[] = {"input", "output", "inout", "commute", "reduce", "no_dep"};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return out + '"';
}

template <class Values>
std::string list_of(const Values& values) {
  std::string out = "[";
  for (const auto& value : values) out += (out.size() > 1 ? "," : "") + std::to_string(value);
  return out + "]";
}

}  // namespace

std::vector<TaskRef>& GraphLog::pending() {
  thread_local std::vector<TaskRef> list;
  return list;
}

void GraphLog::add(const Store& store, uint32_t slot, const pto_task_spec& spec) {
  const Slot& task = store.slots[slot];
  Node node{store.name_at(slot),
            spec.kernel >= 0 ? store.kernels[spec.kernel].name : "",
            spec.name != nullptr ? spec.name : "",
            static_cast<int>(store.submitter_of(slot)),
            store.thread_slots[store.submitter_of(slot)].depth,
            task.parent != 0 ? store.name_at(task.parent - 1) : 0,
            now_ns(),
            {},
            {},
            {}};
  for (uint32_t p = 0; p < spec.num_params; ++p) {
    const pto_param& param = spec.params[p];
    if (param.handle == 0) continue;
    const Handle& handle = store.handles[(param.handle & 0xFFFFFFFF) - 1];
    node.accesses.push_back({param.mode, param.handle, handle.bytes, param.region != nullptr,
                             param.region != nullptr ? *param.region : pto_region{}});
  }
  if (spec.predicate != 0) node.accesses.push_back({PTO_INPUT, spec.predicate, 4, false, {}});
  node.after.assign(spec.after, spec.after + spec.num_after);
  std::vector<TaskRef>& producers = pending();
  producers.insert(producers.end(), node.after.begin(), node.after.end());
  std::sort(producers.begin(), producers.end());
  producers.erase(std::unique(producers.begin(), producers.end()), producers.end());
  node.producers.swap(producers);
  producers.clear();
  std::lock_guard guard(mutex_);
  nodes_.push_back(std::move(node));
}

void GraphLog::write(const char* path) const {
  std::lock_guard guard(mutex_);
  std::ofstream file(path);
  file << "{\"version\":1,\"tasks\":[";
  for (size_t n = 0; n < nodes_.size(); ++n) {
    const Node& node = nodes_[n];
    file << (n > 0 ? ",\n" : "\n") << "{\"id\":" << node.task << ",\"kernel\":" << quoted(node.kernel)
         << ",\"name\":" << quoted(node.name) << ",\"submitter\":" << node.submitter << ",\"scope\":" << node.depth
         << ",\"depth\":" << node.depth << ",\"domain\":" << node.domain << ",\"params\":[";
    for (size_t a = 0; a < node.accesses.size(); ++a) {
      const Access& access = node.accesses[a];
      file << (a > 0 ? "," : "") << "{\"mode\":\"" << kModes[access.mode] << "\",\"buffer\":" << access.buffer
           << ",\"bytes\":" << access.bytes << ",\"region\":";
      if (access.has_region) {
        const pto_region& box = access.region;
        file << "{\"offset\":" << box.offset
             << ",\"size\":" << list_of(std::vector<uint64_t>(box.size, box.size + box.ndim))
             << ",\"stride\":" << list_of(std::vector<uint64_t>(box.stride, box.stride + box.ndim)) << "}";
      } else {
        file << "null";
      }
      file << "}";
    }
    file << "],\"after\":" << list_of(node.after) << ",\"producers\":" << list_of(node.producers)
         << ",\"submit_ns\":" << node.submit_ns << ",\"end_ns\":0}";
  }
  file << "\n]}\n";
  file.close();
  if (!file) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.graph_end] the graph's file must be writable; got '", path,
                "'; choose another path");
  }
}

}  // namespace tilewise::tasks
