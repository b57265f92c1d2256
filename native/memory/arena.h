// The memory of one device: one zeroed, page-aligned mapping with huge pages advised. If the device has a file, the
// mapping is followed by as many unmapped addresses as the file has bytes.
//
// Purpose: tensors have planned offsets; nothing is allocated in it at run time. A tensor in the file has an offset
// like any other, from file_begin() on, but no memory at its addresses; it is accessed only by transfers. Who may call:
// any thread may call data(); the plan decides which bytes each task uses. Blocks: never after construction. Memory
// order: none. Memory: mmap, unmapped by the destructor. Rejects sizes that the system cannot map (ResourceError).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/shared_file.h"
#include "memory/spill_file.h"

namespace tilewise::memory {

class Arena {
 public:
  explicit Arena(int64_t bytes, std::unique_ptr<SpillFile> file = nullptr);
  /// In memory that other processes also map: a sealed file. The caller keeps the descriptor.
  Arena(int shared_file, int64_t bytes, std::unique_ptr<SpillFile> file = nullptr);
  /// Only a range of addresses, for a device whose memory and file this process cannot map.
  struct Addresses {
    int64_t bytes;
    int64_t file_bytes;
  };
  explicit Arena(Addresses addresses);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  /// Whether its addresses are backed by memory.
  bool is_mapped() const { return !is_reserved_; }
  const SpillFile* file() const { return file_.get(); }
  /// Offset of the file's first byte.
  int64_t file_begin() const { return file_begin(bytes_); }
  /// For the host: copies between `memory` and the file at `offset`. Rejects ranges beyond the file (ArgumentError) and
  /// failed transfers (ResourceError).
  void move(SpillFile::Way way, int64_t offset, std::byte* memory, int64_t bytes) const;
  static int64_t file_begin(int64_t bytes) { return (bytes + kFilePage - 1) / kFilePage * kFilePage; }

 private:
  int64_t mapped_bytes() const {
    if (behind_ > 0) return file_begin() + behind_;
    return file_ == nullptr ? bytes_ : file_begin() + file_->bytes();
  }

  std::byte* data_ = nullptr;
  int64_t bytes_;
  int64_t behind_ = 0;  // number of addresses of a file in another process
  bool is_reserved_ = false;
  std::unique_ptr<SpillFile> file_;
  std::unique_ptr<SharedFile> shared_;
};

}  // namespace tilewise::memory
