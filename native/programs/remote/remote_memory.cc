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
                           std::vector<memory::Arena*> arenas, FindLoss find_loss, Landed landed)
    : connection_(std::move(connection)),
      group_(group),
      processes_(std::move(processes)),
      arenas_(std::move(arenas)),
      find_loss_(std::move(find_loss)),
      landed_(std::move(landed)) {}

// The numbers of a message about memory: device, offset, rows, bytes of a row, bytes between rows; number of the write;
// for a post that travels with a write, its signal + 1 and its run.
comm::Message RemoteMemory::message_of(comm::MessageKind kind, const RemoteRows& rows) const {
  comm::Message message;
  message.kind = static_cast<uint16_t>(kind);
  message.group = group_;
  message.numbers[0] = rows.device;
  message.numbers[1] = rows.offset;
  message.numbers[2] = rows.rows;
  message.numbers[3] = rows.row_bytes;
  message.numbers[4] = rows.stride_bytes;
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
    std::vector<RemoteRows> wanted;
    std::vector<std::byte*> places;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (!requests[i].is_read) continue;
      wanted.push_back(requests[i]);
      places.push_back(into[i]);
    }
    if (wanted.empty()) return fetched(block, into);
    read(wanted, places, [block, into, fetched] { fetched(block, into); });
  });
}

void RemoteMemory::read(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& into,
                        const comm::Connection::Done& done) {
  const auto num_left = std::make_shared<std::atomic<int64_t>>(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    const RemoteRows& rows = requests[i];
    bytes_fetched_.fetch_add(rows.bytes(), std::memory_order_relaxed);
    const comm::Message message = message_of(comm::MessageKind::kRead, rows);
    connection_->get(processes_[rows.device], message, into[i], rows.bytes(), [num_left, done] {
      if (num_left->fetch_sub(1, std::memory_order_acq_rel) == 1) done();
    });
  }
  connection_->progress();
}

void RemoteMemory::write(const std::vector<RemoteRows>& requests, const std::vector<std::byte*>& from,
                         const std::optional<comm::Post>& post, const comm::Connection::Done& done) {
  const auto num_left = std::make_shared<std::atomic<int64_t>>(std::ssize(requests));
  for (size_t i = 0; i < requests.size(); ++i) {
    put(requests[i], from[i], post, [num_left, done](const std::string&) {
      if (num_left->fetch_sub(1, std::memory_order_acq_rel) == 1) done();
    });
  }
  connection_->progress();
}

// The operation keeps the write, and so memory that on_end owns, for as long as MPI may use that memory.
void RemoteMemory::put(const RemoteRows& rows, const std::byte* from, const std::optional<comm::Post>& post,
                       std::function<void(const std::string& error)> on_end) {
  const int64_t process = processes_[rows.device];
  const auto write = std::make_shared<Write>(Write{process, std::move(on_end)});
  comm::Message message = message_of(comm::MessageKind::kWrite, rows);
  if (post) {
    message.numbers[6] = int64_t{post->signal} + 1;
    message.numbers[7] = static_cast<int64_t>(post->run);
  }
  {
    std::lock_guard guard(writes_mutex_);
    message.numbers[5] = ++num_writes_;
    writes_.emplace(num_writes_, write);
  }
  connection_->put(process, message, from, rows.bytes(), [this, write, number = message.numbers[5]] {
    write->is_sent = true;
    end_if_done(number, *write);
  });
}

void RemoteMemory::end_if_done(int64_t number, const Write& write) {
  if (!write.is_sent || !write.is_confirmed) return;
  std::shared_ptr<Write> ended;
  {
    std::lock_guard guard(writes_mutex_);
    ended = std::move(writes_.extract(number).mapped());
  }
  ended->on_end(ended->error);
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
    const RemoteRows rows{device, offset + done, 1, size, size};
    const auto has_ended = std::make_shared<std::atomic<bool>>(false);
    const auto is_over = [&] { return has_ended->load(std::memory_order_acquire); };
    if (way == Way::kRead) {
      connection_->get(process, message_of(comm::MessageKind::kRead, rows), piece.get(), size,
                       [piece, has_ended] { has_ended->store(true, std::memory_order_release); });
      wait(is_over);
      std::memcpy(memory + done, piece.get(), size);
      continue;
    }
    std::memcpy(piece.get(), memory + done, size);
    const auto error = std::make_shared<std::string>();
    put(rows, piece.get(), std::nullopt, [piece, has_ended, error](const std::string& of_owner) {
      *error = of_owner;
      has_ended->store(true, std::memory_order_release);
    });
    wait(is_over);
    check<ResourceError>(error->empty(), *error);
  }
}

// ---- messages -----------------------------------------------------------------------------------------------------

