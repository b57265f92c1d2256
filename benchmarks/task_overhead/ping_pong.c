/* The round trip of a cache line between two processors: the floor below every figure with two threads.
 * It changes when a virtual machine's processors move, so it is printed next to each round.
 * Build: gcc -O2 ping_pong.c -pthread     Run: ./ping_pong PROCESSOR PROCESSOR; prints ns (the best of 20 batches) */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { kBatches = 20, kTrips = 20000 };

static _Alignas(64) volatile uint64_t ball;

static void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static void* answer(void* processor) {
  pin(*(int*)processor);
  for (uint64_t trip = 0; trip < (uint64_t)kBatches * kTrips; ++trip) {
    while (__atomic_load_n(&ball, __ATOMIC_ACQUIRE) != 2 * trip + 1) {
    }
    __atomic_store_n(&ball, 2 * trip + 2, __ATOMIC_RELEASE);
  }
  return NULL;
}

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int partner = atoi(argv[2]);
  pthread_t thread;
  pin(atoi(argv[1]));
  if (pthread_create(&thread, NULL, answer, &partner) != 0) return 1;
  double best = 1e18;
  uint64_t trip = 0;
  for (int batch = 0; batch < kBatches; ++batch) {
    const double begin = now_ns();
    for (int i = 0; i < kTrips; ++i, ++trip) {
      __atomic_store_n(&ball, 2 * trip + 1, __ATOMIC_RELEASE);
      while (__atomic_load_n(&ball, __ATOMIC_ACQUIRE) != 2 * trip + 2) {
      }
    }
    const double each = (now_ns() - begin) / kTrips;
    if (each < best) best = each;
  }
  pthread_join(thread, NULL);
  printf("%.1f\n", best);
  return 0;
}
