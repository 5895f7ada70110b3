/* A C99 program that trains through the caches of phub.h, against a server of its own and without:
 *     c_abi_geeps_program PATH-OF-PHUB
 * PHUB_TRANSPORT says over what. Exit status 0: everything was as it must be. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/worker/c_abi_program.h"
#include "worker/phub.h"

enum { kRanks = 2, kClocks = 6, kRows = 6, kFloats = 5, kLayerRows = 3, kLayerFloats = 128 };
enum { kElements = kRows * kFloats + kLayerRows * kLayerFloats };

static const uint64_t kKeys[kRows] = {60, 10, 50, 20, 40, 30};
/* Rows of the first table that are used together, in no order of memory; numbers of rows beside. */
static const uint64_t kSome[3] = {30, 60, 20};
static const size_t kSomeRows[3] = {5, 0, 3};

/* What rank r adds to an element of the rows that it updates, at a clock: small integers, so that
 * sums are exact. */
static float update_of(int rank, size_t row, size_t column, int clock) {
  return (float)((rank + 1) * (int)(row % 7 + 1) + (int)column % 5 - clock);
}

/* The tables as arrays: parameters are the initial ones less all updates (sgd, lr 1, sum). */
struct oracle {
  float first[kRows][kFloats];
  float layer[kLayerRows][kLayerFloats];
};

static void oracle_begin(struct oracle* oracle, float* initial) {
  size_t i;
  for (i = 0; i < kElements; ++i) initial[i] = (float)(i % 50);
  memcpy(oracle->first, initial, sizeof oracle->first);
  memcpy(oracle->layer, initial + kRows * kFloats, sizeof oracle->layer);
}

static void oracle_clock(struct oracle* oracle, int ranks, int clock) {
  int rank;
  size_t i, c;
  for (rank = 0; rank < ranks; ++rank) {
    for (i = 0; i < 3; ++i) {
      for (c = 0; c < kFloats; ++c) {
        oracle->first[kSomeRows[i]][c] -= update_of(rank, kSomeRows[i], c, clock);
      }
    }
    for (i = 0; i < kLayerRows; ++i) {
      for (c = 0; c < kLayerFloats; ++c) oracle->layer[i][c] -= update_of(rank, i, c, clock);
    }
  }
}

static phub_geeps_options* tables(void) {
  phub_geeps_options* options = NULL;
  OK(phub_geeps_options_create(&options));
  OK(phub_geeps_options_add_table(options, "first", kFloats, kKeys, kRows));
  OK(phub_geeps_options_add_local(options, "hidden", 7, NULL, 4));
  OK(phub_geeps_options_add_table(options, "layer", kLayerFloats, NULL, kLayerRows));
  OK(phub_geeps_options_set_number(options, "poison", 1));
  return options;
}

static phub_options* job_of(const char* name, int rank, int ranks, const phub_geeps_options* of) {
  phub_options* options = NULL;
  OK(phub_options_from_environment(&options));
  OK(phub_options_set(options, "server", server));
  OK(phub_options_set(options, "job", name));
  OK(phub_options_set_number(options, "rank", rank));
  OK(phub_options_set_number(options, "world_size", ranks));
  OK(phub_options_set(options, "optimizer", "sgd"));
  OK(phub_options_set(options, "initial", "broadcast"));
  OK(phub_options_set_hyper(options, "lr", 1.0));
  OK(phub_options_add_tables(options, of));
  return options;
}

static phub_buffer no_buffer(void) {
  phub_buffer buffer;
  memset(&buffer, 0xAA, sizeof buffer);
  buffer.size = sizeof buffer;
  return buffer;
}

/* One iteration; what it reads is checked unless `oracle` is null (a virtual one). Local rows hold
 * the number of the iteration that wrote them, zero at first. */
