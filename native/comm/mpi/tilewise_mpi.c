/* Fills the table of tilewise_mpi.h by calling MPI: the only file that knows MPI. Compiled against abi/mpi.h (MPI's
 * standard binary interface) with the package, and against a site's own mpi.h by `tilewise build-mpi`.
 *
 * Arguments are checked here before MPI sees them. Invalid ranks, tags and sizes give errors of this file, which are
 * negative (MPI's are positive). All messages use a duplicate of the world, separate from those of other users.
 *
 * MPI guarantees nothing when a process is lost. MPICH may then write through a null pointer inside its calls, whatever
 * its error handlers are. Here that is an error like any other: the signal handler jumps out of the call, and the
 * caller makes no MPI call afterwards. A crash anywhere else goes to the previous handler.
 */
#define _POSIX_C_SOURCE 200809L /* NOLINT(bugprone-reserved-identifier): the system's name for it */
#include "tilewise_mpi.h"

#include <limits.h>
#include <mpi.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

enum {
  kThreads = -1,
  kStarted = -2,
  kEnded = -3,
  kNotStarted = -4,
  kArgument = -5,
  kTooLong = -6,
  kNoTags = -7,
  kCrashed = -8
};

typedef struct State {
  MPI_Comm world; /* our duplicate */
  int32_t rank, size, tag_max;
  int is_started; /* between start and finish */
  int is_ours;    /* this file called MPI_Init_thread, so it must call MPI_Finalize */
} State;

static State state;

static _Thread_local sigjmp_buf before_call;
static _Thread_local volatile sig_atomic_t is_inside;
static struct sigaction others[2]; /* previous handlers of SIGSEGV and SIGBUS */

static void on_crash(int number) {
  if (is_inside) {
    is_inside = 0;
    siglongjmp(before_call, 1);
  }
  sigaction(number, &others[number == SIGBUS], NULL);
  (void)raise(number); /* for the previous handler */
}

static void watch_crashes(void) {
  struct sigaction ours;
  memset(&ours, 0, sizeof ours);
  ours.sa_handler = on_crash;
  ours.sa_flags = SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &others[0]);
  sigaction(SIGBUS, &ours, &others[1]);
}

/* Calls MPI; the error is kCrashed if the call crashes. */
#define CALL(error, call)            \
  do {                               \
    if (sigsetjmp(before_call, 0)) { \
      (error) = kCrashed;            \
    } else {                         \
      is_inside = 1;                 \
      (error) = (call);              \
      is_inside = 0;                 \
    }                                \
  } while (0)

/* A struct around the handle, which is a number or a pointer: sizeof a pointer looks like a mistake to clang-tidy. */
typedef struct Stored {
  MPI_Request request;
} Stored;

_Static_assert(sizeof(Stored) <= sizeof(TilewiseMpiRequest), "a request of this MPI is larger than its storage");

static MPI_Request request_of(const TilewiseMpiRequest* room) {
  Stored stored;
  memcpy(&stored, room, sizeof stored);
  return stored.request;
}

static void store_request(TilewiseMpiRequest* room, MPI_Request request) {
  const Stored stored = {request};
  memset(room, 0, sizeof *room);
  memcpy(room, &stored, sizeof stored);
}

/* Whether a message may start; its size must fit an int. */
static int32_t check(const State* s, int64_t bytes, int32_t peer, int32_t tag) {
  if (!s->is_started) return kNotStarted;
  if (peer < 0 || peer >= s->size || tag < 0 || tag > s->tag_max || bytes < 0) return kArgument;
  return bytes > INT_MAX ? kTooLong : MPI_SUCCESS;
}

/* Starts MPI unless it runs, at a level at which several threads may call in turn. */
static int32_t open_mpi(State* s) {
  int is_there = 0, is_over = 0, level = 0;
  int error = MPI_Finalized(&is_over);
  if (error == MPI_SUCCESS && is_over) return kEnded;
  if (error == MPI_SUCCESS) error = MPI_Initialized(&is_there);
  if (error != MPI_SUCCESS) return error;
  error = is_there ? MPI_Query_thread(&level) : MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
  if (error != MPI_SUCCESS) return error;
  s->is_ours = !is_there;
  return level < MPI_THREAD_SERIALIZED ? kThreads : MPI_SUCCESS;
}

