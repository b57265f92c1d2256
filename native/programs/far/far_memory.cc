// See far_memory.h.
#include "programs/far/far_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "programs/run/errors.h"

namespace tilewise::programs {

namespace {

constexpr int64_t kPiece = int64_t{64} << 20;  // of what the host moves
constexpr int64_t kPatienceNs = 60'000'000'000;  // for one of them
constexpr int64_t kLookNs = 50'000'000;  // then it looks whether a process is lost
constexpr int64_t kLine = 64;

}  // namespace

FarMemory::FarMemory(std::shared_ptr<comm::Wire> wire, int64_t team, std::vector<int64_t> processes,
                     std::vector<memory::Arena*> arenas, FindLoss find_loss)
    : wire_(std::move(wire)),
      team_(team),
      processes_(std::move(processes)),
      arenas_(std::move(arenas)),
      find_loss_(std::move(find_loss)) {}

comm::Letter FarMemory::letter_of(comm::LetterKind kind) const {
  comm::Letter letter;
  letter.kind = static_cast<uint16_t>(kind);
  letter.team = team_;
  return letter;
}

// ---- tasks -------------------------------------------------------------------------------------------------------

void FarMemory::fetch(const std::vector<FarRows>& wanted, Fetched fetched) {
  int64_t total = 0;
  for (const FarRows& rows : wanted) total += (rows.bytes() + kLine - 1) / kLine * kLine;
  staging_.take(total, [this, wanted, fetched = std::move(fetched)](Staging::Block block) {
    std::vector<std::byte*> into;
    std::byte* to = block.data;
    for (const FarRows& rows : wanted) {
      into.push_back(to);
      to += (rows.bytes() + kLine - 1) / kLine * kLine;
    }
    read(wanted, into, [block, into, fetched] { fetched(block, into); });
  });
}

void FarMemory::read(const std::vector<FarRows>& wanted, const std::vector<std::byte*>& into,
                     const comm::Wire::Done& done) {
  const auto num_left = std::make_shared<std::atomic<int64_t>>(std::ssize(wanted));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const FarRows& rows = wanted[i];
    comm::Letter letter = letter_of(comm::LetterKind::kRead);
    letter.numbers[0] = rows.device;
    letter.numbers[1] = rows.offset;
    letter.numbers[2] = rows.rows;
    letter.numbers[3] = rows.row_bytes;
    letter.numbers[4] = rows.stride_bytes;
    bytes_fetched_.fetch_add(rows.bytes(), std::memory_order_relaxed);
    wire_->ask(processes_[rows.device], letter, into[i], rows.bytes(), [num_left, done] {
      if (num_left->fetch_sub(1, std::memory_order_acq_rel) == 1) done();
    });
  }
  wire_->progress();
}

// ---- the host ----------------------------------------------------------------------------------------------------

void FarMemory::move(Way way, int64_t device, int64_t offset, std::byte* memory, int64_t bytes) {
  const int64_t process = processes_[device];
  const auto wait = [&](auto&& holds) {
    const int64_t until = now_ns() + kPatienceNs;
    std::string loss;
    while (!wire_->wait(kLookNs, holds)) {
      loss = find_loss_();
      if (loss.empty() && wire_->has_failed()) loss = wire_->cause();
      if (!loss.empty() || now_ns() > until) break;
    }
    check<PeerLost>(holds(), "[runtime.Executor.move] a device's process must answer; got nothing of ", bytes,
                    " bytes of device ", device, " from process ", process, loss.empty() ? "" : ": ", loss,
                    "; look at that process's own messages, then start again from the last checkpoint");
  };
  // MPI is given memory of its own, which stays until its end was told: the caller's may go as soon as this throws.
  const auto piece = std::make_shared_for_overwrite<std::byte[]>(std::min(kPiece, bytes));
  for (int64_t done = 0; done < bytes; done += kPiece) {
    const int64_t size = std::min(kPiece, bytes - done);
    comm::Letter letter = letter_of(way == Way::kRead ? comm::LetterKind::kRead : comm::LetterKind::kWrite);
    letter.numbers[0] = device;
    letter.numbers[1] = offset + done;
    const auto has_ended = std::make_shared<std::atomic<bool>>(false);
    const auto ended = [piece, has_ended] { has_ended->store(true, std::memory_order_release); };
    if (way == Way::kRead) {
      letter.numbers[2] = 1;
      letter.numbers[3] = letter.numbers[4] = size;
      wire_->ask(process, letter, piece.get(), size, ended);
      wait([&] { return has_ended->load(std::memory_order_acquire); });
      std::memcpy(memory + done, piece.get(), size);
      continue;
    }
    std::memcpy(piece.get(), memory + done, size);
    const int64_t number = letter.numbers[2] = num_written_.load() + 1;
    written_to_ = process;
    num_written_ = number;
    letter.numbers[3] = size;
    wire_->give(process, letter, piece.get(), size, ended);
    wait([&] {
      return has_ended->load(std::memory_order_acquire) && last_written_.load(std::memory_order_acquire) == number;
    });
    check<ResourceError>(write_error_.empty(), write_error_);
  }
}

