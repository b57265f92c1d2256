// Starts a thread that receives no signals except those of its own faults, so that Ctrl-C goes to the waiting thread.
#pragma once
#include <signal.h>

#include <thread>

namespace tilewise {

template <class Body>
std::thread quiet_thread(Body body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL})
    sigdelset(&all, fault);  // otherwise nothing could report them
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{before};
  return std::thread(body);
}

}  // namespace tilewise
