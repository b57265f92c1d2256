// Transfers between devices' memory and their files, in order, by a few threads of their own.
//
// Purpose: workers compute while the disk works. Who may call: push: any thread; work: the threads of the queue.
// Blocks: work while there is nothing to do, and for the disk. Memory order: the transfer sees what was written before
// push; the receiver of its end sees the transfer. Memory: a few words per waiting transfer; at most as many wait as
// tasks fit in the devices' windows.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>

#include "memory/spill_file.h"

namespace tilewise::programs {

struct Transfer {
  const memory::SpillFile* file = nullptr;
  memory::SpillFile::Way way = memory::SpillFile::Way::kRead;
  std::byte* memory = nullptr;
  int64_t offset = 0;
  int64_t bytes = 0;
};

/// The bytes moved, and the time during which at least one transfer was in progress.
struct Traffic {
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t busy_ns = 0;
};

class FileQueue {
 public:
  /// Called on a thread of the queue; nullptr: success.
  using Done = std::function<void(std::exception_ptr error)>;

  void push(const Transfer& transfer, Done done);
  /// Executes transfers until close().
  void work();
  void close();

  /// Whether a transfer runs or waits.
  bool is_busy();
  Traffic traffic();

 private:
  struct Waiting {
    Transfer transfer;
    Done done;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  int64_t num_moving_ = 0;
  int64_t busy_since_ns_ = 0;
  Traffic traffic_;
  bool is_closed_ = false;
};

}  // namespace tilewise::programs
