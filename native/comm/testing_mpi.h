// An MPI for tests: ranks are threads of one process, and the delays of messages depend on a seed.
//
// Between two ranks, messages of one tag keep their order; other messages may overtake each other. A message becomes
// visible after the receiver has polled several times, and a send completes some polls later than it could.
#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "comm/mpi/tilewise_mpi.h"

namespace tilewise::comm::testing {

class FakeWorld {
 public:
  FakeWorld(int32_t size, uint64_t seed, int64_t most_delay = 3) : random_(seed), most_delay_(most_delay) {
    for (int32_t r = 0; r < size; ++r) ranks_.push_back(std::make_unique<Rank>(Rank{*this, r, size, {}, {}, {}, {}}));
    for (auto& rank : ranks_) rank->table = table_of(*rank);
  }

  const TilewiseMpi& rank(int32_t number) const { return ranks_[number]->table; }
  /// Changes the next messages between ranks, as a broken network would.
  std::function<void(std::vector<std::byte>& message, int32_t tag)> spoil;
  /// Calls `sees` with all memory that a rank sends or receives into.
  void watch(std::function<void(const std::byte* data)> sees) {
    std::lock_guard guard(mutex_);
    sees_ = std::move(sees);
  }
  /// Makes all further calls of the rank fail.
  void break_rank(int32_t number) {
    std::lock_guard guard(mutex_);
    ranks_[number]->is_broken = true;
  }

 private:
  struct Message {
    int32_t from;
    int32_t tag;
    int64_t delay;
    std::vector<std::byte> bytes;
  };
  struct Request {
    std::byte* into;  // for a receive
    int64_t room;
    int32_t from;
    int32_t tag;
    int64_t delay;  // for a send
    int64_t number;
  };
  struct Rank {
    FakeWorld& world;
    int32_t number;
    int32_t size;
    std::deque<Message> inbox;
    std::vector<Request> requests;
    TilewiseMpi table;
    bool is_broken = false;
  };

  static constexpr int32_t kTruncated = 1, kBroken = 2;

  static Rank& of(void* self) { return *static_cast<Rank*>(self); }

  static TilewiseMpi table_of(Rank& rank) {
    TilewiseMpi table = {};
    table.version = TILEWISE_MPI_VERSION;
    table.self = &rank;
    table.start = table.finish = [](void*) -> int32_t { return 0; };
    table.rank = [](void* self) -> int32_t { return of(self).number; };
    table.size = [](void* self) -> int32_t { return of(self).size; };
    table.tag_max = [](void*) -> int32_t { return 32767; };
    table.send = [](void* self, const void* data, int64_t bytes, int32_t to, int32_t tag, TilewiseMpiRequest* request) {
      return of(self).world.send(of(self), data, bytes, to, tag, *request);
    };
    table.receive = [](void* self, void* data, int64_t bytes, int32_t from, int32_t tag, TilewiseMpiRequest* request) {
      return of(self).world.begin(of(self), {static_cast<std::byte*>(data), bytes, from, tag, 0, 0}, *request);
    };
    table.test = [](void* self, TilewiseMpiRequest* request, int32_t* is_done, int64_t* bytes) {
      return of(self).world.test(of(self), request->number, *is_done, *bytes);
    };
    table.probe = [](void* self, int32_t tag, int32_t* is_found, int32_t* from, int64_t* bytes) {
      return of(self).world.probe(of(self), tag, *is_found, *from, *bytes);
    };
    table.take = [](void* self, void* data, int64_t bytes, int32_t from, int32_t tag) {
      return of(self).world.take(of(self), data, bytes, from, tag);
    };
    table.describe = [](void*, int32_t error, char* text, int64_t) {
      std::strcpy(text, error == kTruncated ? "message truncated" : "connection reset");
    };
    table.library = [](void*, char* text, int64_t) { std::strcpy(text, "threads"); };
    return table;
  }

