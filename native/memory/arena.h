// The memory of one device: one zeroed, page-aligned mapping, huge pages advised.
//
// Purpose: tensors live at planned offsets; nothing is allocated inside it at run time. Who may call: anyone may
// read data(); the plan decides who touches which bytes. Blocks: never after construction. Memory order: none.
// Memory: mmap; given back by the destructor. Refuses: sizes the system cannot map (ResourceError).
#pragma once
#include <cstddef>
#include <cstdint>

namespace tilewise::memory {

class Arena {
 public:
  explicit Arena(int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
};

}  // namespace tilewise::memory
