/* The caches of phub.h, with a worker and without. */
#include "tests/worker/c_abi_program.h"

enum { kRanks = 2, kClocks = 6, kRows = 6, kFloats = 5, kLayerRows = 3, kLayerFloats = 128 };
/* The first table is two pieces of at most 4 rows, so its keys are two. */
enum { kPieceRows = 4, kFirstKeys = 2, kLayerKey = kFirstKeys };
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
  OK(phub_geeps_options_set_piece_bytes(options, 0, kPieceRows * kFloats * sizeof(float)));
  OK(phub_geeps_options_set_number(options, "poison", 1));
  return options;
}

/* What a cache needs. */
struct rig {
  phub_geeps_options* tables;
  phub_options* job;
  phub_worker* worker;
  phub_device* device;
  phub_geeps* geeps;
};

static struct rig open_rig(const char* name, int rank, int ranks, uint64_t device_bytes) {
  struct rig rig = {tables(), plain_options(name, rank, ranks), NULL, NULL, NULL};
  OK(phub_options_set(rig.job, "optimizer", "sgd"));
  OK(phub_options_set(rig.job, "initial", "broadcast"));
  OK(phub_options_set_hyper(rig.job, "lr", 1.0));
  OK(phub_options_add_tables(rig.job, rig.tables));
  if (device_bytes > 0) OK(phub_device_open_host(device_bytes, 0, 0, &rig.device));
  return rig;
}

/* Joins; rank 0 gives the initial parameters. */
static void join_rig(struct rig* rig, const float* initial) {
  OK(phub_worker_create(rig->job, &rig->worker));
  OK(phub_broadcast(rig->worker, initial, initial ? kElements : 0));
}

static void close_rig(struct rig* rig) {
  if (rig->geeps) OK(phub_geeps_destroy(rig->geeps));
  if (rig->worker) OK(phub_worker_destroy(rig->worker));
  if (rig->device) OK(phub_device_close(rig->device));
  if (rig->job) OK(phub_options_destroy(rig->job));
  if (rig->tables) OK(phub_geeps_options_destroy(rig->tables));
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
  CHECK(counters.pushes == (kFirstKeys + 1) * kClocks && counters.pulls >= counters.pushes);
  CHECK(counters.bytes_copied_by_caller > 0 && counters.outside_sequence > 0);
  CHECK(counters.calls > 10 * kClocks);
}

static void train(int rank) {
  struct rig rig = open_rig("geeps", rank, kRanks, 0);
  phub_geeps* second = NULL;
  phub_memory memory = {sizeof memory, 0, 0, 0, 0};
  struct oracle oracle;
  float initial[kElements];
  oracle_begin(&oracle, initial);
  join_rig(&rig, rank == 0 ? initial : NULL);
  OK(phub_device_open_host(16384, 1e9, 1000, &rig.device));
  OK(phub_geeps_create(rig.device, rig.worker, rig.tables, &rig.geeps));
  FAILS(phub_geeps_create(rig.device, rig.worker, rig.tables, &second), PHUB_TAKEN,
        "phub_geeps already");
  OK(phub_geeps_options_destroy(rig.tables)); /* the cache and the worker have their own */
  OK(phub_options_destroy(rig.job));
  rig.tables = NULL;
  rig.job = NULL;
  OK(phub_device_memory(rig.device, &memory));
  CHECK(memory.budget_bytes == 16384 && memory.used_bytes <= memory.budget_bytes);
  OK(phub_device_close(rig.device)); /* the cache keeps it */
  FAILS(phub_device_memory(rig.device, &memory), PHUB_BAD_HANDLE, "was destroyed");
  rig.device = NULL;
  FAILS(phub_push(rig.worker, 0, 0), PHUB_INVALID, "phub_geeps");
  FAILS(phub_use_memory(rig.worker, 0, NULL, NULL), PHUB_INVALID, "phub_geeps");
  train_in(rig.geeps, rank, kRanks, &oracle);
  close_rig(&rig);
  FAILS(phub_geeps_wait_all(rig.geeps), PHUB_BAD_HANDLE, "phub_geeps was destroyed");
}

