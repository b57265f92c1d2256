// See remote_memory.h.
#include "programs/remote/remote_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "programs/run/errors.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kPiece = int64_t{64} << 20;    // bytes that the host moves at a time
constexpr int64_t kPatienceNs = 60'000'000'000;  // limit for one piece
constexpr int64_t kCheckNs = 50'000'000;         // interval of checks for lost processes
constexpr int64_t kLine = 64;

}  // namespace

RemoteMemory::RemoteMemory(std::shared_ptr<comm::Connection> connection, int64_t group, std::vector<int64_t> processes,
                           std::vector<memory::Arena*> arenas, FindLoss find_loss)
    : connection_(std::move(connection)),
      group_(group),
      processes_(std::move(processes)),
      arenas_(std::move(arenas)),
      find_loss_(std::move(find_loss)) {}

comm::Message RemoteMemory::message_of(comm::MessageKind kind) const {
  comm::Message message;
  message.kind = static_cast<uint16_t>(kind);
  message.group = group_;
  return message;
}

// ---- tasks -------------------------------------------------------------------------------------------------------

void RemoteMemory::fetch(const std::vector<RemoteRows>& requests, Fetched fetched) {
  int64_t total = 0;
  for (const RemoteRows& rows : requests) total += (rows.bytes() + kLine - 1) / kLine * kLine;
  staging_.take(total, [this, requests, fetched = std::move(fetched)](Staging::Block block) {
    std::vector<std::byte*> into;
    std::byte* to = block.data;
    for (const RemoteRows& rows : requests) {
      into.push_back(to);
      to += (rows.bytes() + kLine - 1) / kLine * kLine;
    }
    read(requests, into, [block, into, fetched] { fetched(block, into); });
  });
}

void RemoteMemory::read(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& into,
                        const comm::Connection::Done& done) {
  const auto num_left = std::make_shared<std::atomic<int64_t>>(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    const RemoteRows& rows = requests[i];
    comm::Message message = message_of(comm::MessageKind::kRead);
    message.numbers[0] = rows.device;
    message.numbers[1] = rows.offset;
    message.numbers[2] = rows.rows;
    message.numbers[3] = rows.row_bytes;
    message.numbers[4] = rows.stride_bytes;
    bytes_fetched_.fetch_add(rows.bytes(), std::memory_order_relaxed);
    connection_->get(processes_[rows.device], message, into[i], rows.bytes(), [num_left, done] {
      if (num_left->fetch_sub(1, std::memory_order_acq_rel) == 1) done();
    });
  }
  connection_->progress();
}

// ---- the host ----------------------------------------------------------------------------------------------------

void RemoteMemory::move(Way way, int64_t device, int64_t offset, std::byte* memory, int64_t bytes) {
  const int64_t process = processes_[device];
  const auto wait = [&](auto&& condition) {
    const int64_t until = now_ns() + kPatienceNs;
    std::string loss;
    while (!connection_->wait(kCheckNs, condition)) {
      loss = find_loss_();
      if (loss.empty() && connection_->has_failed()) loss = connection_->cause();
      if (!loss.empty() || now_ns() > until) break;
    }
    check<PeerLost>(condition(), "[programs.Executor.move] a device's process must answer; got no answer for ", bytes,
                    " bytes of device ", device, " from process ", process, loss.empty() ? "" : ": ", loss,
                    "; look at that process's own messages, then start again from the last checkpoint");
  };
  // MPI gets memory that lives until the operation's end is reported. The caller may free its own when this throws.
  const auto piece = std::make_shared_for_overwrite<std::byte[]>(std::min(kPiece, bytes));
  for (int64_t done = 0; done < bytes; done += kPiece) {
    const int64_t size = std::min(kPiece, bytes - done);
    comm::Message message = message_of(way == Way::kRead ? comm::MessageKind::kRead : comm::MessageKind::kWrite);
    message.numbers[0] = device;
    message.numbers[1] = offset + done;
    const auto has_ended = std::make_shared<std::atomic<bool>>(false);
    const auto ended = [piece, has_ended] { has_ended->store(true, std::memory_order_release); };
    if (way == Way::kRead) {
      message.numbers[2] = 1;
      message.numbers[3] = message.numbers[4] = size;
      connection_->get(process, message, piece.get(), size, ended);
      wait([&] { return has_ended->load(std::memory_order_acquire); });
      std::memcpy(memory + done, piece.get(), size);
      continue;
    }
    std::memcpy(piece.get(), memory + done, size);
    const int64_t number = message.numbers[2] = num_written_.load() + 1;
    written_to_ = process;
    num_written_ = number;
    message.numbers[3] = size;
    connection_->put(process, message, piece.get(), size, ended);
    wait([&] {
      return has_ended->load(std::memory_order_acquire) && last_confirmed_.load(std::memory_order_acquire) == number;
    });
    check<ResourceError>(write_error_.empty(), write_error_);
  }
}

