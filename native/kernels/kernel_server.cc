// Runs kernels for another process: requests on standard input, answers on standard output. Built with the tests, to
// run kernels of an emulated processor (the client is tests/native/kernels/emulated_level.py).
//
// A request is eight int64 (bytes of the name, segments, tiles, ints, floats, row_begin, repeat, bytes of scratch), the
// name, the bytes of every segment, five int64 per tile (segment or -1, offset in bytes, rows, cols, stride), the
// attributes, the contents of the segments. The answer is int64 0 and the segments' contents, or the length of a
// message and the message. Each segment ends at an inaccessible page, so a kernel that reads beyond an operand crashes
// this process.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "kernels/isa.h"

namespace tilewise::kernels {
namespace {

template <class T>
std::vector<T> read_all(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  if (std::fread(values.data(), sizeof(T), values.size(), stdin) != values.size()) std::exit(2);
  return values;
}

void write_all(const void* data, size_t bytes) {
  if (std::fwrite(data, 1, bytes, stdout) != bytes) std::exit(2);
}

/// Memory that ends at an inaccessible page.
class Segment {
 public:
  explicit Segment(int64_t bytes) : size_(static_cast<size_t>(bytes)) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = (size_ + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + mapped_ - page, page, PROT_NONE) != 0) std::exit(3);
    data_ = base_ + mapped_ - page - size_;
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() { munmap(base_, mapped_); }
  char* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  size_t size_, mapped_;
  char *base_, *data_;
};

struct Request {
  std::string name;
  std::vector<std::unique_ptr<Segment>> segments;
  std::vector<TileView> tiles;
  std::vector<int64_t> ints;
  std::vector<double> floats;
  int64_t row_begin, repeat, scratch_bytes;
};

Request read_request(const int64_t (&head)[8]) {
  Request request;
  const auto name = read_all<char>(head[0]);
  request.name.assign(name.begin(), name.end());
  for (const int64_t bytes : read_all<int64_t>(head[1])) request.segments.push_back(std::make_unique<Segment>(bytes));
  const auto tiles = read_all<int64_t>(5 * head[2]);
  for (size_t i = 0; i < tiles.size(); i += 5) {
    void* data = tiles[i] < 0 ? nullptr : request.segments[static_cast<size_t>(tiles[i])]->data() + tiles[i + 1];
    request.tiles.push_back({data, tiles[i + 2], tiles[i + 3], tiles[i + 4]});
  }
  request.ints = read_all<int64_t>(head[3]);
  request.floats = read_all<double>(head[4]);
  request.row_begin = head[5];
  request.repeat = head[6];
  request.scratch_bytes = head[7];
  for (const auto& segment : request.segments)
    if (std::fread(segment->data(), 1, segment->size(), stdin) != segment->size()) std::exit(2);
  return request;
}

void run(const Request& request, std::byte* memory) {
  const Entry* const kernel = find_kernel(request.name);
  check<ArgumentError>(kernel != nullptr, "[kernel_server] name must be a kernel; got '", request.name, "'.");
  const Scratch scratch = {memory, std::min(request.scratch_bytes, kScratchBytes)};
  const KernelArgs args = {request.tiles.data(),  static_cast<int64_t>(request.tiles.size()),
                           request.ints.data(),   static_cast<int64_t>(request.ints.size()),
                           request.floats.data(), static_cast<int64_t>(request.floats.size()),
                           request.row_begin,     scratch};
  for (int64_t i = 0; i < request.repeat; ++i) kernel->fn(args);
}

void serve() {
  const Segment memory(kScratchBytes);
  int64_t head[8];
  while (std::fread(head, sizeof head, 1, stdin) == 1) {
    const Request request = read_request(head);
    std::string message;
    try {
      run(request, reinterpret_cast<std::byte*>(memory.data()));
    } catch (const std::exception& error) {
      message = error.what();
    }
    const auto length = static_cast<int64_t>(message.size());
    write_all(&length, sizeof length);
    write_all(message.data(), message.size());
    if (message.empty())
      for (const auto& segment : request.segments) write_all(segment->data(), segment->size());
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tilewise::kernels

int main() {
  std::fprintf(stderr, "%s\n", std::string(tilewise::kernels::level_in_use()).c_str());
  tilewise::kernels::serve();
}
