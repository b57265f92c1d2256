// The memory of devices that this process cannot map: read and written by messages (comm/connection.h).
//
// Purpose: a task that reads tiles of a remote device requests them after its signals have arrived, as if it waited for
// a disk, and reads them in a block of this process's memory. The owner's process answers without its workers. The
// owner overwrites the tiles only after this reader has signalled that it is done, as with shared memory. The host
// reads and writes remote memory between runs. Who may call: fetch and give_back: any worker; move: the thread that
// runs the executor; take: the thread inside Connection::progress(). Blocks: move, for the other process.
//
// Trusts nothing: a message that requests or brings bytes must name a device of this process and a range inside its
// memory; otherwise the connection fails. Memory: at most kStagingBytes for tasks, or one task's tiles if they are
// larger.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/peers.h"
#include "memory/arena.h"
#include "programs/remote/staging.h"

namespace tilewise::programs {

inline constexpr int64_t kStagingBytes = int64_t{128} << 20;

/// Rows in the memory of a remote device.
struct RemoteRows {
  int64_t device = 0;
  int64_t offset = 0;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;

  int64_t bytes() const { return rows * row_bytes; }
};

class RemoteMemory {
 public:
  using Way = memory::SpillFile::Way;
  /// rows: the address of each request's rows, which are contiguous. The task gives the block back.
  using Fetched = std::function<void(Staging::Block block, const std::vector<std::byte*>& rows)>;

  /// Describes which process is lost and how; empty if none is.
  using FindLoss = std::function<std::string()>;

  /// processes: the process of each device. arenas: per device, nullptr for devices of other processes.
  RemoteMemory(std::shared_ptr<comm::Connection> connection, int64_t group, std::vector<int64_t> processes,
               std::vector<memory::Arena*> arenas, FindLoss find_loss);

  /// Reads the requested rows into a staging block.
  void fetch(const std::vector<RemoteRows>& requests, Fetched fetched);
  /// Reads each request's rows, without gaps, into memory of the caller.
  void read(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& into,
            const comm::Connection::Done& done);
  void give_back(Staging::Block block) { staging_.give_back(block); }
  /// Bytes that tasks have read since construction.
  int64_t bytes_fetched() const { return bytes_fetched_.load(std::memory_order_relaxed); }

  /// Copies between `memory` and a remote device's memory or file at `offset`. MPI never gets `memory` itself.
  /// Throws PeerLost if the other process does not answer.
  void move(Way way, int64_t device, int64_t offset, std::byte* memory, int64_t bytes);

  void take(int64_t from, const comm::Message& message, const std::string& text);

 private:
  comm::Message message_of(comm::MessageKind kind) const;
  memory::Arena* arena_for(const comm::Message& message, int64_t bytes) const;
  void answer_read(int64_t from, const comm::Message& message);
  void take_write(int64_t from, const comm::Message& message);
  void confirm_write(int64_t to, int64_t number, const std::string& error);
  void reject(int64_t from, const comm::Message& message);

  std::shared_ptr<comm::Connection> connection_;
  int64_t group_;
  std::vector<int64_t> processes_;
  std::vector<memory::Arena*> arenas_;
  FindLoss find_loss_;
  Staging staging_{kStagingBytes};
  std::atomic<int64_t> bytes_fetched_{0};
  std::atomic<int64_t> num_written_{0};  // writes of this host
  std::atomic<int64_t> written_to_{-1};  // process of the last write
  std::atomic<int64_t> last_confirmed_{0};  // number of the last write that its process has confirmed
  std::string write_error_;  // published by last_confirmed_
};

}  // namespace tilewise::programs
