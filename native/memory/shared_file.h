// Memory of a file that several processes map. It is sealed, so that no process can shrink it while another uses it.
//
// Purpose: arenas of devices and the device group's memory (comm/peers.h). The file is an unnamed memfd that one
// process created and passed to the others. Who may call: any thread. Blocks: never after construction. Memory: a
// mapping, unmapped by the destructor; the owner keeps the descriptor. Rejects files that are not sealed or have
// another size (ArgumentError), and mappings that the system rejects (ResourceError).
#pragma once
#include <cstddef>
#include <cstdint>

namespace tilewise::memory {

class SharedFile {
 public:
  /// bytes: the used size; the file may be larger by less than two pages. behind: number of unbacked addresses to
  /// reserve after it, from the next page on.
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