static void update_first(phub_geeps* geeps, const uint64_t* keys, size_t count) {
  phub_buffer buffer = no_buffer();
  OK(phub_geeps_pre_update(geeps, 0, keys, count, &buffer));
  if (buffer.data != NULL) memset(buffer.data, 0, sizeof(float) * kFloats * buffer.rows);
  OK(phub_geeps_update(geeps, buffer.handle));
}

/* Options take the numbers that are some for them, and reach what they are for. */
static void heed_options(void) {
  static const char* const names[] = {"budget_bytes", "reserved_bytes", "max_lead", "prefetch",
                                      "strict",       "infer_clocks",   "poison",   "partitions",
                                      "timeout_ms",   "peak_first"};
  struct rig rig = open_rig("heeded", 0, 1, 1 << 20);
  phub_geeps_counters counters = {sizeof counters, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  phub_placement placement = {sizeof placement, 0, 0, 0, 0, 0, 0, 0, 0};
  phub_buffer buffer = no_buffer();
  size_t i;
  for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
    OK(phub_geeps_options_set_number(rig.tables, names[i], 1));
  }
  OK(phub_geeps_options_set(rig.tables, "budget_bytes", "32768"));
  OK(phub_geeps_options_set(rig.tables, "reserved_bytes", "4096"));
  OK(phub_geeps_options_set(rig.tables, "timeout_ms", "0"));
  OK(phub_options_set(rig.job, "initial", "zeros"));
  OK(phub_geeps_create_standalone(rig.device, rig.job, rig.tables, NULL, 0, &rig.geeps));
  OK(phub_geeps_begin_virtual(rig.geeps));
  update_first(rig.geeps, kSome, 3);
  OK(phub_geeps_finish(rig.geeps));
  OK(phub_geeps_placement(rig.geeps, &placement));
  CHECK(placement.reserved_bytes == 4096 && placement.total_bytes <= 32768);
  update_first(rig.geeps, kSome, 3); /* no clock: inferred */
  OK(phub_geeps_wait_all(rig.geeps));
  OK(phub_geeps_stats(rig.geeps, &counters));
  CHECK(counters.pushes == kFirstKeys);
  FAILS(phub_geeps_read(rig.geeps, 0, kKeys, 1, 0, &buffer), PHUB_INVALID, "first"); /* strict */
  close_rig(&rig);
}

/* Without a server, in as much device memory, by a first real iteration. */
static void train_alone(void) {
  struct rig rig = open_rig("alone", -1, 1, 1 << 20);
  phub_placement placement = {sizeof placement, 0, 0, 0, 0, 0, 0, 0, 0};
  struct oracle oracle;
  float initial[kElements];
  int clock;
  oracle_begin(&oracle, initial);
  FAILS(phub_geeps_create_standalone(rig.device, rig.job, rig.tables, initial, 3, &rig.geeps),
        PHUB_INVALID, "3");
  FAILS(phub_geeps_create_standalone(rig.device, rig.job, rig.tables, NULL, 3, &rig.geeps),
        PHUB_INVALID, "initial is null");
  OK(phub_geeps_create_standalone(rig.device, rig.job, rig.tables, initial, kElements, &rig.geeps));
  OK(phub_geeps_begin_gathering(rig.geeps));
  for (clock = 0; clock < kClocks; ++clock) {
    iterate(rig.geeps, &oracle, 0, clock);
    oracle_clock(&oracle, 1, clock);
    if (clock == 0) OK(phub_geeps_finish(rig.geeps));
  }
  OK(phub_geeps_placement(rig.geeps, &placement));
  CHECK(placement.double_buffered == 1 && placement.pinned_bytes > 0);
  close_rig(&rig);
}

/* What a stream does with two buffers of the first table. */
struct step {
  const float* weights;
  float* update;
  float seen;
};

static void compute(void* data) {
  struct step* step = data;
  size_t i;
  step->seen = step->weights[kRows * kFloats - 1];
  for (i = 0; i < kRows * kFloats; ++i) step->update[i] = -1;
}

