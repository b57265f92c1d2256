// Memory for tiles that tasks read from remote devices: blocks that are taken before a read begins and released at the
// task's end.
//
// Purpose: limits the bytes in flight, and reuses blocks whose pages exist. Who may call: any thread. Blocks: never; a
// caller without room is notified later, in order, by the thread that makes room. A block of any size is given if no
// other is out, and the holder of a block needs nothing more to finish, so there is no circular wait.
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
  /// A power of two of bytes.
  struct Block {
    std::byte* data = nullptr;
    int64_t bytes = 0;
  };
  using Given = std::function<void(Block)>;

  explicit Staging(int64_t limit_bytes) : limit_(limit_bytes) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// given: called with a block of so many bytes or more, now or by a later give_back().
  void take(int64_t bytes, Given given);
  void give_back(Block block);

 private:
  struct Waiting {
    int64_t bytes;
    Given given;
  };
  bool has_room(int64_t bytes) const { return out_ == 0 || out_ + bytes <= limit_; }
  Block block_of(int64_t bytes);

  std::mutex mutex_;
  const int64_t limit_;
  int64_t out_ = 0;  // bytes of blocks that are out
  int64_t kept_ = 0;  // of those that are not
  std::array<std::vector<std::byte*>, 64> free_;  // per power of two
  std::deque<Waiting> waiting_;
};

}  // namespace tilewise::programs