/* Makes MPI return errors. Errors without a communicator are raised on MPI_COMM_SELF since MPI 4, before on the world.
 */
static int32_t open_world(State* s) {
  int rank = 0, size = 0, has_tags = 0;
  int* tag_max = NULL;
  int error = MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  if (error == MPI_SUCCESS) error = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (error == MPI_SUCCESS) error = MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, (void*)&tag_max, &has_tags);
  if (error == MPI_SUCCESS && !has_tags) return kNoTags;
  if (error == MPI_SUCCESS) error = MPI_Comm_dup(MPI_COMM_WORLD, &s->world);
  if (error == MPI_SUCCESS) error = MPI_Comm_set_errhandler(s->world, MPI_ERRORS_RETURN);
  if (error == MPI_SUCCESS) error = MPI_Comm_rank(s->world, &rank);
  if (error == MPI_SUCCESS) error = MPI_Comm_size(s->world, &size);
  if (error != MPI_SUCCESS) return error;
  s->rank = rank;
  s->size = size;
  s->tag_max = *tag_max;
  return MPI_SUCCESS;
}

static int32_t mpi_start(void* self) {
  State* s = self;
  if (s->is_started) return kStarted;
  int32_t error = open_mpi(s);
  if (error == MPI_SUCCESS) error = open_world(s);
  s->is_started = error == MPI_SUCCESS;
  if (s->is_started) watch_crashes();
  if (error < 0 && s->is_ours) { /* an error of this file: MPI works, so end it as every process must */
    s->is_ours = 0;
    MPI_Finalize();
  }
  return error;
}

static int32_t mpi_finish(void* self) {
  State* s = self;
  if (!s->is_started) return kNotStarted;
  s->is_started = 0;
  int32_t error = MPI_Comm_free(&s->world);
  if (error != MPI_SUCCESS || !s->is_ours) return error;
  s->is_ours = 0;
  return MPI_Finalize();
}

static int32_t mpi_rank(void* self) { return ((State*)self)->rank; }
static int32_t mpi_size(void* self) { return ((State*)self)->size; }
static int32_t mpi_tag_max(void* self) { return ((State*)self)->tag_max; }

static int32_t mpi_send(void* self, const void* data, int64_t bytes, int32_t to, int32_t tag,
                        TilewiseMpiRequest* request) {
  State* s = self;
  MPI_Request begun = MPI_REQUEST_NULL;
  int32_t error = check(s, bytes, to, tag);
  if (error == MPI_SUCCESS) CALL(error, MPI_Isend(data, (int)bytes, MPI_BYTE, to, tag, s->world, &begun));
  if (error == MPI_SUCCESS) store_request(request, begun);
  return error;
}

static int32_t mpi_receive(void* self, void* data, int64_t bytes, int32_t from, int32_t tag,
                           TilewiseMpiRequest* request) {
  State* s = self;
  MPI_Request begun = MPI_REQUEST_NULL;
  int32_t error = check(s, bytes, from, tag);
  if (error == MPI_SUCCESS) CALL(error, MPI_Irecv(data, (int)bytes, MPI_BYTE, from, tag, s->world, &begun));
  if (error == MPI_SUCCESS) store_request(request, begun);
  return error;
}

/* The size of a message that was probed or received. */
static int32_t count(const MPI_Status* status, int64_t* bytes) {
  int size = 0;
  const int error = MPI_Get_count(status, MPI_BYTE, &size);
  if (error != MPI_SUCCESS) return error;
  if (size == MPI_UNDEFINED) return kTooLong;
  *bytes = size;
  return MPI_SUCCESS;
}

