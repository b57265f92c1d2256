// Memory for tiles that tasks read from remote devices: blocks that are taken before a read begins and released at the
// task's end.
//
// Purpose: limits the bytes in flight, and reuses blocks whose pages exist. Who may call: any thread. Blocks: never; a
// caller without room gets its block later, in order, from the thread that makes room. If no other block is in use, a
// block of any size is available; and the holder of a block needs no other block to finish. So no circular wait exists.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace tilewise::programs {

class Staging {
 public:
  /// Its size is a power of two.
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  using OnBlock = std::function<void(Block)>;

  explicit Staging(int64_t limit_bytes) : limit_(limit_bytes) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Calls on_block with a block of at least `bytes` bytes, now or in a later give_back().
  void take(int64_t bytes, OnBlock on_block);
  void give_back(Block block);

 private:
  struct Waiting {
    int64_t bytes;
    OnBlock on_block;
  };
  bool has_room(int64_t bytes) const { return used_ == 0 || used_ + bytes <= limit_; }
  Block block_of(int64_t bytes);

  std::mutex mutex_;
  const int64_t limit_;
  int64_t used_ = 0;  // bytes of blocks in use
  int64_t spare_ = 0;  // bytes of blocks kept for reuse
  std::array<std::vector<std::byte*>, 64> free_;  // per power of two
  std::deque<Waiting> waiting_;
};

}  // namespace tilewise::programs
