/* phub.h where threads, completions and misfortune meet: every call ends, and says why. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <sched.h>

#include "tests/worker/c_abi_program.h"

enum { kRanks = 2, kThreads = 4, kHuge = 3000000 };

/* They come once for every push, on one thread of their own. */
static void completions(int rank) {
  enum { kRounds = 20, kKeys = 4 };
  phub_options* options = options_of("completions", rank, kRanks);
  phub_worker* worker;
  struct told told = NOTHING_TOLD;
  size_t key;
  int round;
  OK(phub_options_add_key(options, "one", 1));
  OK(phub_options_add_key(options, "chunks", 70000));
  worker = join(options);
  for (round = 1; round <= kRounds; ++round) {
    for (key = kKeys; key-- > 0;) OK(phub_push_then(worker, key, 0, tell, &told));
    if (round % 2 == 0) OK(phub_wait_all(worker));
    await_told(&told, (size_t)(round * kKeys));
  }
  all_told_well(&told, kKeys, kRounds);
  OK(phub_worker_destroy(worker));
}

/* What the threads below share with those that they start. */
static phub_worker* shared;
static int ended, ready;

static void wait_for_large(int number) {
  (void)number;
  OK(phub_wait(shared, 1));
}

/* A result that is here is told of, though another thread waits for one that is not. */
static void apart(int rank) {
  phub_worker* worker = join(options_of("apart", rank, kRanks));
  struct told told = NOTHING_TOLD;
  struct threads other;
  size_t outstanding;
  if (rank == 0) {
    shared = worker;
    OK(phub_push(worker, 1, 0));
    start_threads(&other, 1, wait_for_large);
    OK(phub_push_then(worker, 0, 0, tell, &told));
    await_told(&told, 1);
    ADD(ended);
    join_threads(&other);
  } else {
    OK(phub_push(worker, 0, 0));
    while (!GET(ended)) {
      OK(phub_poll(worker, &outstanding));
      sched_yield();
    }
    OK(phub_push(worker, 1, 0));
  }
  OK(phub_wait_all(worker));
  OK(phub_worker_destroy(worker));
}

struct chain {
  phub_worker* worker;
  int calls, refused;
};

/* A completion may push, but neither wait nor destroy. */
static void push_again(void* user_data, size_t key, uint64_t round, phub_code code,
                       const char* message) {
  struct chain* chain = user_data;
  CHECK(code == PHUB_OK && round > 0 && message[0] == 0);
  chain->refused += phub_wait(chain->worker, key) == PHUB_WRONG_THREAD;
  chain->refused += phub_barrier(chain->worker) == PHUB_WRONG_THREAD;
  chain->refused += phub_worker_destroy(chain->worker) == PHUB_WRONG_THREAD;
  if (chain->calls < 49) OK(phub_push_null(chain->worker, key));
  ADD(chain->calls);
}

static void push_from_completions(void) {
  struct chain chain = {NULL, 0, 0};
  int i;
  chain.worker = join(options_of("chain", -1, 1));
  for (i = 1; i <= 50; ++i) {
    OK(phub_push_then(chain.worker, 0, 0, push_again, &chain));
    while (GET(chain.calls) < i) sched_yield();
    OK(phub_wait_all(chain.worker));
  }
  CHECK(chain.refused == 150);
  OK(phub_worker_destroy(chain.worker));
}

static void wait_in_vain(int number) {
  CHECK((number == 0 ? phub_barrier(shared) : phub_wait(shared, 1)) != PHUB_OK);
  ADD(ended);
}

/* Destroying ends the calls of other threads and the completions that are due. */
static void destroy_while_waiting(int rank) {
  phub_options* options = options_of("ended", rank, kRanks);
  phub_worker* worker;
  struct told told = NOTHING_TOLD;
  struct threads waiters;
  OK(phub_options_set(options, "on_loss", "shrink"));
  worker = join(options);
  OK(phub_wait_all(worker));
  if (rank == 0) {
    shared = worker;
    OK(phub_push_then(worker, 0, 0, tell, &told)); /* never complete */
    OK(phub_push(worker, 1, 0));
    start_threads(&waiters, kThreads, wait_in_vain);
    sleep_ms(50);
    CHECK(GET(ended) == 0);
    OK(phub_worker_destroy(worker));
    join_threads(&waiters);
    await_told(&told, 1);
    CHECK(told.count == 1 && told.all[0].code == PHUB_FENCED && told.all[0].round == 1);
    CHECK(phub_wait(worker, 0) == PHUB_BAD_HANDLE);
    ADD(ready);
  } else {
    while (!GET(ready)) sleep_ms(1);
    OK(phub_worker_destroy(worker));
  }
}

/* A job that ends is an error of every call and completion. */
static void remove_job(int rank) {
  phub_options* options = options_of("removed", rank, kRanks);
  phub_worker* worker;
  struct told told = NOTHING_TOLD;
  OK(phub_options_set(options, "lease_ms", "5000"));
  worker = join(options);
  OK(phub_wait_all(worker));
  if (rank == 0) OK(phub_push_then(worker, 0, 0, tell, &told));
  ADD(ready);
  while (GET(ready) < 2) sched_yield();
  if (rank == 0) {
    OK(phub_job_remove(server, "removed"));
    await_told(&told, 1);
    CHECK(told.all[0].code != PHUB_OK && told.all[0].has_message);
    CHECK(phub_push(worker, 1, 0) == told.all[0].code);
    ADD(ready);
  }
  while (GET(ready) < 3) sched_yield();
  OK(phub_worker_destroy(worker));
}

