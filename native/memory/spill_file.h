// A device's file, for tensors that do not fit in its memory.
//
// Purpose: tensors at planned offsets, read and written past the page cache (O_DIRECT) if the file system supports it.
// The file has no name and disappears with the process. Who may call: any thread, for ranges that no other thread
// writes meanwhile. Blocks: for the disk. Memory order: none; the code that starts a transfer orders it. Rejects
// directories that cannot contain the file, sizes beyond the free space, and failed transfers (ResourceError). The file
// is never mapped: an error of the disk would then end the process (SIGBUS), while a failed transfer returns an error.
//
// If a transfer covers a page only in part, that page uses the page cache, so that neighbours sharing a page do not
// overwrite each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace tilewise::memory {

inline constexpr int64_t kFilePage = 4096;

class SpillFile {
 public:
  /// Allocates the disk space at once.
  SpillFile(const std::string& directory, int64_t bytes) : SpillFile(make(directory, bytes), bytes) {}
  /// A file from make(), possibly of another process. Takes ownership of the descriptor, also if it throws.
  SpillFile(int file, int64_t bytes);
  static int make(const std::string& directory, int64_t bytes);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  enum class Way { kRead, kWrite };
  /// Copies between `memory` and the file at `offset`.
  void move(Way way, std::byte* memory, int64_t offset, int64_t bytes) const;

  int64_t bytes() const { return bytes_; }
  int descriptor() const { return cached_; }  // for tests that damage it
  /// Whether transfers go past the page cache.
  bool is_direct() const { return direct_ >= 0; }

 private:
  int cached_ = -1;
  int direct_ = -1;
  int64_t bytes_;
};

}  // namespace tilewise::memory