  int64_t delay() { return std::uniform_int_distribution<int64_t>(0, most_delay_)(random_); }

  int32_t send(Rank& from, const void* data, int64_t bytes, int32_t to, int32_t tag, TilewiseMpiRequest& request) {
    const auto* const first = static_cast<const std::byte*>(data);
    std::vector<std::byte> copy(first, first + bytes);
    std::lock_guard guard(mutex_);
    if (from.is_broken) return kBroken;
    if (sees_) sees_(first);
    if (spoil) spoil(copy, tag);
    ranks_[to]->inbox.push_back({from.number, tag, delay(), std::move(copy)});
    return begin_locked(from, {nullptr, 0, to, tag, delay(), 0}, request);
  }

  int32_t begin(Rank& rank, Request made, TilewiseMpiRequest& request) {
    std::lock_guard guard(mutex_);
    if (sees_) sees_(made.into);
    return begin_locked(rank, made, request);
  }
  int32_t begin_locked(Rank& rank, Request made, TilewiseMpiRequest& request) {
    if (rank.is_broken) return kBroken;
    made.number = request.number = ++last_request_;
    rank.requests.push_back(made);
    return 0;
  }

  /// The first message of that sender (-1: any) and tag whose delay is over. Later ones of the same sender wait for it.
  std::deque<Message>::iterator find(Rank& rank, int32_t from, int32_t tag) {
    std::vector<bool> has_earlier(rank.size);
    for (auto message = rank.inbox.begin(); message != rank.inbox.end(); ++message) {
      if (message->tag != tag || (from >= 0 && message->from != from) || has_earlier[message->from]) continue;
      if (message->delay-- <= 0) return message;
      has_earlier[message->from] = true;
    }
    return rank.inbox.end();
  }

  int32_t test(Rank& rank, int64_t number, int32_t& is_done, int64_t& bytes) {
    std::lock_guard guard(mutex_);
    if (rank.is_broken) return kBroken;
    is_done = 0;
    const auto request =
        std::find_if(rank.requests.begin(), rank.requests.end(), [&](auto& of) { return of.number == number; });
    if (request->into == nullptr) {
      if (request->delay-- > 0) return 0;
    } else {
      // An earlier receive of the same sender and tag gets the first message.
      for (auto earlier = rank.requests.begin(); earlier != request; ++earlier) {
        if (earlier->into != nullptr && earlier->from == request->from && earlier->tag == request->tag) return 0;
      }
      const auto message = find(rank, request->from, request->tag);
      if (message == rank.inbox.end()) return 0;
      if (std::ssize(message->bytes) > request->room) return kTruncated;
      std::memcpy(request->into, message->bytes.data(), message->bytes.size());
      bytes = std::ssize(message->bytes);
      rank.inbox.erase(message);
    }
    is_done = 1;
    rank.requests.erase(request);
    return 0;
  }

  int32_t probe(Rank& rank, int32_t tag, int32_t& is_found, int32_t& from, int64_t& bytes) {
    std::lock_guard guard(mutex_);
    if (rank.is_broken) return kBroken;
    const auto message = find(rank, -1, tag);
    is_found = message != rank.inbox.end() ? 1 : 0;
    if (is_found == 0) return 0;
    from = message->from;
    bytes = std::ssize(message->bytes);
    return 0;
  }

  int32_t take(Rank& rank, void* data, int64_t bytes, int32_t from, int32_t tag) {
    std::lock_guard guard(mutex_);
    const auto message = find(rank, from, tag);
    if (std::ssize(message->bytes) > bytes) return kTruncated;
    std::memcpy(data, message->bytes.data(), message->bytes.size());
    rank.inbox.erase(message);
    return 0;
  }

  std::mutex mutex_;
  std::function<void(const std::byte* data)> sees_;
  std::mt19937_64 random_;
  int64_t most_delay_;
  int64_t last_request_ = 0;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace tilewise::comm::testing
