// Memory for what tasks read of remote devices: blocks that are taken before a read begins and given back by the task's
// end.
//
// Purpose: bounds what is under way, and keeps blocks whose pages the system has given. Who may call: any thread.
// Blocks: never; who finds no room is told later, in order, by who makes some. A block is always given to who comes
// while none is out, however large it is, and who has one needs nothing more to end: so there is no waiting in a
// circle.
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
