// The memory of devices that this process cannot map: read and written by messages (comm/connection.h).
//
// Purpose: a task that reads tiles of a remote device requests them after its signals have arrived, as if it waited for
// a disk, and reads them in a block of this process's memory. The owner's process answers without its workers. The
// owner overwrites the tiles only after this reader has signalled that it is done, as with shared memory. A task that
// writes tiles of a remote device sends them. A payload may arrive after later messages, so the owner confirms each
// write, and the task posts its signals when all its writes are confirmed. One signal of the owner may travel with the
// write: the owner's process posts it when the rows have landed. The host reads and writes remote memory
// between runs. Who may call: fetch, read, write and give_back: any thread; move: the thread that runs the executor;
// take: the thread inside Connection::progress(). Blocks: move, for the other process.
//
// Trusts nothing: a message that requests or brings bytes must name a device of this process and a range inside its
// memory; otherwise the connection fails. Only the leader writes files. Memory: at most kStagingBytes for tasks, or one
// task's tiles if they are larger.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
  bool is_read = true;  // false: a task only writes them

  int64_t bytes() const { return rows * row_bytes; }
};

class RemoteMemory {
 public:
  using Way = memory::SpillFile::Way;
  /// rows: the address of each request's rows, which are contiguous. The task gives the block back.
  using Fetched = std::function<void(Staging::Block block, const std::vector<std::byte*>& rows)>;

  /// Describes which process is lost and how; empty if none is.
  using FindLoss = std::function<std::string()>;

  /// Takes a post that came with a write, when the rows are in place. Called inside progress().
  using Landed = std::function<void(int64_t from, const comm::Post& post)>;

  /// processes: the process of each device. arenas: per device, nullptr for devices of other processes.
  RemoteMemory(std::shared_ptr<comm::Connection> connection, int64_t group, std::vector<int64_t> processes,
               std::vector<memory::Arena*> arenas, FindLoss find_loss, Landed landed);

  /// Takes a staging block with room for the requested rows, and reads those that are read.
  void fetch(const std::vector<RemoteRows>& requests, Fetched fetched);
  /// Reads each request's rows, without gaps, into memory of the caller.
  void read(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& into,
            const comm::Connection::Done& done);
  /// Writes each request's rows from memory of the caller, where they have no gaps. done: they are in their owners'
  /// memory. post: travels with the only request.
  void write(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& from,
             const std::optional<comm::Post>& post, const comm::Connection::Done& done);
  void give_back(Staging::Block block) { staging_.give_back(block); }
  /// Bytes that tasks have read since construction.
  int64_t bytes_fetched() const { return bytes_fetched_.load(std::memory_order_relaxed); }

  /// Copies between `memory` and a remote device's memory or file at `offset`. MPI never gets `memory` itself.
  /// Throws PeerLost if the other process does not answer.
  void move(Way way, int64_t device, int64_t offset, std::byte* memory, int64_t bytes);

  void take(int64_t from, const comm::Message& message, const std::string& text);

 private:
  /// A write that its owner has not confirmed, or whose memory MPI may still use. Written inside progress().
  struct Write {
    int64_t process;
    std::function<void(const std::string& error)> on_end;
    bool is_sent = false;
    bool is_confirmed = false;
    std::string error = {};  // of the owner's file
  };

  comm::Message message_of(comm::MessageKind kind, const RemoteRows& rows = {}) const;
  static RemoteRows rows_of(const comm::Message& message);
  memory::Arena* arena_for(const RemoteRows& rows) const;
  static bool is_in_file(const RemoteRows& rows, const memory::Arena& arena);
  void put(const RemoteRows& rows, const std::byte* from, const std::optional<comm::Post>& post,
           std::function<void(const std::string& error)> on_end);
  void end_if_done(int64_t number, const Write& write);
  void answer_read(int64_t from, const comm::Message& message);
  void take_write(int64_t from, const comm::Message& message);
  void confirm_write(int64_t to, int64_t number, const std::string& error);
  void take_confirmation(int64_t from, const comm::Message& message, const std::string& text);
  void reject(int64_t from, const comm::Message& message);

  std::shared_ptr<comm::Connection> connection_;
  int64_t group_;
  std::vector<int64_t> processes_;
  std::vector<memory::Arena*> arenas_;
  FindLoss find_loss_;
  Landed landed_;
  Staging staging_{kStagingBytes};
  std::atomic<int64_t> bytes_fetched_{0};
  std::mutex writes_mutex_;  // guards the members below
  std::map<int64_t, std::shared_ptr<Write>> writes_;  // by number
  int64_t num_writes_ = 0;
};

}  // namespace tilewise::programs