void RemoteMemory::reject(int64_t from, const comm::Message& message) {
  std::string text = "a message must name memory of this process; got device, offset and sizes ";
  for (const int64_t number : message.numbers) text += std::to_string(number) + " ";
  connection_->fail(text + "from process " + std::to_string(from));
}

RemoteRows RemoteMemory::rows_of(const comm::Message& message) {
  const auto& numbers = message.numbers;
  return {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
}

/// The device's arena if all rows are in its memory, or if there is one row, which is in its file.
memory::Arena* RemoteMemory::arena_for(const RemoteRows& rows) const {
  constexpr int64_t kMost = comm::kMostPayload;
  const bool is_valid = rows.rows >= 1 && rows.row_bytes >= 1 && rows.rows <= kMost &&
                        rows.row_bytes <= kMost / rows.rows && rows.stride_bytes >= rows.row_bytes &&
                        (rows.rows == 1 || rows.stride_bytes <= kMost / rows.rows);
  if (!is_valid || rows.device < 0 || rows.device >= std::ssize(arenas_) || arenas_[rows.device] == nullptr)
    return nullptr;
  memory::Arena& arena = *arenas_[rows.device];
  const int64_t bytes = (rows.rows - 1) * rows.stride_bytes + rows.row_bytes;
  if (rows.offset < 0 || bytes > kMost) return nullptr;
  if (rows.offset <= arena.bytes() - bytes) return &arena;
  if (rows.rows != 1 || arena.file() == nullptr || rows.offset < arena.file_begin()) return nullptr;
  return rows.offset - arena.file_begin() <= arena.file()->bytes() - bytes ? &arena : nullptr;
}

bool RemoteMemory::is_in_file(const RemoteRows& rows, const memory::Arena& arena) {
  return rows.offset > arena.bytes() - rows.row_bytes;
}

void RemoteMemory::answer_read(int64_t from, const comm::Message& message) {
  const RemoteRows of = rows_of(message);
  const auto [device, offset, rows, row_bytes, stride, unused] = of;
  memory::Arena* const arena = arena_for(of);
  if (arena == nullptr) {
    reject(from, message);
    return;
  }
  const bool is_in_file = RemoteMemory::is_in_file(of, *arena);
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
  message.numbers[5] = number;
  connection_->send(to, message, error.substr(0, comm::kMostText));
}

void RemoteMemory::take_write(int64_t from, const comm::Message& message) {
  const RemoteRows rows = rows_of(message);
  memory::Arena* const arena = arena_for(rows);
  const int64_t signal = message.numbers[6] - 1;
  if (arena == nullptr || (from != 0 && is_in_file(rows, *arena)) || signal < -1 || signal > INT32_MAX) {
    reject(from, message);
    return;
  }
  const int64_t number = message.numbers[5];
  const comm::Post post{.run = static_cast<uint64_t>(message.numbers[7]),
                        .device = static_cast<int32_t>(rows.device),
                        .signal = static_cast<int32_t>(signal)};
  const auto land = [=, this](const std::string& error) {
    if (signal >= 0) landed_(from, post);
    confirm_write(from, number, error);
  };
  const int64_t bytes = rows.bytes();
  if (!is_in_file(rows, *arena) && (rows.rows == 1 || rows.stride_bytes == rows.row_bytes)) {
    connection_->receive(from, message, arena->data() + rows.offset, bytes, [land] { land(""); });
    return;
  }
  const auto content = std::make_shared<std::vector<std::byte>>(bytes);
  connection_->receive(from, message, content->data(), bytes, [=, this] {
    std::string error;
    if (is_in_file(rows, *arena)) {
      try {
        arena->move(Way::kWrite, rows.offset, content->data(), bytes);
      } catch (const std::exception& failed) {
        error = failed.what();
      }
    } else {
      for (int64_t row = 0; row < rows.rows; ++row) {
        std::byte* const to = arena->data() + rows.offset + row * rows.stride_bytes;
        std::memcpy(to, content->data() + row * rows.row_bytes, rows.row_bytes);
      }
    }
    land(error);
  });
}

void RemoteMemory::take_confirmation(int64_t from, const comm::Message& message, const std::string& text) {
  const int64_t number = message.numbers[5];
  std::shared_ptr<Write> write;
  {
    std::lock_guard guard(writes_mutex_);
    const auto entry = writes_.find(number);
    if (entry != writes_.end() && entry->second->process == from && !entry->second->is_confirmed) write = entry->second;
  }
  if (write == nullptr) {
    reject(from, message);
    return;
  }
  write->is_confirmed = true;
  write->error = text;
  end_if_done(number, *write);
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
      take_confirmation(from, message, text);
  }
}

}  // namespace tilewise::programs