/* Two devices of this process, whose caller computes in their streams: each adds one per clock. */
static void train_in_streams(void) {
  struct rig rig = open_rig("streams", -1, 1, 1 << 16);
  static struct step steps[2][kClocks];
  phub_device_group* group = NULL;
  phub_device* second = NULL;
  phub_host_stream* streams[2] = {NULL, NULL};
  phub_geeps* geeps[2] = {NULL, NULL};
  phub_buffer weights = no_buffer(), update = no_buffer();
  int i, clock;
  OK(phub_options_set(rig.job, "initial", "zeros"));
  OK(phub_device_open_host(1 << 16, 0, 0, &second));
  OK(phub_device_group_create_standalone(rig.job, NULL, 0, 2, 0, 0, &group));
  for (i = 0; i < 2; ++i) {
    phub_device* device = i == 0 ? rig.device : second;
    OK(phub_host_stream_create(device, &streams[i]));
    OK(phub_geeps_options_set_stream(rig.tables, streams[i]));
    OK(phub_geeps_create_member(device, group, (uint32_t)i, rig.tables, &geeps[i]));
  }
  OK(phub_device_group_destroy(group));
  for (clock = 0; clock < kClocks; ++clock) {
    for (i = 0; i < 2; ++i) {
      OK(phub_geeps_read(geeps[i], 0, NULL, 0, PHUB_STALENESS_OF_JOB, &weights));
      OK(phub_geeps_pre_update(geeps[i], 0, NULL, 0, &update));
      steps[i][clock].weights = weights.data;
      steps[i][clock].update = update.data;
      OK(phub_host_stream_call(streams[i], compute, &steps[i][clock]));
      OK(phub_geeps_update(geeps[i], update.handle));
      OK(phub_geeps_post_read(geeps[i], weights.handle));
      OK(phub_geeps_table_clock(geeps[i], 0));
    }
  }
  for (i = 0; i < 2; ++i) {
    OK(phub_host_stream_wait(streams[i]));
    for (clock = 0; clock < kClocks; ++clock) CHECK(steps[i][clock].seen == (float)(2 * clock));
    OK(phub_geeps_destroy(geeps[i]));
    OK(phub_host_stream_destroy(streams[i]));
  }
  OK(phub_device_close(second));
  close_rig(&rig);
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
  struct rig rig = open_rig("misuse", 0, 1, 0);
  phub_geeps_options *options = rig.tables, *wrong = NULL;
  phub_options* job = rig.job;
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
  FAILS(phub_geeps_options_set_samples(options, 1, 1), PHUB_INVALID, "table 1");
  FAILS(phub_geeps_options_set_piece_bytes(options, 3, 1), PHUB_INVALID, "table 3");
  FAILS(phub_geeps_options_set_piece_bytes(NULL, 0, 1), PHUB_BAD_HANDLE, "null");
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
  close_rig(&rig);
}

static struct rig ours, theirs; /* of ranks 0 and 1 */
static phub_code waited;
static int reads;

static void join_both(int rank) { /* rank 0 with no parameters but zeros */
  static const float zeros[kElements];
  join_rig(rank == 0 ? &ours : &theirs, rank == 0 ? zeros : NULL);
}

static void open_both(const char* name, int timeout_ms) {
  ours = open_rig(name, 0, kRanks, 1 << 16);
  theirs = open_rig(name, 1, kRanks, 0);
  OK(phub_geeps_options_set_number(ours.tables, "timeout_ms", timeout_ms));
  each_rank(kRanks, join_both);
  OK(phub_geeps_create(ours.device, ours.worker, ours.tables, &ours.geeps));
}

static void clock_first(phub_geeps* geeps) {
  update_first(geeps, NULL, 0);
  OK(phub_geeps_table_clock(geeps, 0));
}

/* Reads what needs another rank's update, which never comes. */
static void wait_for_the_other(int number) {
  phub_buffer buffer = no_buffer();
  (void)number;
  clock_first(ours.geeps);
  ADD(reads);
  do { /* another thread looks whether this one is in the call */
    waited = phub_geeps_read(ours.geeps, 0, NULL, 0, PHUB_STALENESS_OF_JOB, &buffer);
  } while (waited == PHUB_WRONG_THREAD);
}