static void iterate(phub_geeps* geeps, const struct oracle* oracle, int rank, int clock) {
  phub_buffer weights = no_buffer(), layer = no_buffer(), hidden = no_buffer(),
              update = no_buffer();
  size_t i, c;
  OK(phub_geeps_read(geeps, 0, kSome, 3, PHUB_STALENESS_OF_JOB, &weights));
  OK(phub_geeps_local_access(geeps, 1, NULL, 0, 1, &hidden));
  CHECK(weights.rows == 3 && weights.row_floats == kFloats);
  CHECK(hidden.rows == 4 && hidden.row_floats == 7 && hidden.handle != weights.handle);
  CHECK((weights.data == NULL) == (oracle == NULL) && (hidden.data == NULL) == (oracle == NULL));
  if (oracle != NULL) {
    CHECK(weights.age == clock);
    for (i = 0; i < 3; ++i) {
      for (c = 0; c < kFloats; ++c) {
        CHECK(weights.data[i * kFloats + c] == oracle->first[kSomeRows[i]][c]);
      }
    }
    for (i = 0; i < 28; ++i) {
      CHECK(hidden.data[i] == (float)clock);
      hidden.data[i] = (float)(clock + 1);
    }
  }
  OK(phub_geeps_post_read(geeps, weights.handle));
  OK(phub_geeps_post_local_access(geeps, hidden.handle, 1));

  OK(phub_geeps_read(geeps, 2, NULL, 0, 0, &layer));
  CHECK(layer.rows == kLayerRows && layer.row_floats == kLayerFloats);
  if (oracle != NULL) {
    CHECK(memcmp(layer.data, oracle->layer, sizeof oracle->layer) == 0);
  }
  OK(phub_geeps_pre_update(geeps, 2, NULL, 0, &update));
  for (i = 0; oracle != NULL && i < kLayerRows; ++i) {
    for (c = 0; c < kLayerFloats; ++c) {
      update.data[i * kLayerFloats + c] = update_of(rank, i, c, clock);
    }
  }
  OK(phub_geeps_update(geeps, update.handle));
  OK(phub_geeps_post_read(geeps, layer.handle));
  OK(phub_geeps_table_clock(geeps, 2));

  OK(phub_geeps_pre_update(geeps, 0, kSome, 3, &update));
  for (i = 0; oracle != NULL && i < 3; ++i) {
    for (c = 0; c < kFloats; ++c) {
      update.data[i * kFloats + c] = update_of(rank, kSomeRows[i], c, clock);
    }
  }
  OK(phub_geeps_update(geeps, update.handle));
  OK(phub_geeps_table_clock(geeps, 0));
}

/* Rows that the sequence does not name, and a buffer that is discarded. */
static void leave_the_sequence(phub_geeps* geeps, const struct oracle* oracle) {
  static const uint64_t other[2] = {40, 10};
  phub_buffer buffer = no_buffer();
  OK(phub_geeps_read(geeps, 0, other, 2, PHUB_STALENESS_OF_JOB, &buffer));
  CHECK(memcmp(buffer.data, oracle->first[4], sizeof oracle->first[4]) == 0);
  CHECK(memcmp(buffer.data + kFloats, oracle->first[1], sizeof oracle->first[1]) == 0);
  OK(phub_geeps_post_read(geeps, buffer.handle));
  OK(phub_geeps_pre_update(geeps, 0, other, 2, &buffer));
  buffer.data[0] = 1e9f;
  OK(phub_geeps_discard(geeps, buffer.handle));
  FAILS(phub_geeps_update(geeps, buffer.handle), PHUB_INVALID, "phub_geeps_update");
}

