// A signal there and back between two processors, in turns with a bare cache line: two threads, or two processes.
//
//   threads     comm::Signal: a thread spins on the value.
//   notified    the same as tasks wait: wait() registers, then the thread spins on a flag that on_posted sets.
//   processes   comm::Peers: post() leaves a message; the waiter's thread looks for it, which posts its own Signal,
//               on whose value it spins. Both processes map one sealed memfd.
//
// In both a plain line is an atomic counter that one side makes odd and the other even. Prints, medians over rounds:
// plain ns there and back, signal ns there and back, and signals one way per plain round trip: median, best and worst
// tenth.
//
// Run: signals threads|notified|processes PROCESSOR PROCESSOR ROUNDS
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "comm/peers.h"
#include "comm/signal.h"

namespace {

using tilewise::now_ns;
using tilewise::comm::Peers;
using tilewise::comm::PeersOptions;
using tilewise::comm::Post;
using tilewise::comm::SignalBoard;
using tilewise::comm::Waiter;

constexpr uint64_t kTrips = 200;  // in a round: shorter than a turn of the scheduler
constexpr uint64_t kRun = 1;

struct alignas(128) Ball {
  std::atomic<uint64_t> number{0};
};

void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  if (sched_setaffinity(0, sizeof set, &set) != 0) std::exit(2);
}

// One side's wait for its own signal, as a task waits.
class SignalWait {
 public:
  explicit SignalWait(tilewise::comm::Signal& own) : own_(own) {
    waiter_.on_posted = [](Waiter* posted, uint64_t) {
      static_cast<Own*>(posted)->is_posted.store(true, std::memory_order_release);
    };
  }
  void await(uint64_t value) {
    uint64_t poison = 0;
    waiter_.threshold = value;
    waiter_.is_posted.store(false, std::memory_order_relaxed);
    if (own_.wait(&waiter_, &poison)) return;
    while (!waiter_.is_posted.load(std::memory_order_acquire)) {
    }
  }

 private:
  struct alignas(128) Own : Waiter {
    std::atomic<bool> is_posted{false};
  };
  tilewise::comm::Signal& own_;
  Own waiter_;
};

struct Times {
  double plain_ns = 0;
  double signal_ns = 0;
};

// What one side does in every round. `send` posts the other's signal, `await` waits for the n-th post of its own.
template <class Send, class Await>
std::vector<Times> play(bool is_first, uint64_t rounds, Ball& ball, Send&& send, Await&& await) {
  std::vector<Times> found;
  uint64_t number = 0;
  uint64_t count = 0;
  const auto see = [&](uint64_t value) {
    while (ball.number.load(std::memory_order_acquire) != value) {
    }
  };
  for (uint64_t round = 0; round < rounds; ++round) {
    const int64_t began = now_ns();
    for (uint64_t trip = 0; trip < kTrips; ++trip, number += 2) {
      if (is_first) {
        ball.number.store(number + 1, std::memory_order_release);
        see(number + 2);
      } else {
        see(number + 1);
        ball.number.store(number + 2, std::memory_order_release);
      }
    }
    const int64_t between = now_ns();
    for (uint64_t trip = 0; trip < kTrips; ++trip) {
      ++count;
      if (is_first) send();
      await(count);
      if (!is_first) send();
    }
    const int64_t ended = now_ns();
    found.push_back({static_cast<double>(between - began) / kTrips, static_cast<double>(ended - between) / kTrips});
  }
  return found;
}

std::vector<Times> in_threads(bool is_notified, const int* processors, uint64_t rounds) {
  SignalBoard signals(2);
  Ball ball;
  const auto side = [&](int own) {
    pin(processors[own]);
    SignalWait wait(signals[own]);
    const auto await = [&](uint64_t value) {
      if (is_notified) return wait.await(value);
      while (signals[own].value() < value) {
      }
    };
    return play(own == 0, rounds, ball, [&] { signals[1 - own].post(0); }, await);
  };
  std::thread other([&] { side(1); });
  std::vector<Times> found = side(0);
  other.join();
  return found;
}

int group_file(int64_t bytes) {
  const int file = memfd_create("signals", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const int64_t whole = (bytes + 4095) / 4096 * 4096;
  if (file < 0 || ftruncate(file, whole) != 0 ||
      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    std::perror("memfd");
    std::exit(2);
  }
  return file;
}

std::vector<Times> in_processes(const int* processors, uint64_t rounds) {
  const int file = group_file(Peers::bytes(2));
  void* const shared = mmap(nullptr, sizeof(Ball), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) std::exit(2);
  Ball& ball = *new (shared) Ball;
  const auto side = [&](int own) {
    pin(processors[own]);
    SignalBoard signals(1);
    Peers peers(
        PeersOptions{.process = own, .num_processes = 2, .file = file, .ends = {-1, -1}, .take = [&](const Post& of) {
                       signals[of.signal].post(0);
                     }});
    peers.stay();
    peers.open_run(kRun);
    const Post post{.run = kRun, .device = 1 - own, .signal = 0};
    return play(
        own == 0, rounds, ball, [&] { peers.post(1 - own, post); },
        [&](uint64_t value) {
          while (signals[0].value() < value) peers.look();
        });
  };
  const pid_t child = fork();
  if (child < 0) std::exit(2);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    side(1);
    _exit(0);
  }
  std::vector<Times> found = side(0);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) std::exit(3);
  return found;
}

double at(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const int processors[2] = {std::atoi(argv[2]), std::atoi(argv[3])};
  const auto rounds = static_cast<uint64_t>(std::atoll(argv[4]));
  const std::string kind = argv[1];
  if (rounds == 0 || (kind != "threads" && kind != "notified" && kind != "processes")) return 2;
  const std::vector<Times> found =
      kind == "processes" ? in_processes(processors, rounds) : in_threads(kind == "notified", processors, rounds);
  std::vector<double> plain;
  std::vector<double> signal;
  std::vector<double> ratio;
  for (const Times& times : found) {
    plain.push_back(times.plain_ns);
    signal.push_back(times.signal_ns);
    ratio.push_back(times.signal_ns / 2 / times.plain_ns);
  }
  std::printf("%.1f %.1f %.4f %.4f %.4f\n", at(plain, 0.5), at(signal, 0.5), at(ratio, 0.5), at(ratio, 0.1),
              at(ratio, 0.9));
  return 0;
}
