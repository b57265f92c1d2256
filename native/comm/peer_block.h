// The block of memory in which a process of a device group reports its state to the others. Either they share the
// memory, or the receiver of its messages writes it. See peers.h.
#pragma once
#include <atomic>

#include "comm/peer_messages.h"
#include "protocols/mailbox.h"
#include "protocols/sleepers.h"

namespace tilewise::comm {

inline constexpr uint32_t kCells = 4096;
inline constexpr int64_t kBeatNs = 50'000'000;

using protocols::StdMemory;

struct alignas(128) PeerBlock {
  protocols::Mailbox<StdMemory, Post, kCells> mail;
  alignas(128) protocols::Sleepers<StdMemory> sleepers;  // threads that wait for orders or answers
  std::atomic<uint64_t> ordered;
  std::atomic<uint64_t> answered;
  std::atomic<uint64_t> ended;  // the last run in which a remote process has posted all its signals
  Order order;
  Answer answer;
  alignas(128) std::atomic<int64_t> pid;
  std::atomic<uint64_t> beats;
  std::atomic<uint64_t> num_completed;
  std::atomic<bool> is_at_work;
  std::atomic<uint64_t> stopped;  // the last run that has failed in this process
};

}  // namespace tilewise::comm
