// A signal there and back between two processors, in turns with a bare cache line: two threads, or two processes.
//
//   threads     comm::Signal: a thread spins on the value.
//   notified    the same as tasks wait: wait() registers, then the thread spins on a flag that on_posted sets.
//   processes   comm::Peers: post() leaves a message; the waiter's thread looks for it, which posts its own Signal,
//               on whose value it spins. Both processes map one sealed memfd.
//   put_threads, put_processes
//               the same, as put_signal: before each post, a store of 8 bytes into the other side's memory, which the
//               waiter reads and compares after it has seen the signal.
//
// In all a plain line is an atomic counter that one side makes odd and the other even. Prints, medians over rounds:
// plain ns there and back, signal ns there and back, and signals one way per plain round trip: median, best and worst
// tenth.
//
// Run: signals threads|notified|processes|put_threads|put_processes PROCESSOR PROCESSOR ROUNDS
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
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;  // every byte of the data changes

struct alignas(128) Ball {
  std::atomic<uint64_t> number{0};
};

// Memory of both sides, in which both store.
struct Shared {
  Ball ball;
  Ball data[2];  // data[i] is read by side i

  // The n-th store into the other side's memory. It is ordered by the post after it.
  void put(int own, uint64_t n) { data[1 - own].number.store(n * kFactor, std::memory_order_relaxed); }
  void require(int own, uint64_t n) const {
    if (data[own].number.load(std::memory_order_relaxed) != n * kFactor) std::exit(4);
  }
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

// What one side does in every round. `post` posts the other's signal, `see_post` waits for the n-th post of its own.
template <class SendPost, class SeePost>
std::vector<Times> play(int own, bool has_data, uint64_t rounds, Shared& shared, SendPost&& post, SeePost&& see_post) {
  const bool is_first = own == 0;
  Ball& ball = shared.ball;
  std::vector<Times> times_of_rounds;
  uint64_t number = 0;
  uint64_t count = 0;
  const auto see = [&](uint64_t value) {
    while (ball.number.load(std::memory_order_acquire) != value) {
    }
  };
  const auto send = [&] {
    if (has_data) shared.put(own, count);
    post();
  };
  const auto await = [&] {
    see_post(count);
    if (has_data) shared.require(own, count);
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
      await();
      if (!is_first) send();
    }
    const int64_t ended = now_ns();
    times_of_rounds.push_back(
        {static_cast<double>(between - began) / kTrips, static_cast<double>(ended - between) / kTrips});
  }
  return times_of_rounds;
}

std::vector<Times> in_threads(bool is_notified, bool has_data, const int* processors, uint64_t rounds) {
  SignalBoard signals(2);
  Shared shared;
  const auto side = [&](int own) {
    pin(processors[own]);
    SignalWait wait(signals[own]);
    const auto await = [&](uint64_t value) {
      if (is_notified) return wait.await(value);
      while (signals[own].value() < value) {
      }
    };
    return play(own, has_data, rounds, shared, [&] { signals[1 - own].post(0); }, await);
  };
  std::thread other([&] { side(1); });
  std::vector<Times> times_of_rounds = side(0);
  other.join();
  return times_of_rounds;
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

// The parent would spin for ever if its child has ended with an error.
void follow_failed_child(int, siginfo_t* info, void*) {
  if (info->si_status != 0) _exit(3);
}

std::vector<Times> in_processes(bool has_data, const int* processors, uint64_t rounds) {
  const int file = group_file(Peers::bytes(2));
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(2);
  Shared& shared = *new (memory) Shared;
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
        own, has_data, rounds, shared, [&] { peers.post(1 - own, post); },
        [&](uint64_t value) {
          while (signals[0].value() < value) peers.look();
        });
  };
  struct sigaction on_end = {};
  on_end.sa_sigaction = follow_failed_child;
  on_end.sa_flags = SA_SIGINFO | SA_RESTART | SA_NOCLDSTOP;
  sigaction(SIGCHLD, &on_end, nullptr);
  const pid_t child = fork();
  if (child < 0) std::exit(2);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    side(1);
    _exit(0);
  }
  std::vector<Times> times_of_rounds = side(0);
  int status = 0;
  if (waitpid(child, &status, 0) != child || status != 0) std::exit(3);
  return times_of_rounds;
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
  const std::string how = argv[1];
  const bool has_data = how.starts_with("put_");
  const std::string kind = has_data ? how.substr(4) : how;
  const bool is_notified = how == "notified";
  if (rounds == 0 || (kind != "threads" && !is_notified && kind != "processes")) return 2;
  const std::vector<Times> times_of_rounds = kind == "processes"
                                                 ? in_processes(has_data, processors, rounds)
                                                 : in_threads(is_notified, has_data, processors, rounds);
  std::vector<double> plain;
  std::vector<double> signal;
  std::vector<double> ratio;
  for (const Times& times : times_of_rounds) {
    plain.push_back(times.plain_ns);
    signal.push_back(times.signal_ns);
    ratio.push_back(times.signal_ns / 2 / times.plain_ns);
  }
  std::printf("%.1f %.1f %.4f %.4f %.4f\n", at(plain, 0.5), at(signal, 0.5), at(ratio, 0.5), at(ratio, 0.1),
              at(ratio, 0.9));
  return 0;
}