/* No two pushes of a key at once, whoever asks for them. */
static void crowd(int number) {
  int i;
  (void)number;
  for (i = 0; i < 300; ++i) {
    const phub_code code = phub_push(shared, (size_t)i % 2, 0);
    if (code != PHUB_OK) CHECK(code == PHUB_INVALID && strstr(phub_last_error(), "another thread"));
  }
}

/* A broadcast that fails lets go of the caller's memory. */
static void broadcast_in_vain(int rank) {
  enum { kElements = kSmall + kLarge + kHuge };
  phub_options* options = options_of("late", rank, kRanks);
  phub_worker* worker;
  OK(phub_options_add_key(options, "huge", kHuge));
  OK(phub_options_set(options, "initial", "broadcast"));
  OK(phub_options_set(options, "wait_timeout_ms", "200"));
  worker = join(options);
  if (rank == 0) {
    float* initial = calloc(kElements, sizeof(float));
    phub_code code;
    CHECK(initial != NULL);
    code = phub_broadcast(worker, initial, kElements);
    CHECK(code == PHUB_OK || code == PHUB_TIMEOUT);
    free(initial);
    phub_push(worker, 2, 0);
    FAILS(phub_wait(worker, 2), PHUB_TIMEOUT, "200 ms"); /* the other rank pushes nothing */
    ADD(ready);
  }
  while (!GET(ready)) sched_yield();
  OK(phub_worker_destroy(worker));
}

static void handles_are_not_given_out_twice(void) {
  phub_options* all[100];
  int i;
  for (i = 0; i < 100; ++i) {
    OK(phub_options_create(&all[i]));
    OK(phub_options_destroy(all[i]));
  }
  for (i = 0; i < 100; ++i) {
    FAILS(phub_options_set(all[i], "job", "x"), PHUB_BAD_HANDLE,
          "phub_options_set: this phub_options was destroyed");
  }
}

/* Long messages and texts are cut between characters. */
static void long_texts(void) {
  char longer[10001];
  phub_options* options = NULL;
  int i;
  for (i = 0; i < 10000; ++i) longer[i] = i % 2 ? '\xbc' : '\xc3'; /* ü */
  longer[10000] = 0;
  OK(phub_options_create(&options));
  FAILS(phub_options_set(options, longer, "1"), PHUB_INVALID, "\xc3\xbc");
  CHECK(strlen(phub_last_error()) < 2048);
  CHECK(phub_last_error()[strlen(phub_last_error()) - 1] != '\xc3');
  FAILS(phub_options_set(options, "world_size", longer), PHUB_INVALID, "\xc3\xbc");
  OK(phub_options_destroy(options));
}

/* The server's refusals keep their codes. */
static void refusals(void) {
  phub_options* options = plain_options("refused", -1, 1);
  phub_worker *first = NULL, *worker = NULL;
  const char* name = "leaning_rate";
  const double value = 0.1, nan = NAN;
  /* Planning the huge job below takes seconds where everything is slow, and nobody is heard then.
   */
  OK(phub_options_set(options, "lease_ms", "60000"));
  FAILS(phub_worker_create(options, &worker), PHUB_INVALID, "phub_worker_create: keys");
  OK(phub_options_add_key(options, "0", 10));
  OK(phub_worker_create(options, &first));
  OK(phub_options_destroy(options));

  options = plain_options("refused", -1, 1);
  OK(phub_options_set(options, "lease_ms", "60000"));
  FAILS(phub_worker_create(options, &worker), PHUB_INVALID, "phub_worker_create: keys");
  OK(phub_options_add_key(options, "0", 11));
  FAILS(phub_worker_create(options, &worker), PHUB_MISMATCH, "11 elements");
  OK(phub_options_set(options, "job", "huge"));
  OK(phub_options_add_key(options, "1", (uint64_t)1 << 33));
  CHECK(phub_worker_create(options, &worker) == PHUB_FULL);
  OK(phub_options_set(options, "server", "127.0.0.1:1"));
  OK(phub_options_set(options, "connect_timeout_ms", "10"));
  CHECK(phub_worker_create(options, &worker) == PHUB_UNAVAILABLE && worker == NULL);
  OK(phub_options_destroy(options));
  FAILS(phub_set_hyper(first, &name, &value, 1, NULL), PHUB_INVALID, "leaning_rate");
  name = "lr";
  CHECK(phub_set_hyper(first, &name, &nan, 1, NULL) == PHUB_INVALID);
  FAILS(phub_set_hyper(first, &name, &value, 1, NULL), PHUB_INVALID, "optimizer 'none'");
  OK(phub_worker_destroy(first));
}

static void ranks_of(void (*body)(int rank)) {
  ended = ready = 0;
  each_rank(kRanks, body);
}

void check_threads(void) {
  ranks_of(completions);
  ranks_of(apart);
  push_from_completions();
  ranks_of(destroy_while_waiting);
  ranks_of(remove_job);
  shared = join(options_of("crowd", -1, 1));
  each_rank(kThreads, crowd);
  OK(phub_wait_all(shared));
  OK(phub_worker_destroy(shared));
  ranks_of(broadcast_in_vain);
  handles_are_not_given_out_twice();
  long_texts();
  refusals();
}
