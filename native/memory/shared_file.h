// Memory of a file that several processes map: sealed, so that no other process can shrink it under this one.
//
// Purpose: devices' arenas and the device group's memory (comm/peers.h). The file is a memfd that one process has made
// and handed to the others; it has no name. Who may call: anyone. Blocks: never after construction. Memory: a mapping,
// given back by the destructor; the descriptor stays its owner's. Refuses: files that are not sealed or of another size
// (ArgumentError), and what the system cannot map (ResourceError).
#pragma once
#include <cstddef>
#include <cstdint>

namespace tilewise::memory {

class SharedFile {
 public:
  /// bytes: that are used; the file may be larger by less than two pages. behind: as many addresses that hold nothing
  /// follow, from the next page on.
  SharedFile(int file, int64_t bytes, int64_t behind = 0);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
  int64_t mapped_ = 0;
};

}  // namespace tilewise::memory
