/* What Tilewise needs of MPI, as a table of functions. The file that fills it (tilewise_mpi.c) is the only one that
 * knows MPI: it is built once against MPI's standard binary interface, or by a site's own `mpicc` for another MPI
 * (`tilewise build-mpi`), and loaded when processes are started by mpiexec.
 *
 * Purpose: a few two-sided messages, none of which waits. Who may call: one thread at a time, whichever it is; after
 * `start` and before `finish`. Blocks: start and finish, for the other processes; take, never for what probe has found
 * unless it is large. Memory: what is sent or received stays its owner's, untouched until its request is done.
 * Returns: 0, or MPI's error, which `describe` puts into words; no error ends the process.
 */
#ifndef TILEWISE_MPI_H
#define TILEWISE_MPI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TILEWISE_MPI_VERSION 1

/* Room for an MPI_Request, whatever it is. */
typedef union TilewiseMpiRequest {
  void* pointer;
  int64_t number;
} TilewiseMpiRequest;

typedef struct TilewiseMpi {
  int32_t version; /* TILEWISE_MPI_VERSION */
  void* self;      /* handed to every function */
  /* Joins the other processes. Fails where MPI gives no thread level above MPI_THREAD_FUNNELED. */
  int32_t (*start)(void* self);
  int32_t (*finish)(void* self);
  int32_t (*rank)(void* self);
  int32_t (*size)(void* self);
  int32_t (*tag_max)(void* self);
  /* Begin a message of less than 2 GiB; tags from 0 to tag_max. Between two processes messages of one tag arrive in the
   * order in which they were begun. */
  int32_t (*send)(void* self, const void* data, int64_t bytes, int32_t to, int32_t tag, TilewiseMpiRequest* request);
  int32_t (*receive)(void* self, void* data, int64_t bytes, int32_t from, int32_t tag, TilewiseMpiRequest* request);
  /* Whether a request is done, and how many bytes it has moved (of a receive); a done one is gone. */
  int32_t (*test)(void* self, TilewiseMpiRequest* request, int32_t* is_done, int64_t* bytes);
  /* Whether a message of that tag has come from anyone, and is not received yet. */
  int32_t (*probe)(void* self, int32_t tag, int32_t* is_found, int32_t* from, int64_t* bytes);
  /* Receives a message that probe has found. */
  int32_t (*take)(void* self, void* data, int64_t bytes, int32_t from, int32_t tag);
  /* Texts end with a zero. library: which MPI this is, in a line. */
  void (*describe)(void* self, int32_t error, char* text, int64_t size);
  void (*library)(void* self, char* text, int64_t size);
} TilewiseMpi;

/* The only symbol of the built file. */
__attribute__((visibility("default"))) const TilewiseMpi* tilewise_mpi(void);
typedef const TilewiseMpi* (*TilewiseMpiFunction)(void);

#ifdef __cplusplus
}
#endif
#endif
