// The last `capacity` records of one writer; older ones are overwritten and counted.
//
// Purpose: timeline of one worker. Who may call: push by its worker; clear and for_each only while that worker is
// quiet (between runs). Blocks: never. Memory order: none; the end of a run orders it. Memory: one vector.
#pragma once
#include <cstdint>
#include <vector>

namespace tilewise::protocols {

template <class Record>
class RecordRing {
 public:
  void resize(int64_t capacity) { records_.assign(capacity, Record{}), pushed_ = 0; }
  void clear() { pushed_ = 0; }
  void push(const Record& record) {
    if (records_.empty()) return;
    records_[pushed_++ % static_cast<int64_t>(records_.size())] = record;
  }
  int64_t num_dropped() const { return pushed_ > capacity() ? pushed_ - capacity() : 0; }
  template <class Visit>
  void for_each(Visit visit) const {
    for (int64_t i = num_dropped(); i < pushed_; ++i) visit(records_[i % capacity()]);
  }

 private:
  int64_t capacity() const { return static_cast<int64_t>(records_.size()); }
  std::vector<Record> records_;
  int64_t pushed_ = 0;
};

}  // namespace tilewise::protocols