/* A call that waits is alone, and ends with its worker. */
static void leave_while_waiting(void) {
  phub_geeps_counters counters = {sizeof counters, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  struct threads reading;
  open_both("waiting", 0);
  start_threads(&reading, 1, wait_for_the_other);
  while (!GET(reads)) {
  }
  while (phub_geeps_stats(ours.geeps, &counters) == PHUB_OK) {
  }
  FAILS(phub_geeps_stats(ours.geeps, &counters), PHUB_WRONG_THREAD, "another thread");
  FAILS(phub_geeps_destroy(ours.geeps), PHUB_WRONG_THREAD, "another thread");
  OK(phub_worker_destroy(ours.worker));
  ours.worker = NULL;
  join_threads(&reading);
  CHECK(waited != PHUB_OK && waited != PHUB_BAD_HANDLE);
  CHECK(phub_geeps_wait_all(ours.geeps) == waited);
  close_rig(&ours);
  close_rig(&theirs);
}

static void push_first(phub_worker* worker) {
  size_t key;
  for (key = 0; key < kFirstKeys; ++key) OK(phub_push(worker, key, 0));
}

/* Results that come when the phub_geeps that pushed is gone: neither the worker's next one nor its
 * completions take them for their own. */
static void destroy_before_results(void) {
  struct told told = NOTHING_TOLD;
  open_both("due", 5000);
  clock_first(ours.geeps);
  OK(phub_geeps_destroy(ours.geeps));
  push_first(theirs.worker);
  OK(phub_geeps_create(ours.device, ours.worker, ours.tables, &ours.geeps));
  OK(phub_geeps_begin_virtual(ours.geeps));
  clock_first(ours.geeps);
  OK(phub_geeps_finish(ours.geeps));
  push_first(theirs.worker);
  clock_first(ours.geeps);
  OK(phub_geeps_wait_all(ours.geeps));
  clock_first(ours.geeps);
  OK(phub_geeps_destroy(ours.geeps));
  ours.geeps = NULL;
  OK(phub_push_then(ours.worker, kLayerKey, 0, tell, &told));
  push_first(theirs.worker);
  OK(phub_push(theirs.worker, kLayerKey, 0));
  OK(phub_wait_all(theirs.worker));
  OK(phub_wait_all(ours.worker));
  await_told(&told, 1);
  CHECK(told.all[0].key == kLayerKey && told.all[0].round == 1 && told.all[0].code == PHUB_OK);
  close_rig(&ours);
  CHECK(told.count == 1);
  close_rig(&theirs);
}

/* A matrix of 3 x 2, whose updates are factors. */
static void clock_factors(void) {
  phub_options* job = plain_options("factors", -1, 1);
  phub_geeps_options* tables = NULL;
  phub_device* device = NULL;
  phub_geeps* geeps = NULL;
  phub_buffer buffer = no_buffer();
  static const float left[6] = {1, 2, 3, 10, 0, 0}, right[4] = {1, 2, 3, 4};
  static const float want[6] = {31, 42, 2, 4, 3, 6};
  OK(phub_geeps_options_create(&tables));
  OK(phub_geeps_options_add_table(tables, "matrix", 2, NULL, 3));
  OK(phub_geeps_options_set_samples(tables, 0, 2));
  OK(phub_options_add_tables(job, tables));
  OK(phub_options_set(job, "optimizer", "none"));
  OK(phub_device_open_host(1 << 16, 0, 0, &device));
  OK(phub_geeps_create_standalone(device, job, tables, NULL, 0, &geeps));
  FAILS(phub_geeps_clock_factors(geeps, 0, left, right, 3), PHUB_INVALID, "3 pairs");
  FAILS(phub_geeps_pre_update(geeps, 0, NULL, 0, &buffer), PHUB_INVALID, "matrix");
  OK(phub_geeps_read(geeps, 0, NULL, 0, PHUB_STALENESS_OF_JOB, &buffer));
  OK(phub_geeps_post_read(geeps, buffer.handle));
  OK(phub_geeps_clock_factors(geeps, 0, left, right, 2));
  OK(phub_geeps_read(geeps, 0, NULL, 0, PHUB_STALENESS_OF_JOB, &buffer));
  CHECK(memcmp(buffer.data, want, sizeof want) == 0);
  OK(phub_geeps_post_read(geeps, buffer.handle));
  OK(phub_geeps_destroy(geeps));
  OK(phub_device_close(device));
  OK(phub_geeps_options_destroy(tables));
  OK(phub_options_destroy(job));
}

void check_geeps(void) {
  each_rank(kRanks, train);
  train_alone();
  train_in_streams();
  clock_factors();
  heed_options();
  misuse();
  leave_while_waiting();
  destroy_before_results();
}