// ---- letters -----------------------------------------------------------------------------------------------------

void FarMemory::refuse(int64_t from, const comm::Letter& letter) {
  std::string text = "a message must name memory of this process; got device, offset and sizes ";
  for (const int64_t number : letter.numbers) text += std::to_string(number) + " ";
  wire_->fail(text + "from process " + std::to_string(from));
}

/// The device's memory, if so many bytes from the letter's offset on are all in it, or all in its file.
memory::Arena* FarMemory::arena_for(const comm::Letter& letter, int64_t bytes) const {
  const int64_t device = letter.numbers[0];
  const int64_t offset = letter.numbers[1];
  if (device < 0 || device >= std::ssize(arenas_) || arenas_[device] == nullptr) return nullptr;
  memory::Arena& arena = *arenas_[device];
  if (offset < 0 || bytes < 0 || bytes > comm::kMostPayload) return nullptr;
  if (offset <= arena.bytes() - bytes) return &arena;
  if (arena.file() == nullptr || offset < arena.file_begin()) return nullptr;
  return offset - arena.file_begin() <= arena.file()->bytes() - bytes ? &arena : nullptr;
}

void FarMemory::answer_read(int64_t from, const comm::Letter& letter) {
  const auto [device, offset, rows, row_bytes, stride, unused] = letter.numbers;
  constexpr int64_t kMost = comm::kMostPayload;
  const bool is_sane = rows >= 1 && row_bytes >= 1 && rows <= kMost && row_bytes <= kMost / rows &&
                       stride >= row_bytes && (rows == 1 || stride <= kMost / rows);
  memory::Arena* const arena = is_sane ? arena_for(letter, (rows - 1) * stride + row_bytes) : nullptr;
  const bool is_in_file = arena != nullptr && offset > arena->bytes() - row_bytes;
  if (arena == nullptr || (is_in_file && rows != 1)) {
    refuse(from, letter);
    return;
  }
  if (!is_in_file && (rows == 1 || stride == row_bytes)) {
    wire_->reply(from, letter, arena->data() + offset, rows * row_bytes, {});
    return;
  }
  const auto packed = std::make_shared<std::vector<std::byte>>(rows * row_bytes);
  if (is_in_file) {
    try {
      arena->move(Way::kRead, offset, packed->data(), row_bytes);
    } catch (const std::exception& error) {
      wire_->fail(error.what());
      return;
    }
  }
  for (int64_t row = 0; row < rows && !is_in_file; ++row) {
    std::memcpy(packed->data() + row * row_bytes, arena->data() + offset + row * stride, row_bytes);
  }
  wire_->reply(from, letter, packed->data(), rows * row_bytes, [packed] {});
}

void FarMemory::say_written(int64_t to, int64_t number, const std::string& error) {
  comm::Letter letter = letter_of(comm::LetterKind::kWritten);
  letter.numbers[2] = number;
  wire_->post(to, letter, error.substr(0, comm::kMostText));
}

void FarMemory::take_write(int64_t from, const comm::Letter& letter) {
  const int64_t bytes = letter.numbers[3];
  memory::Arena* const arena = arena_for(letter, bytes);
  if (from != 0 || arena == nullptr) {  // the leader alone writes
    refuse(from, letter);
    return;
  }
  const int64_t offset = letter.numbers[1];
  const int64_t number = letter.numbers[2];
  if (offset <= arena->bytes() - bytes) {
    wire_->receive(from, letter, arena->data() + offset, bytes, [=, this] { say_written(from, number, ""); });
    return;
  }
  const auto content = std::make_shared<std::vector<std::byte>>(bytes);
  wire_->receive(from, letter, content->data(), bytes, [=, this] {
    std::string error;
    try {
      arena->move(Way::kWrite, offset, content->data(), bytes);
    } catch (const std::exception& failed) {
      error = failed.what();
    }
    say_written(from, number, error);
  });
}

void FarMemory::take(int64_t from, const comm::Letter& letter, const std::string& text) {
  switch (static_cast<comm::LetterKind>(letter.kind)) {
    case comm::LetterKind::kRead:
      answer_read(from, letter);
      return;
    case comm::LetterKind::kWrite:
      take_write(from, letter);
      return;
    default:
      if (from != written_to_.load() || letter.numbers[2] != num_written_.load() ||
          letter.numbers[2] == last_written_.load()) {
        refuse(from, letter);
        return;
      }
      write_error_ = text;
      last_written_.store(letter.numbers[2], std::memory_order_release);
  }
}

}  // namespace tilewise::programs
