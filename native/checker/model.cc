// See model.h.
#include "checker/model.h"

#include <algorithm>

namespace tilewise::checker {

namespace {

constexpr uint32_t kGap = 1 << 16;  // times between two writes, for writes placed between them

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel || order == std::memory_order_seq_cst;
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  for (int t = 0; t < kMaxThreads; ++t) clock[t] = std::max(clock[t], other[t]);
}

void Model::join_places(View& view, const View& other) const {
  for (int l = 0; l < num_locations_; ++l) view.at[l] = std::max(view.at[l], other.at[l]);
}

void Model::reset(int num_threads) {
  for (int l = 0; l < num_locations_; ++l) {
    locations_[l].messages.clear();
    locations_[l].order.clear();
    locations_[l].pins.clear();
  }
  num_threads_ = num_threads;
  num_locations_ = 0;
  for (int t = 0; t < num_threads; ++t) {
    threads_[t] = {};
    threads_[t].now.clock[t] = 1;
  }
  sequential_ = light_ = heavy_ = woken_ = {};
  has_overtaken_pin_ = false;
}

int Model::add_location(uint64_t value) {
  if (num_locations_ == kMaxLocations) return kNoLocation;
  Location& location = locations_[num_locations_];
  location.messages.emplace_back();
  location.messages[0].value = value;
  location.order.push_back(0);
  return num_locations_++;
}

uint64_t Model::peek(int location) const {
  const Location& atomic = locations_[location];
  return atomic.messages[atomic.order.back()].value;
}

void Model::poke(int location, uint64_t value) {
  Location& atomic = locations_[location];
  atomic.messages[atomic.order.back()].value = value;
}

uint32_t Model::bound(int thread, const Op& op) const {
  uint32_t oldest = threads_[thread].now.at[op.location];
  if (op.is_sequential()) oldest = std::max(oldest, sequential_.at[op.location]);
  if (op.kind == Kind::kSleep) oldest = std::max(oldest, woken_.at[op.location]);
  return oldest;
}

std::vector<Choice> Model::choices(int thread, const Op& op) const {
  if (op.location == kNoLocation || op.kind == Kind::kWake) return {{}};
  const Location& location = locations_[op.location];
  const uint32_t oldest = bound(thread, op);
  std::vector<Choice> choices;
  for (size_t at = location.order.size(); at-- > 0;) {  // newest first
    const int message = location.order[at];
    const Message& write = location.messages[message];
    if (write.time < oldest) break;
    const bool is_followed = at + 1 < location.order.size() && location.messages[location.order[at + 1]].is_attached;
    const bool can_write = !is_followed;
    switch (op.kind) {
      case Kind::kLoad:
      case Kind::kSleep:
        choices.push_back({message, false});
        break;
      case Kind::kStore:
      case Kind::kChange:
        if (can_write) choices.push_back({message, false});
        break;
      default:
        if (write.value != op.expected) {
          choices.push_back({message, true});
        } else {
          if (can_write) choices.push_back({message, false});
          if (op.may_fail) choices.push_back({message, true});
        }
    }
  }
  return choices;
}

void Model::read(int thread, const Op& op, int message, std::memory_order order) {
  Thread& me = threads_[thread];
  const Message& write = locations_[op.location].messages[message];
  me.now.at[op.location] = std::max(me.now.at[op.location], write.time);
  join_places(me.acquired, write.view);
  join(me.acquired.clock, write.view.clock);
  if (acquires(order)) {
    join_places(me.now, write.view);
    join(me.now.clock, write.view.clock);
  }
  me.last_read[op.location] = message;
  me.read_at[op.location] = me.now.clock[thread];
  if (order == std::memory_order_seq_cst) {
    sequential_.at[op.location] = std::max(sequential_.at[op.location], write.time);
  }
}

int Model::write(int thread, const Op& op, uint64_t value, int behind, bool is_change, int event) {
  Thread& me = threads_[thread];
  Location& location = locations_[op.location];
  const auto place = std::find(location.order.begin(), location.order.end(), behind) + 1;
  const uint32_t before = location.messages[behind].time;
  const uint32_t time =
      place == location.order.end() ? before + kGap : before + (location.messages[*place].time - before) / 2;
  const int number = static_cast<int>(location.messages.size());
  location.order.insert(place, number);
  location.messages.emplace_back();
  Message& made = location.messages.back();
  made.time = time;
  made.is_attached = is_change;
  made.event = event;
  made.value = value;
  made.writer = thread;
  me.now.at[op.location] = time;
  made.clock = me.now.clock;
  made.view = releases(op.order) ? me.now : me.released;
  made.view.at[op.location] = time;
  if (is_change) {  // continues the release sequence of the write that it read
    const View& continued = location.messages[behind].view;
    join_places(made.view, continued);
    join(made.view.clock, continued.clock);
  }
  if (op.order == std::memory_order_seq_cst) {
    sequential_.at[op.location] = std::max(sequential_.at[op.location], time);
  }
  for (const Pin& pin : location.pins) {
    has_overtaken_pin_ |= pin.thread != thread && !has_seen(me.now.clock, pin.thread, pin.number);
  }
  return number;
}

void Model::sequential_fence(int thread) {
  Thread& me = threads_[thread];
  acquire_fence(thread);
  join_places(me.now, sequential_);
  join_places(sequential_, me.now);
  release_fence(thread);
}

void Model::acquire_fence(int thread) {
  Thread& me = threads_[thread];
  join_places(me.now, me.acquired);
  join(me.now.clock, me.acquired.clock);
}

void Model::release_fence(int thread) {
  Thread& me = threads_[thread];
  me.released = me.now;
  ++me.now.clock[thread];  // later events are not released
}

void Model::execute(int thread, Op& op, Choice choice, int event) {
  Thread& me = threads_[thread];
  op.has_succeeded = !choice.fails;
  if (op.is_access() || op.kind == Kind::kSleep) op.value = locations_[op.location].messages[choice.message].value;
  switch (op.kind) {
    case Kind::kLoad:
      read(thread, op, choice.message, op.order);
      break;
    case Kind::kStore:
      write(thread, op, op.operand, choice.message, false, event);
      break;
    case Kind::kChange:
      read(thread, op, choice.message, op.order);
      write(thread, op, op.change(op.value, op.operand), choice.message, true, event);
      break;
    case Kind::kCompare:
      read(thread, op, choice.message, choice.fails ? op.failure : op.order);
      if (!choice.fails) write(thread, op, op.operand, choice.message, true, event);
      break;
    case Kind::kFence:
      sequential_fence(thread);
      break;
    case Kind::kHeavy:
      sequential_fence(thread);
      join_places(me.now, light_);
      join_places(sequential_, me.now);
      join_places(heavy_, me.now);
      release_fence(thread);
      break;
    case Kind::kLight:
      join_places(me.now, heavy_);
      join_places(light_, me.now);
      break;
    case Kind::kSleep:
      op.has_succeeded = op.value == op.expected;
      if (!op.has_succeeded) {  // the thread must not see less than the system
        const Message& seen = locations_[op.location].messages[choice.message];
        me.now.at[op.location] = std::max(me.now.at[op.location], seen.time);
      }
      break;
    case Kind::kWake:
      woken_.at[op.location] = std::max(woken_.at[op.location], me.now.at[op.location]);
      break;
  }
  ++me.now.clock[thread];  // later events are not part of the step's release
}

bool Model::has_newer(int location, int message) const {
  const Location& atomic = locations_[location];
  const uint64_t value = atomic.messages[message].value;
  const auto place = std::find(atomic.order.begin(), atomic.order.end(), message);
  return std::any_of(place, atomic.order.end(), [&](int later) { return atomic.messages[later].value != value; });
}

void Model::see_newer(int thread, int location, int message) {
  const Location& atomic = locations_[location];
  const uint64_t value = atomic.messages[message].value;
  auto place = std::find(atomic.order.begin(), atomic.order.end(), message);
  while (place != atomic.order.end() && atomic.messages[*place].value == value) ++place;
  if (place == atomic.order.end()) return;
  uint32_t& oldest = threads_[thread].now.at[location];
  oldest = std::max(oldest, atomic.messages[*place].time);
}

bool Model::pin(int thread, int location) {
  Location& atomic = locations_[location];
  const Thread& me = threads_[thread];
  const uint32_t number = me.read_at[location];
  atomic.pins.push_back({thread, number});
  const uint32_t read_time = atomic.messages[me.last_read[location]].time;
  return std::none_of(atomic.messages.begin(), atomic.messages.end(), [&](const Message& write) {
    return write.time > read_time && write.writer >= 0 && write.writer != thread &&
           !has_seen(write.clock, thread, number);
  });
}

}  // namespace tilewise::checker
