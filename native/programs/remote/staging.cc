// See staging.h.
#include "programs/remote/staging.h"

#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

namespace tilewise::programs {

namespace {

constexpr int64_t kLeast = 4096;

int64_t rounded(int64_t bytes) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes < kLeast ? kLeast : bytes)));
}

}  // namespace

Staging::~Staging() {
  for (const auto& blocks : free_) {
    for (std::byte* data : blocks) std::free(data);
  }
}

Staging::Block Staging::block_of(int64_t bytes) {
  auto& blocks = free_[std::countr_zero(static_cast<uint64_t>(bytes))];
  Block block{nullptr, bytes};
  if (!blocks.empty()) {
    block.data = blocks.back();
    blocks.pop_back();
    spare_ -= bytes;
  } else {
    block.data = static_cast<std::byte*>(std::aligned_alloc(kLeast, bytes));
    if (block.data == nullptr) throw std::bad_alloc();
  }
  used_ += bytes;
  return block;
}

void Staging::take(int64_t bytes, OnBlock on_block) {
  Block block;
  {
    std::lock_guard guard(mutex_);
    const int64_t size = rounded(bytes);
    if (!waiting_.empty() || !has_room(size)) {
      waiting_.push_back({size, std::move(on_block)});
      return;
    }
    block = block_of(size);
  }
  on_block(block);
}

void Staging::give_back(Block block) {
  std::vector<std::pair<OnBlock, Block>> served;
  {
    std::lock_guard guard(mutex_);
    used_ -= block.bytes;
    if (spare_ + block.bytes <= limit_) {
      free_[std::countr_zero(static_cast<uint64_t>(block.bytes))].push_back(block.data);
      spare_ += block.bytes;
    } else {
      std::free(block.data);
    }
    while (!waiting_.empty() && has_room(waiting_.front().bytes)) {
      served.emplace_back(std::move(waiting_.front().on_block), block_of(waiting_.front().bytes));
      waiting_.pop_front();
    }
  }
  for (auto& [on_block, next] : served) on_block(next);
}

}  // namespace tilewise::programs