/* Iterations from clock 0 on in device memory of so many bytes, then what was counted. */
static void train_in(phub_geeps* geeps, int rank, int ranks, struct oracle* oracle) {
  phub_geeps_counters counters = {sizeof counters, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  phub_placement placement = {sizeof placement, 0, 0, 0, 0, 0, 0, 0, 0};
  int clock;
  FAILS(phub_geeps_placement(geeps, &placement), PHUB_INVALID, "phub_geeps_finish");
  OK(phub_geeps_begin_virtual(geeps));
  iterate(geeps, NULL, rank, 0);
  OK(phub_geeps_finish(geeps));
  OK(phub_geeps_placement(geeps, &placement));
  CHECK(placement.pool_bytes > 0 && placement.total_bytes >= placement.pool_bytes);
  for (clock = 0; clock < kClocks; ++clock) {
    iterate(geeps, oracle, rank, clock);
    oracle_clock(oracle, ranks, clock);
    if (clock == 3) leave_the_sequence(geeps, oracle);
  }
  OK(phub_geeps_wait_all(geeps));
  OK(phub_geeps_stats(geeps, &counters));
  CHECK(counters.pushes == 2 * kClocks && counters.pulls >= counters.pushes);
  CHECK(counters.bytes_copied_by_caller > 0 && counters.outside_sequence > 0);
  CHECK(counters.calls > 10 * kClocks);
}

static void* train(void* argument) {
  const int rank = *(const int*)argument;
  phub_geeps_options* options = tables();
  phub_options* job = job_of("geeps", rank, kRanks, options);
  phub_worker* worker = NULL;
  phub_device* device = NULL;
  phub_geeps *geeps = NULL, *second = NULL;
  phub_memory memory = {sizeof memory, 0, 0, 0, 0};
  struct oracle oracle;
  float initial[kElements];
  oracle_begin(&oracle, initial);
  OK(phub_worker_create(job, &worker));
  OK(phub_options_destroy(job));
  OK(phub_broadcast(worker, rank == 0 ? initial : NULL, rank == 0 ? kElements : 0));
  OK(phub_device_open_host(16384, 1e9, 1000, &device));
  OK(phub_geeps_create(device, worker, options, &geeps));
  FAILS(phub_geeps_create(device, worker, options, &second), PHUB_TAKEN, "phub_geeps already");
  OK(phub_geeps_options_destroy(options));
  OK(phub_device_memory(device, &memory));
  CHECK(memory.budget_bytes == 16384 && memory.used_bytes <= memory.budget_bytes);
  OK(phub_device_close(device)); /* the cache keeps it */
  FAILS(phub_device_memory(device, &memory), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_push(worker, 0, 0), PHUB_INVALID, "phub_geeps");
  FAILS(phub_use_memory(worker, 0, NULL, NULL), PHUB_INVALID, "phub_geeps");
  train_in(geeps, rank, kRanks, &oracle);
  OK(phub_geeps_destroy(geeps));
  FAILS(phub_geeps_wait_all(geeps), PHUB_BAD_HANDLE, "phub_geeps was destroyed");
  OK(phub_worker_destroy(worker));
  return NULL;
}

static void update_first(phub_geeps* geeps, const uint64_t* keys, size_t count) {
  phub_buffer buffer = no_buffer();
  OK(phub_geeps_pre_update(geeps, 0, keys, count, &buffer));
  if (buffer.data != NULL) memset(buffer.data, 0, sizeof(float) * kFloats * buffer.rows);
  OK(phub_geeps_update(geeps, buffer.handle));
}

/* Options take the numbers that are some for them, and reach what they are for. */
static void heed_options(void) {
  static const char* const names[] = {"budget_bytes", "reserved_bytes", "max_lead",
                                      "prefetch",     "strict",         "infer_clocks",
                                      "poison",       "partitions",     "timeout_ms"};
  phub_geeps_options* options = tables();
  phub_options* job = job_of("heeded", 0, 1, options);
  phub_device* device = NULL;
  phub_geeps* geeps = NULL;
  phub_geeps_counters counters = {sizeof counters, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  phub_placement placement = {sizeof placement, 0, 0, 0, 0, 0, 0, 0, 0};
  phub_buffer buffer = no_buffer();
  size_t i;
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    OK(phub_geeps_options_set_number(options, names[i], 1));
  }
  OK(phub_geeps_options_set(options, "budget_bytes", "32768"));
  OK(phub_geeps_options_set(options, "reserved_bytes", "4096"));
  OK(phub_geeps_options_set(options, "timeout_ms", "0"));
  OK(phub_options_set(job, "initial", "zeros"));
  OK(phub_device_open_host(1 << 20, 0, 0, &device));
  OK(phub_geeps_create_standalone(device, job, options, NULL, 0, &geeps));
  OK(phub_geeps_begin_virtual(geeps));
  update_first(geeps, kSome, 3);
  OK(phub_geeps_finish(geeps));
  OK(phub_geeps_placement(geeps, &placement));
  CHECK(placement.reserved_bytes == 4096 && placement.total_bytes <= 32768);
  update_first(geeps, kSome, 3); /* no clock: inferred */
  OK(phub_geeps_wait_all(geeps));
  OK(phub_geeps_stats(geeps, &counters));
  CHECK(counters.pushes == 1);
  FAILS(phub_geeps_read(geeps, 0, kKeys, 1, 0, &buffer), PHUB_INVALID, "first"); /* strict */
  OK(phub_geeps_destroy(geeps));
  OK(phub_device_close(device));
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
}

/* Without a server, in as much device memory, by a first real iteration. */
static void train_alone(void) {
  phub_geeps_options* options = tables();
  phub_options* job = job_of("alone", -1, 1, options);
  phub_device* device = NULL;
  phub_geeps* geeps = NULL;
  phub_placement placement = {sizeof placement, 0, 0, 0, 0, 0, 0, 0, 0};
  struct oracle oracle;
  float initial[kElements];
  int clock;
  oracle_begin(&oracle, initial);
  OK(phub_device_open_host(1 << 20, 0, 0, &device));
  FAILS(phub_geeps_create_standalone(device, job, options, initial, 3, &geeps), PHUB_INVALID, "3");
  FAILS(phub_geeps_create_standalone(device, job, options, NULL, 3, &geeps), PHUB_INVALID,
        "initial is null");
  OK(phub_geeps_create_standalone(device, job, options, initial, kElements, &geeps));
  OK(phub_geeps_begin_gathering(geeps));
  for (clock = 0; clock < kClocks; ++clock) {
    iterate(geeps, &oracle, 0, clock);
    oracle_clock(&oracle, 1, clock);
    if (clock == 0) OK(phub_geeps_finish(geeps));
  }
  OK(phub_geeps_placement(geeps, &placement));
  CHECK(placement.double_buffered == 1 && placement.pinned_bytes > 0);
  OK(phub_geeps_destroy(geeps));
  OK(phub_device_close(device));
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
}

/* A handle has 64 bits: one that differs above the 32nd is another. */
static void give_back_by_the_whole_handle(phub_geeps* geeps) {
  phub_buffer buffer = {0};
  uint64_t other;
  buffer.size = sizeof buffer;
  OK(phub_geeps_local_access(geeps, 1, NULL, 0, 0, &buffer));
  other = buffer.handle + ((uint64_t)1 << 32);
  FAILS(phub_geeps_post_local_access(geeps, other, 1), PHUB_INVALID, "there never was one");
  FAILS(phub_geeps_post_read(geeps, other), PHUB_INVALID, "there never was one");
  FAILS(phub_geeps_update(geeps, other), PHUB_INVALID, "there never was one");
  FAILS(phub_geeps_discard(geeps, other), PHUB_INVALID, "there never was one");
  OK(phub_geeps_post_local_access(geeps, buffer.handle, 1));
}

/* What a wrong call gets. */
static void misuse(void) {
  static const uint64_t twice[2] = {1, 1}, unknown = 61;
  phub_geeps_options *options = tables(), *wrong = NULL;
  phub_options* job = job_of("misuse", 0, 1, options);
  phub_device *device = NULL, *none = NULL;
  phub_geeps *geeps = NULL, *other = NULL;
  phub_buffer buffer = no_buffer(), nothing = no_buffer();
  phub_geeps_counters counters = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  OK(phub_options_set(job, "initial", "zeros"));
  FAILS(phub_geeps_options_create(NULL), PHUB_INVALID, "options is null");
  FAILS(phub_geeps_options_set(options, "budget-bytes", "2"), PHUB_INVALID, "'budget_bytes'?");
  FAILS(phub_geeps_options_set(options, "max_lead", "two"), PHUB_INVALID, "'two'");
  FAILS(phub_geeps_options_set(options, "strict", "2"), PHUB_INVALID, "got 2");
  FAILS(phub_geeps_options_set_number(options, "partitions", -1), PHUB_INVALID, "got -1");
  FAILS(phub_geeps_options_set_number(options, "partitions", 257), PHUB_INVALID, "257");
  FAILS(phub_geeps_options_set_number(options, "trace", 1), PHUB_INVALID, "is a text");
  FAILS(phub_geeps_options_set(options, NULL, "1"), PHUB_INVALID, "name is null");
  FAILS(phub_geeps_options_set(NULL, "strict", "1"), PHUB_BAD_HANDLE, "null");
  FAILS(phub_geeps_options_set((phub_geeps_options*)job, "strict", "1"), PHUB_BAD_HANDLE,
        "this is a phub_options, a phub_geeps_options is needed");
  FAILS(phub_geeps_options_add_table(options, NULL, 1, NULL, 1), PHUB_INVALID, "name is null");
  FAILS(phub_geeps_options_add_table(options, "x", 0, NULL, 1), PHUB_INVALID, "'x'");
  FAILS(phub_geeps_options_add_local(options, "x", 1, NULL, 0), PHUB_INVALID, "0 rows");
  FAILS(phub_geeps_options_add_table(options, "x", 1, NULL, UINT64_MAX), PHUB_INVALID, "rows");
  FAILS(phub_geeps_options_tune_table(options, 1, 1, 0), PHUB_INVALID, "table 1");
  FAILS(phub_geeps_options_tune_table(options, 3, 1, 0), PHUB_INVALID, "table 3");
  FAILS(phub_options_add_tables(NULL, options), PHUB_BAD_HANDLE, "null");

  FAILS(phub_device_open_host(4096, -1, 0, &device), PHUB_INVALID, "bytes per second");
  FAILS(phub_device_open_host(4096, 1e-300, 0, &device), PHUB_INVALID, "bytes per second");
  FAILS(phub_device_open_host(4096, 0, UINT64_MAX, &device), PHUB_INVALID, "ns");
  FAILS(phub_device_open_host(4096, 0, 0, NULL), PHUB_INVALID, "device is null");
  CHECK(phub_device_open_host(UINT64_MAX, 0, 0, &device) != PHUB_OK);
  FAILS(phub_device_open_cuda(-1, 4096, &none), PHUB_UNAVAILABLE, "CUDA");
  CHECK(device == NULL && none == NULL);
  OK(phub_device_open_host(1 << 16, 0, 0, &device));

  FAILS(phub_geeps_create(device, NULL, options, &geeps), PHUB_BAD_HANDLE, "phub_worker is null");
  FAILS(phub_geeps_create(device, (phub_worker*)device, options, &geeps), PHUB_BAD_HANDLE,
        "this is a phub_device");
  FAILS(phub_geeps_create_standalone(device, job, options, NULL, 0, NULL), PHUB_INVALID,
        "geeps is null");
  OK(phub_geeps_options_create(&wrong));
  OK(phub_geeps_options_add_table(wrong, "same", 1, twice, 2));
  CHECK(phub_geeps_create_standalone(device, job, wrong, NULL, 0, &geeps) == PHUB_INVALID);
  OK(phub_geeps_options_destroy(wrong));
  FAILS(phub_geeps_options_destroy(wrong), PHUB_BAD_HANDLE, "was destroyed");
  CHECK(geeps == NULL);
  OK(phub_geeps_create_standalone(device, job, options, NULL, 0, &geeps));

  FAILS(phub_geeps_read(geeps, 3, NULL, 0, 0, &buffer), PHUB_INVALID, "table 3");
  FAILS(phub_geeps_read(geeps, 0, NULL, 2, 0, &buffer), PHUB_INVALID, "keys is null");
  FAILS(phub_geeps_read(geeps, 0, &unknown, 1, 0, &buffer), PHUB_INVALID, "61");
  FAILS(phub_geeps_read(geeps, 0, kSome, 3, -2, &buffer), PHUB_INVALID, "-2");
  FAILS(phub_geeps_read(geeps, 0, kSome, 3, 0, NULL), PHUB_INVALID, "buffer is null");
  FAILS(phub_geeps_read(geeps, 1, NULL, 0, 0, &buffer), PHUB_INVALID, "hidden");
  FAILS(phub_geeps_local_access(geeps, 0, NULL, 0, 1, &buffer), PHUB_INVALID, "first");
  FAILS(phub_geeps_table_clock(geeps, 1), PHUB_INVALID, "hidden");
  FAILS(phub_geeps_post_read(geeps, 12345), PHUB_INVALID, "12345");
  buffer.size = 3;
  FAILS(phub_geeps_read(geeps, 0, kSome, 3, 0, &buffer), PHUB_INVALID, "sizeof");
  buffer.size = sizeof buffer;
  CHECK(memcmp(&buffer, &nothing, sizeof buffer) == 0);
  FAILS(phub_geeps_stats(geeps, &counters), PHUB_INVALID, "sizeof");
  FAILS(phub_geeps_stats(geeps, NULL), PHUB_INVALID, "counters is null");
  FAILS(phub_geeps_finish(geeps), PHUB_INVALID, "phub_geeps_finish");

  OK(phub_geeps_read(geeps, 0, kSome, 3, 0, &buffer));
  FAILS(phub_geeps_update(geeps, buffer.handle), PHUB_INVALID, "phub_geeps_update");
  FAILS(phub_geeps_post_local_access(geeps, buffer.handle, 1), PHUB_INVALID, "phub_geeps_post");
  OK(phub_geeps_post_read(geeps, buffer.handle));
  FAILS(phub_geeps_post_read(geeps, buffer.handle), PHUB_INVALID, "phub_geeps_post_read");
  give_back_by_the_whole_handle(geeps);

  FAILS(phub_geeps_wait_all((phub_geeps*)device), PHUB_BAD_HANDLE, "a phub_geeps is needed");
  FAILS(phub_geeps_wait_all(NULL), PHUB_BAD_HANDLE, "null");
  FAILS(phub_geeps_destroy(other), PHUB_BAD_HANDLE, "null");
  OK(phub_geeps_destroy(geeps));
  FAILS(phub_geeps_destroy(geeps), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_geeps_read(geeps, 0, kSome, 3, 0, &buffer), PHUB_BAD_HANDLE, "was destroyed");
  OK(phub_device_close(device));
  FAILS(phub_device_close(device), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_geeps_create_standalone(device, job, options, NULL, 0, &geeps), PHUB_BAD_HANDLE,
        "was destroyed");
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
}

struct waiting {
  phub_geeps* geeps;
  phub_code code;
  pthread_mutex_t mutex; /* guards the next one */
  int reads;
};

/* Reads what needs another rank's update, which never comes. */
static void* wait_for_the_other(void* argument) {
  struct waiting* waiting = argument;
  phub_buffer buffer = no_buffer();
  OK(phub_geeps_pre_update(waiting->geeps, 0, NULL, 0, &buffer));
  memset(buffer.data, 0, sizeof(float) * kRows * kFloats);
  OK(phub_geeps_update(waiting->geeps, buffer.handle));
  OK(phub_geeps_table_clock(waiting->geeps, 0));
  pthread_mutex_lock(&waiting->mutex);
  waiting->reads = 1;
  pthread_mutex_unlock(&waiting->mutex);
  do { /* another thread looks whether this one is in the call */
    waiting->code = phub_geeps_read(waiting->geeps, 0, NULL, 0, PHUB_STALENESS_OF_JOB, &buffer);
  } while (waiting->code == PHUB_WRONG_THREAD);
  return NULL;
}

struct joining {
  const char* job;
  phub_worker* worker; /* rank 1 */
};

static void* join_and_stay(void* argument) {
  struct joining* joining = argument;
  phub_geeps_options* options = tables();
  phub_options* job = job_of(joining->job, 1, 2, options);
  OK(phub_worker_create(job, &joining->worker));
  OK(phub_broadcast(joining->worker, NULL, 0));
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
  return NULL;
}

/* A call that waits is alone, and ends with its worker. */
static void leave_while_waiting(void) {
  phub_geeps_options* options = tables();
  phub_options* job = job_of("waiting", 0, 2, options);
  phub_worker* worker = NULL;
  struct joining other = {"waiting", NULL};
  phub_device* device = NULL;
  struct waiting waiting = {NULL, PHUB_OK, PTHREAD_MUTEX_INITIALIZER, 0};
  int reads = 0;
  phub_geeps_counters counters = {sizeof counters, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  float initial[kElements];
  pthread_t joining, reading;
  memset(initial, 0, sizeof initial);
  CHECK(pthread_create(&joining, NULL, join_and_stay, &other) == 0);
  OK(phub_worker_create(job, &worker));
  OK(phub_broadcast(worker, initial, kElements));
  pthread_join(joining, NULL);
  OK(phub_device_open_host(1 << 16, 0, 0, &device));
  OK(phub_geeps_create(device, worker, options, &waiting.geeps));
  CHECK(pthread_create(&reading, NULL, wait_for_the_other, &waiting) == 0);
  while (!reads) {
    pthread_mutex_lock(&waiting.mutex);
    reads = waiting.reads;
    pthread_mutex_unlock(&waiting.mutex);
  }
  while (phub_geeps_stats(waiting.geeps, &counters) == PHUB_OK) {
  }
  FAILS(phub_geeps_stats(waiting.geeps, &counters), PHUB_WRONG_THREAD, "another thread");
  FAILS(phub_geeps_destroy(waiting.geeps), PHUB_WRONG_THREAD, "another thread");
  OK(phub_worker_destroy(worker));
  pthread_join(reading, NULL);
  CHECK(waiting.code != PHUB_OK && waiting.code != PHUB_BAD_HANDLE);
  CHECK(phub_geeps_wait_all(waiting.geeps) == waiting.code);
  OK(phub_geeps_destroy(waiting.geeps));
  OK(phub_worker_destroy(other.worker));
  OK(phub_device_close(device));
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
}

static void told_of(void* told, size_t key, uint64_t round, phub_code code, const char* message) {
  (void)message;
  CHECK(key == 1 && round == 1 && code == PHUB_OK);
  __atomic_store_n((int*)told, 1, __ATOMIC_RELEASE);
}

static void clock_first(phub_geeps* geeps) {
  update_first(geeps, NULL, 0);
  OK(phub_geeps_table_clock(geeps, 0));
}

/* Results that come when the phub_geeps that pushed is gone: neither the worker's next one nor its
 * completions take them for their own. */
static void destroy_before_results(void) {
  phub_geeps_options* options = tables();
  phub_options* job = job_of("due", 0, 2, options);
  phub_worker* worker = NULL;
  struct joining other = {"due", NULL};
  phub_device* device = NULL;
  phub_geeps* geeps = NULL;
  float initial[kElements];
  int told = 0;
  pthread_t joining;
  memset(initial, 0, sizeof initial);
  OK(phub_geeps_options_set_number(options, "timeout_ms", 5000));
  CHECK(pthread_create(&joining, NULL, join_and_stay, &other) == 0);
  OK(phub_worker_create(job, &worker));
  OK(phub_broadcast(worker, initial, kElements));
  pthread_join(joining, NULL);
  OK(phub_device_open_host(1 << 16, 0, 0, &device));
  OK(phub_geeps_create(device, worker, options, &geeps));
  clock_first(geeps);
  OK(phub_geeps_destroy(geeps));
  OK(phub_push(other.worker, 0, 0));
  OK(phub_geeps_create(device, worker, options, &geeps));
  OK(phub_geeps_begin_virtual(geeps));
  clock_first(geeps);
  OK(phub_geeps_finish(geeps));
  OK(phub_push(other.worker, 0, 0));
  clock_first(geeps);
  OK(phub_geeps_wait_all(geeps));
  clock_first(geeps);
  OK(phub_geeps_destroy(geeps));
  OK(phub_push_then(worker, 1, 0, told_of, &told));
  OK(phub_push(other.worker, 0, 0));
  OK(phub_push(other.worker, 1, 0));
  OK(phub_wait_all(other.worker));
  OK(phub_wait_all(worker));
  while (!__atomic_load_n(&told, __ATOMIC_ACQUIRE)) {
  }
  OK(phub_worker_destroy(worker));
  OK(phub_worker_destroy(other.worker));
  OK(phub_device_close(device));
  OK(phub_options_destroy(job));
  OK(phub_geeps_options_destroy(options));
}

int main(int argc, char** argv) {
  int ranks[kRanks], i;
  pthread_t threads[kRanks];
  if (argc != 2) return 2;
  start_server(argv[1]);
  for (i = 0; i < kRanks; ++i) {
    ranks[i] = i;
    CHECK(pthread_create(&threads[i], NULL, train, &ranks[i]) == 0);
  }
  for (i = 0; i < kRanks; ++i) pthread_join(threads[i], NULL);
  train_alone();
  heed_options();
  misuse();
  leave_while_waiting();
  destroy_before_results();
  puts("ok");
  return 0;
}
