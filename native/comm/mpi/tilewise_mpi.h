/* The MPI operations that Tilewise needs, as a table of functions. The file that fills it (tilewise_mpi.c) is the only
 * one that includes mpi.h. It is built once against MPI's standard binary interface. For an MPI without that interface,
 * `tilewise build-mpi` builds it with the local `mpicc`. It is loaded only if mpiexec started the process.
 *
 * Purpose: a few non-blocking two-sided messages. Who may call: any thread, one at a time, after `start` and before
 * `finish`. Blocks: start and finish, for the other processes; take, only if the message that probe has found is large.
 * Memory: the caller owns the buffers, and must not touch them until the request is done. Returns:
 * `rank`, `size` and `tag_max` their value; all others 0, or MPI's error code, which `describe` turns into text. No
 * error ends the process.
 */
#ifndef TILEWISE_MPI_H
#define TILEWISE_MPI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TILEWISE_MPI_VERSION 1

/* Storage for an MPI_Request of any MPI. */
typedef union TilewiseMpiRequest {
  void* pointer;
  int64_t number;
} TilewiseMpiRequest;

typedef struct TilewiseMpi {
  int32_t version; /* TILEWISE_MPI_VERSION */
  void* self;      /* passed to every function */
  /* Joins the other processes. Fails if MPI's thread level is not above MPI_THREAD_FUNNELED. */
  int32_t (*start)(void* self);
  int32_t (*finish)(void* self);
  int32_t (*rank)(void* self);
  int32_t (*size)(void* self);
  int32_t (*tag_max)(void* self);
  /* Start a message of less than 2 GiB; tags are 0 to tag_max. Between two processes messages of one tag arrive in the
   * order in which they were started. */
  int32_t (*send)(void* self, const void* data, int64_t bytes, int32_t to, int32_t tag, TilewiseMpiRequest* request);
  int32_t (*receive)(void* self, void* data, int64_t bytes, int32_t from, int32_t tag, TilewiseMpiRequest* request);
  /* Whether a request is done, and the number of bytes received. A done request is released. */
  int32_t (*test)(void* self, TilewiseMpiRequest* request, int32_t* is_done, int64_t* bytes);
  /* Whether a message of that tag from any process has arrived and is not yet received. */
  int32_t (*probe)(void* self, int32_t tag, int32_t* is_found, int32_t* from, int64_t* bytes);
  /* Receives a message that probe has found. */
  int32_t (*take)(void* self, void* data, int64_t bytes, int32_t from, int32_t tag);
  /* Texts are zero-terminated. library: the name and version of this MPI, in one line. */
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
