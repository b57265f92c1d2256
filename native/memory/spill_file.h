// A device's file: what does not fit into its memory lies there.
//
// Purpose: tensors at planned offsets, read and written past the page cache (O_DIRECT) where the file system has that.
// The file has no name: it goes with the process. Who may call: any thread, on ranges that no other thread writes
// meanwhile. Blocks: for the disk. Memory order: none; who starts a transfer orders it. Refuses: directories that take
// no file, sizes the disk has no room for, and transfers that the system refuses (ResourceError). It is never mapped: a
// disk that fails under a mapping would end the process (SIGBUS), where a transfer is refused in words.
//
// A page of the file that a transfer covers in part goes through the page cache, whole ones do not, so that neighbours
// that share a page do not write over each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace tilewise::memory {

inline constexpr int64_t kFilePage = 4096;

class SpillFile {
 public:
  /// Takes the room on the disk at once.
  SpillFile(const std::string& directory, int64_t bytes) : SpillFile(make(directory, bytes), bytes) {}
  /// A file that make() has made, perhaps in another process; the descriptor is its own from now on, also if this
  /// refuses it.
  SpillFile(int file, int64_t bytes);
  static int make(const std::string& directory, int64_t bytes);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  enum class Way { kRead, kWrite };
  /// Between `memory` and the file's bytes from `offset` on.
  void move(Way way, std::byte* memory, int64_t offset, int64_t bytes) const;

  int64_t bytes() const { return bytes_; }
  int descriptor() const { return cached_; }  // for tests that spoil it
  /// Whether transfers go past the page cache.
  bool is_direct() const { return direct_ >= 0; }

 private:
  int cached_ = -1;
  int direct_ = -1;
  int64_t bytes_;
};

}  // namespace tilewise::memory