// ---- messages -----------------------------------------------------------------------------------------------------

void RemoteMemory::reject(int64_t from, const comm::Message& message) {
  std::string text = "a message must name memory of this process; got device, offset and sizes ";
  for (const int64_t number : message.numbers) text += std::to_string(number) + " ";
  connection_->fail(text + "from process " + std::to_string(from));
}

/// The device's arena if all `bytes` bytes from the message's offset on are in its memory, or all in its file.
memory::Arena* RemoteMemory::arena_for(const comm::Message& message, int64_t bytes) const {
  const int64_t device = message.numbers[0];
  const int64_t offset = message.numbers[1];
  if (device < 0 || device >= std::ssize(arenas_) || arenas_[device] == nullptr) return nullptr;
  memory::Arena& arena = *arenas_[device];
  if (offset < 0 || bytes < 0 || bytes > comm::kMostPayload) return nullptr;
  if (offset <= arena.bytes() - bytes) return &arena;
  if (arena.file() == nullptr || offset < arena.file_begin()) return nullptr;
  return offset - arena.file_begin() <= arena.file()->bytes() - bytes ? &arena : nullptr;
}

void RemoteMemory::answer_read(int64_t from, const comm::Message& message) {
  const auto [device, offset, rows, row_bytes, stride, unused] = message.numbers;
  constexpr int64_t kMost = comm::kMostPayload;
  const bool is_valid = rows >= 1 && row_bytes >= 1 && rows <= kMost && row_bytes <= kMost / rows &&
                        stride >= row_bytes && (rows == 1 || stride <= kMost / rows);
  memory::Arena* const arena = is_valid ? arena_for(message, (rows - 1) * stride + row_bytes) : nullptr;
  const bool is_in_file = arena != nullptr && offset > arena->bytes() - row_bytes;
  if (arena == nullptr || (is_in_file && rows != 1)) {
    reject(from, message);
    return;
  }
  if (!is_in_file && (rows == 1 || stride == row_bytes)) {
    connection_->reply(from, message, arena->data() + offset, rows * row_bytes, {});
    return;
  }
  const auto packed = std::make_shared<std::vector<std::byte>>(rows * row_bytes);
  if (is_in_file) {
    try {
      arena->move(Way::kRead, offset, packed->data(), row_bytes);
    } catch (const std::exception& error) {
      connection_->fail(error.what());
      return;
    }
  }
  for (int64_t row = 0; row < rows && !is_in_file; ++row) {
    std::memcpy(packed->data() + row * row_bytes, arena->data() + offset + row * stride, row_bytes);
  }
  connection_->reply(from, message, packed->data(), rows * row_bytes, [packed] {});
}

void RemoteMemory::confirm_write(int64_t to, int64_t number, const std::string& error) {
  comm::Message message = message_of(comm::MessageKind::kWritten);
  message.numbers[2] = number;
  connection_->send(to, message, error.substr(0, comm::kMostText));
}

void RemoteMemory::take_write(int64_t from, const comm::Message& message) {
  const int64_t bytes = message.numbers[3];
  memory::Arena* const arena = arena_for(message, bytes);
  if (from != 0 || arena == nullptr) {  // only the leader writes
    reject(from, message);
    return;
  }
  const int64_t offset = message.numbers[1];
  const int64_t number = message.numbers[2];
  if (offset <= arena->bytes() - bytes) {
    connection_->receive(from, message, arena->data() + offset, bytes, [=, this] { confirm_write(from, number, ""); });
    return;
  }
  const auto content = std::make_shared<std::vector<std::byte>>(bytes);
  connection_->receive(from, message, content->data(), bytes, [=, this] {
    std::string error;
    try {
      arena->move(Way::kWrite, offset, content->data(), bytes);
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    confirm_write(from, number, error);
  });
}

void RemoteMemory::take(int64_t from, const comm::Message& message, const std::string& text) {
  switch (static_cast<comm::MessageKind>(message.kind)) {
    case comm::MessageKind::kRead:
      answer_read(from, message);
      return;
    case comm::MessageKind::kWrite:
      take_write(from, message);
      return;
    default:
      if (from != written_to_.load() || message.numbers[2] != num_written_.load() ||
          message.numbers[2] == last_confirmed_.load()) {
        reject(from, message);
        return;
      }
      write_error_ = text;
      last_confirmed_.store(message.numbers[2], std::memory_order_release);
  }
}

}  // namespace tilewise::programs