static int32_t mpi_test(void* self, TilewiseMpiRequest* request, int32_t* is_done, int64_t* bytes) {
  const State* s = self;
  MPI_Status status;
  int flag = 0;
  *is_done = 0;
  *bytes = 0;
  if (!s->is_started) return kNotStarted;
  memset(&status, 0, sizeof status);
  MPI_Request open = request_of(request);
  int32_t error = MPI_SUCCESS;
  CALL(error, MPI_Test(&open, &flag, &status));
  if (error != kCrashed) store_request(request, open);
  if (error != MPI_SUCCESS) return error;
  *is_done = flag != 0;
  const int32_t counted = flag ? count(&status, bytes) : MPI_SUCCESS;
  return counted == kTooLong ? MPI_SUCCESS : counted; /* only sends, whose count is undefined */
}

static int32_t mpi_probe(void* self, int32_t tag, int32_t* is_found, int32_t* from, int64_t* bytes) {
  const State* s = self;
  MPI_Status status;
  int flag = 0;
  *is_found = 0;
  if (!s->is_started) return kNotStarted;
  if (tag < 0 || tag > s->tag_max) return kArgument;
  int32_t error = MPI_SUCCESS;
  CALL(error, MPI_Iprobe(MPI_ANY_SOURCE, tag, s->world, &flag, &status));
  if (error != MPI_SUCCESS || !flag) return error;
  *is_found = 1;
  *from = status.MPI_SOURCE;
  return count(&status, bytes);
}

static int32_t mpi_take(void* self, void* data, int64_t bytes, int32_t from, int32_t tag) {
  const State* s = self;
  int32_t error = check(s, bytes, from, tag);
  if (error == MPI_SUCCESS) {
    CALL(error, MPI_Recv(data, (int)bytes, MPI_BYTE, from, tag, s->world, MPI_STATUS_IGNORE));
  }
  return error;
}

/* Copies a text up to `end` as one line, with runs of blanks replaced by one. */
static void copy_line(char* to, int64_t size, const char* from, char end) {
  int64_t length = 0;
  if (size <= 0) return;
  for (; *from != '\0' && *from != end && length < size - 1; from++) {
    const char c = *from == '\t' || *from == '\n' ? ' ' : *from;
    if (c != ' ' || (length > 0 && to[length - 1] != ' ')) to[length++] = c;
  }
  to[length] = '\0';
}

static const char* words(int32_t error) {
  switch (error) {
    case MPI_SUCCESS:
      return "no error";
    case kThreads:
      return "MPI allows only one thread; MPI_THREAD_SERIALIZED or above is needed";
    case kStarted:
      return "MPI has already been started";
    case kEnded:
      return "MPI has ended in this process and cannot start again";
    case kNotStarted:
      return "MPI is not started";
    case kArgument:
      return "invalid process, tag or size";
    case kTooLong:
      return "a message must be shorter than 2 GiB";
    case kCrashed:
      return "MPI has crashed, as it does when a process is lost";
    case kNoTags:
      return "MPI does not report its tag range";
    default:
      return NULL;
  }
}

static void mpi_describe(void* self, int32_t error, char* text, int64_t size) {
  const State* s = self;
  char buffer[MPI_MAX_ERROR_STRING + 1] = "";
  int length = 0;
  const char* message = words(error);
  if (message == NULL && s->is_started && MPI_Error_string(error, buffer, &length) == MPI_SUCCESS &&
      buffer[0] != '\0') {
    message = buffer;
  }
  if (message == NULL) {
    (void)snprintf(buffer, sizeof buffer, "error %d of MPI", (int)error);
    message = buffer;
  }
  copy_line(text, size, message, '\0');
}

static void mpi_library(void* self, char* text, int64_t size) {
  static char buffer[MPI_MAX_LIBRARY_VERSION_STRING + 1];
  int length = 0;
  (void)self;
  buffer[0] = '\0';
  const int error = MPI_Get_library_version(buffer, &length);
  copy_line(text, size, error == MPI_SUCCESS ? buffer : "unknown MPI", '\n');
}

const TilewiseMpi* tilewise_mpi(void) {
  static const TilewiseMpi table = {
      TILEWISE_MPI_VERSION, &state,   mpi_start, mpi_finish, mpi_rank,     mpi_size,    mpi_tag_max, mpi_send,
      mpi_receive,          mpi_test, mpi_probe, mpi_take,   mpi_describe, mpi_library,
  };
  return &table;
}
