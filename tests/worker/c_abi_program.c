/* A C99 program that uses phub.h as trainers would, and wrongly, against a server of its own:
 *     c_abi_program PATH-OF-PHUB
 * PHUB_TRANSPORT says over what. Exit status 0: everything was as it must be. */
#define _POSIX_C_SOURCE 200809L
#include "tests/worker/c_abi_program.h"

#include <math.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kRanks = 2, kRounds = 5 };

char server[128];
static pid_t server_pid;

/* The program fails unless the server ends well: what sanitizers find in it is its exit status. */
static void stop_server(void) {
  int status = 0;
  const pid_t pid = server_pid;
  if (pid == 0) return; /* it was stopped */
  server_pid = 0;
  kill(pid, SIGTERM);
  if (waitpid(pid, &status, 0) == pid && status == 0) return;
  fprintf(stderr, "the server (process %d) %s %d\n", (int)pid,
          WIFSIGNALED(status) ? "was ended by signal" : "ended with exit status",
          WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  _exit(1); /* exit may be what calls this */
}

static void start_server(const char* program) {
  int ends[2];
  FILE* output;
  char line[512];
  CHECK(pipe(ends) == 0);
  server_pid = fork();
  if (server_pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    dup2(ends[1], 1);
    execl(program, program, "serve", "--listen", "127.0.0.1:0", "--topology", "pack:1 core:2 pu:1",
          "--pin", "false", "--memory-limit", "8G", (char*)NULL);
    _exit(127);
  }
  CHECK(server_pid > 0);
  atexit(stop_server);
  close(ends[1]);
  output = fdopen(ends[0], "r");
  CHECK(output != NULL);
  while (fgets(line, sizeof line, output) != NULL) {
    if (sscanf(line, "listening on %127s", server) == 1) return; /* `output` stays open */
  }
  fprintf(stderr, "%s serve did not start\n", program);
  exit(1);
}

void sleep_ms(int ms) {
  const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&time, NULL);
}

static void* run_one(void* argument) {
  const struct one* one = argument;
  one->body(one->number);
  return NULL;
}

void start_threads(struct threads* threads, int count, void (*body)(int number)) {
  int i;
  for (i = 0; i < count; ++i) {
    threads->all[i].body = body;
    threads->all[i].number = i;
    CHECK(pthread_create(&threads->all[i].thread, NULL, run_one, &threads->all[i]) == 0);
  }
  threads->count = count;
}

void join_threads(const struct threads* threads) {
  int i;
  for (i = 0; i < threads->count; ++i) pthread_join(threads->all[i].thread, NULL);
}

void each_rank(int ranks, void (*body)(int rank)) {
  struct threads threads;
  start_threads(&threads, ranks, body);
  join_threads(&threads);
}

void tell(void* user_data, size_t key, uint64_t round, phub_code code, const char* message) {
  struct told* told = user_data;
  pthread_mutex_lock(&told->mutex);
  CHECK(told->count < sizeof told->all / sizeof told->all[0]);
  told->all[told->count].key = key;
  told->all[told->count].round = round;
  told->all[told->count].code = code;
  told->all[told->count].has_message = message[0] != 0;
  told->all[told->count].thread = pthread_self();
  ++told->count;
  pthread_cond_signal(&told->changed);
  pthread_mutex_unlock(&told->mutex);
}

void await_told(struct told* told, size_t count) {
  pthread_mutex_lock(&told->mutex);
  while (told->count < count) pthread_cond_wait(&told->changed, &told->mutex);
  pthread_mutex_unlock(&told->mutex);
}

void all_told_well(const struct told* told, size_t keys, uint64_t rounds) {
  uint64_t last[4] = {0, 0, 0, 0};
  size_t i;
  CHECK(keys <= sizeof last / sizeof last[0] && told->count == keys * rounds);
  for (i = 0; i < told->count; ++i) {
    CHECK(told->all[i].key < keys && told->all[i].round == ++last[told->all[i].key]);
    CHECK(told->all[i].code == PHUB_OK && !told->all[i].has_message);
    CHECK(pthread_equal(told->all[i].thread, told->all[0].thread));
    CHECK(!pthread_equal(told->all[i].thread, pthread_self()));
  }
}

phub_options* plain_options(const char* job, int rank, int ranks) {
  phub_options* options = NULL;
  OK(phub_options_from_environment(&options));
  OK(phub_options_set(options, "server", server));
  OK(phub_options_set(options, "job", job));
  OK(phub_options_set_number(options, "world_size", ranks));
  OK(phub_options_set_number(options, "rank", rank));
  return options;
}

phub_options* options_of(const char* job, int rank, int ranks) {
  static const uint64_t shape[2] = {kLarge / 8, 8};
  phub_options* options = plain_options(job, rank, ranks);
  OK(phub_options_add_key(options, "small", kSmall));
  OK(phub_options_add_shaped_key(options, "large", shape, 2));
  OK(phub_options_tune_key(options, 1, -1, 0.5, 1.0));
  OK(phub_options_set_group(options, 1, 1));
  return options;
}

phub_worker* join(phub_options* options) {
  phub_worker* worker = NULL;
  OK(phub_worker_create(options, &worker));
  OK(phub_options_destroy(options));
  return worker;
}

static void fill(phub_worker* worker, size_t key, float value) {
  void* memory = NULL;
  size_t bytes = 0, i;
  OK(phub_gradient(worker, key, &memory, &bytes));
  CHECK(bytes == sizeof(float) * (key == 0 ? kSmall : kLarge));
  for (i = 0; i < bytes / sizeof(float); ++i) ((float*)memory)[i] = value;
}

static void expect(phub_worker* worker, size_t key, float value) {
  const void* memory = NULL;
  size_t bytes = 0, i;
  OK(phub_parameters(worker, key, &memory, &bytes));
  for (i = 0; i < bytes / sizeof(float); ++i) CHECK(((const float*)memory)[i] == value);
}

/* Rank r's gradient is r + 1 in every round, the mean 1.5; sgd with lr 2 from parameters of 100,
 * half of it for the large key, and lr 4 from round 4 on. */
static void train(int rank) {
  phub_options* options = options_of("train", rank, kRanks);
  phub_worker* worker;
  float* initial = NULL;
  const float* of_key[2];
  float small = 100, large = 100;
  size_t i, key = 99;
  uint64_t elements = 0;
  int round;
  phub_info info = {sizeof info, 0, 0, 0, 0, 0, 0};
  phub_stats stats = {sizeof stats, 0, 0, 0, 0, 0, 0};
  OK(phub_options_set(options, "optimizer", "sgd"));
  OK(phub_options_set(options, "reduction", "mean"));
  OK(phub_options_set(options, "initial", "broadcast"));
  OK(phub_options_set_hyper(options, "lr", 2.0));
  OK(phub_options_schedule_hyper(options, 4, "lr", 4.0));
  worker = join(options);
  OK(phub_worker_info(worker, &info));
  CHECK(info.rank == (uint32_t)rank && info.world_size == kRanks && info.keys == 2);
  CHECK(info.first_round == 1);
  OK(phub_key_by_name(worker, "large", &key));
  CHECK(key == 1);
  OK(phub_key_info(worker, 1, NULL, &elements));
  CHECK(elements == kLarge);
  if (rank == 0) {
    FAILS(phub_push(worker, 0, 0), PHUB_INVALID, "broadcast");
    initial = malloc(sizeof(float) * (kSmall + kLarge));
    CHECK(initial != NULL);
    for (i = 0; i < kSmall + kLarge; ++i) initial[i] = 100;
    of_key[0] = initial + kLarge;
    of_key[1] = initial;
    FAILS(phub_broadcast(worker, initial, 3), PHUB_INVALID, "3 initial");
    FAILS(phub_broadcast_keys(worker, of_key, 1), PHUB_INVALID, "of 1 keys");
    FAILS(phub_broadcast_keys(worker, NULL, 2), PHUB_INVALID, "initial is null");
    OK(phub_broadcast_keys(worker, of_key, 2));
    memset(initial, 0, sizeof(float) * (kSmall + kLarge));
    free(initial);
  } else {
    OK(phub_broadcast(worker, NULL, 0));
  }
  expect(worker, 0, small);
  expect(worker, 1, large);
  for (round = 1; round <= kRounds; ++round) {
    uint64_t done = 0;
    fill(worker, 0, (float)(rank + 1));
    fill(worker, 1, (float)(rank + 1));
    OK(phub_push(worker, 1, 0));
    OK(phub_push(worker, 0, 5));
    OK(phub_wait(worker, 0));
    OK(phub_wait_all(worker));
    small -= (round < 4 ? 2.0f : 4.0f) * 1.5f;
    large -= (round < 4 ? 1.0f : 2.0f) * 1.5f;
    expect(worker, 0, small);
    expect(worker, 1, large);
    OK(phub_round(worker, 1, &done));
    CHECK(done == (uint64_t)round);
  }
  OK(phub_worker_stats(worker, &stats));
  CHECK(stats.pushes == 2 * kRounds && stats.chunks_pushed == stats.chunks_received - 4);
  OK(phub_remark(worker, "rate", "0.1"));
  FAILS(phub_remark(worker, "", "0.1"), PHUB_INVALID, "subject");
  FAILS(phub_remark(worker, "rate", NULL), PHUB_INVALID, "text is null");
  OK(phub_barrier(worker));
  OK(phub_leave(worker));
  FAILS(phub_push(worker, 0, 0), PHUB_FENCED, "has left");
  OK(phub_worker_destroy(worker));
}

/* The state of both keys, got in one job and set in another, which then goes on as the first. */
static void states(void) {
  static float got[2][3][kLarge], again[2][3][kLarge];
  static const size_t keys[2] = {1, 0};
  float *into[6], *into_again[6];
  const float* from[6];
  uint64_t steps[2] = {0, 0}, steps_again[2], round = 0;
  phub_worker* worker[2];
  const char* name = NULL;
  const void* parameters[2];
  size_t i, key, bytes;
  int job;
  for (i = 0; i < 6; ++i) {
    from[i] = into[i] = got[i / 3][i % 3];
    into_again[i] = again[i / 3][i % 3];
  }
  for (job = 0; job < 2; ++job) {
    phub_options* options = options_of(job == 0 ? "state" : "other", 0, 1);
    OK(phub_options_set(options, "optimizer", "adam"));
    worker[job] = join(options);
  }
  OK(phub_state_name(worker[0], 0, &name));
  CHECK(strcmp(name, "exp_avg") == 0);
  OK(phub_state_name(worker[0], 1, &name));
  CHECK(strcmp(name, "exp_avg_sq") == 0);
  FAILS(phub_state_name(worker[0], 2, &name), PHUB_NOT_FOUND, "keeps 2 states");
  for (i = 1; i <= 3; ++i) {
    for (key = 0; key < 2; ++key) {
      fill(worker[0], key, (float)i);
      OK(phub_push(worker[0], key, 0));
    }
    OK(phub_wait_all(worker[0]));
  }
  OK(phub_get_state(worker[0], keys, 2, into, steps, &round));
  CHECK(round == 3 && steps[0] == 3 && steps[1] == 3);
  OK(phub_parameters(worker[0], 1, &parameters[0], &bytes));
  CHECK(memcmp(parameters[0], got[0][0], bytes) == 0 && got[1][2][kSmall - 1] != 0);
  OK(phub_set_state(worker[1], keys, 2, from, steps, &round));
  CHECK(round == 1);
  FAILS(phub_set_state(worker[1], keys, 2, from, steps, NULL), PHUB_TAKEN, "is not taken up");
  OK(phub_get_state(worker[1], keys, 2, into_again, steps_again, NULL));
  CHECK(memcmp(got, again, sizeof got) == 0 && steps_again[0] == 3);
  for (job = 0; job < 2; ++job) {
    for (key = 0; key < 2; ++key) {
      fill(worker[job], key, 5);
      OK(phub_push(worker[job], key, 0));
    }
    OK(phub_wait_all(worker[job]));
  }
  for (key = 0; key < 2; ++key) {
    for (job = 0; job < 2; ++job) OK(phub_parameters(worker[job], key, &parameters[job], &bytes));
    CHECK(memcmp(parameters[0], parameters[1], bytes) == 0);
  }
  into[5] = NULL;
  FAILS(phub_get_state(worker[0], keys, 2, into, NULL, NULL), PHUB_INVALID, "an array is null");
  FAILS(phub_get_state(worker[0], NULL, 2, into, NULL, NULL), PHUB_INVALID, "keys is null");
  FAILS(phub_set_state(worker[0], keys, 2, from, NULL, NULL), PHUB_INVALID, "steps is null");
  FAILS(phub_checkpoint(worker[0], &round), PHUB_INVALID, "--checkpoints");
  FAILS(phub_checkpoint(worker[0], NULL), PHUB_INVALID, "round is null");
  FAILS(phub_await_checkpoint(worker[0], 1, 10), PHUB_INVALID, "--checkpoints");
  for (job = 0; job < 2; ++job) OK(phub_worker_destroy(worker[job]));
}

/* Own memory, completions, polling, null gradients. All-reduce of one rank. */
static void exchange_alone(void) {
  static float gradient[kSmall], sum[kSmall], copy[kSmall];
  phub_key_memory memory;
  struct told told = NOTHING_TOLD;
  phub_worker* worker = join(options_of("alone", -1, 1));
  phub_job job;
  size_t outstanding = 1, i;
  int ready = 0, round;
  char text[16];
  OK(phub_use_memory(worker, 0, gradient, sum));
  for (round = 1; round <= kRounds; ++round) {
    for (i = 0; i < kSmall; ++i) gradient[i] = (float)(round + (int)i);
    fill(worker, 1, (float)round);
    OK(phub_push_then(worker, 0, 0, tell, &told));
    OK(phub_push_then(worker, 1, 0, tell, &told));
    await_told(&told, 2 * (size_t)round);
    all_told_well(&told, 2, (uint64_t)round);
    CHECK(memcmp(gradient, sum, sizeof sum) == 0);
    expect(worker, 1, (float)round);
  }
  OK(phub_push_null(worker, 0));
  while (!ready) OK(phub_try_wait(worker, 0, &ready));
  CHECK(sum[0] == 0 && sum[kSmall - 1] == 0);
  memset(&memory, 0, sizeof memory);
  FAILS(phub_register_memory(worker, 0, &memory), PHUB_INVALID, "sizeof");
  memory.size = sizeof memory - 1;
  FAILS(phub_register_memory(worker, 0, &memory), PHUB_INVALID, "sizeof");
  memory.size = sizeof memory;
  memory.gradient = gradient;
  memory.parameters = copy;
  memory.gradient_scale = 0.5f;
  OK(phub_register_memory(worker, 0, &memory));
  OK(phub_push(worker, 0, 0));
  OK(phub_wait(worker, 0));
  for (i = 0; i < kSmall; ++i) CHECK(copy[i] == gradient[i] / 2);
  memory.parameter_dtype = "f8";
  FAILS(phub_register_memory(worker, 0, &memory), PHUB_INVALID, "'f8'");
  OK(phub_use_memory(worker, 0, NULL, NULL));
  fill(worker, 0, 3);
  OK(phub_push(worker, 0, 0));
  while (outstanding > 0) OK(phub_poll(worker, &outstanding));
  FAILS(phub_pull(worker, 0, copy, 3), PHUB_INVALID, "28 bytes");
  OK(phub_pull(worker, 0, copy, sizeof copy));
  CHECK(copy[0] == 3 && copy[kSmall - 1] == 3);
  OK(phub_worker_connection(worker, text, sizeof text));
  CHECK(strlen(text) >= 3 && strlen(text) < sizeof text);

  memset(&job, 0, sizeof job);
  job.size = sizeof job;
  do { /* the last acknowledgements may be on their way */
    OK(phub_job_status(server, "alone", &job));
  } while (job.completed_round < kRounds);
  CHECK(strcmp(job.state, "running") == 0 && job.keys == 2 && job.elements == kSmall + kLarge);
  CHECK(job.ranks_live == 1 && job.ranks_lost == 0);
  FAILS(phub_job_status(server, "nobody", &job), PHUB_NOT_FOUND, "nobody");
  OK(phub_job_remove(server, "alone"));
  while (phub_job_remove(server, "alone") == PHUB_OK) { /* the cores still let go of it */
  }
  FAILS(phub_job_remove(server, "alone"), PHUB_NOT_FOUND, "alone");
  CHECK(phub_wait(worker, 0) == PHUB_OK); /* its result had come */
  OK(phub_worker_destroy(worker));
}

/* Rounds that are applied as a whole: the second one is not finite. */
static void gated(void) {
  phub_options* options = options_of("gated", 0, 1);
  phub_round_verdict verdict = {sizeof verdict, 9, 9, 9};
  phub_worker* worker;
  double square;
  int round;
  OK(phub_options_set(options, "optimizer", "sgd"));
  OK(phub_options_set(options, "on_nonfinite", "skip"));
  OK(phub_options_set_hyper(options, "lr", 1));
  OK(phub_options_set_hyper(options, "max_norm", 1e9));
  worker = join(options);
  OK(phub_verdict(worker, &verdict));
  CHECK(verdict.round == 0 && verdict.norm == 0 && verdict.skipped == 0);
  for (round = 1; round <= 2; ++round) {
    fill(worker, 0, round == 1 ? 1 : HUGE_VALF);
    fill(worker, 1, 0);
    OK(phub_push(worker, 0, 0));
    OK(phub_push(worker, 1, 0));
    OK(phub_wait_all(worker));
    OK(phub_verdict(worker, &verdict));
    CHECK(verdict.round == (uint64_t)round && verdict.skipped == (round == 2));
    square = verdict.norm * verdict.norm / kSmall;
    if (round == 1) CHECK(square > 1 - 1e-9 && square < 1 + 1e-9);
    expect(worker, 0, -1);
  }
  verdict.size = 0;
  FAILS(phub_verdict(worker, &verdict), PHUB_INVALID, "sizeof");
  OK(phub_worker_destroy(worker));
}

/* A branch with twice the rate runs in round 3 and is gone then. */
static void branches(void) {
  static const char* const name = "lr";
  static const char* const batch_name = "batch";
  static const double twice = 2, thirty_two = 32;
  static const float want[] = {-1, -2, -2, -3};
  phub_options* options = options_of("branches", 0, 1);
  phub_branch all[3];
  phub_worker* worker;
  uint32_t child = 9, turns[3] = {1, 0, 5}, running = 9, run[2];
  uint64_t rounds[3] = {1, 0, 0}, at = 3, starts[2], batch = 9;
  size_t count = 9;
  int round;
  OK(phub_options_set(options, "optimizer", "sgd"));
  OK(phub_options_set_hyper(options, "lr", 1));
  OK(phub_options_set_number(options, "branches", 1));
  worker = join(options);
  OK(phub_fork(worker, 0, &name, &twice, 1, &at, &child));
  CHECK(child == 1 && at == 3);
  FAILS(phub_fork(worker, 0, NULL, NULL, 0, NULL, &child), PHUB_FULL, "no room");
  FAILS(phub_fork(worker, 0, NULL, NULL, 1, NULL, &child), PHUB_INVALID, "names");
  FAILS(phub_fork(worker, 0, NULL, NULL, 0, NULL, NULL), PHUB_INVALID, "child");
  FAILS(phub_schedule(worker, turns, rounds, 1, NULL), PHUB_INVALID, "turns[0].rounds");
  FAILS(phub_schedule(worker, turns + 2, rounds + 2, 1, NULL), PHUB_NOT_FOUND, "branch 5");
  FAILS(phub_schedule(worker, turns, rounds, 257, NULL), PHUB_INVALID, "at most 256");
  OK(phub_schedule(worker, turns, rounds, 2, &at));
  CHECK(at == 3);
  OK(phub_branch_runs(worker, starts, run, 2, &count));
  CHECK(count == 3 && starts[0] <= 1 && run[0] == 0 && starts[1] == 3 && run[1] == 1);
  FAILS(phub_branch_runs(worker, NULL, run, 2, &count), PHUB_INVALID, "rounds");
  FAILS(phub_branch_runs(worker, starts, NULL, 2, &count), PHUB_INVALID, "branches");
  for (round = 1; round <= 4; ++round) {
    OK(phub_branch_in(worker, (uint64_t)round, &running));
    CHECK(running == (round == 3));
    fill(worker, 0, 1);
    fill(worker, 1, 0);
    OK(phub_push(worker, 0, 0));
    OK(phub_push(worker, 1, 0));
    OK(phub_wait_all(worker));
    expect(worker, 0, want[round - 1]); /* of the branch that runs next */
  }
  OK(phub_set_hyper(worker, &name, &twice, 1, NULL)); /* then the server knows the round */
  OK(phub_report_loss(worker, 0.5, 0));
  OK(phub_report_named_loss(worker, "validation", 0.75, 0));
  FAILS(phub_report_named_loss(worker, NULL, 0.75, 0), PHUB_INVALID, "name");
  FAILS(phub_report_named_loss(worker, "two words", 0.75, 0), PHUB_INVALID, "two words");
  OK(phub_branches(worker, all, 1, &count));
  CHECK(count == 2 && all[0].branch == 0 && all[0].runs == 1 && all[0].round == 0);
  OK(phub_branches(worker, all, 3, &count));
  CHECK(count == 2 && all[1].branch == 1 && all[1].parent == 0 && all[1].round == 3);
  CHECK(all[1].rounds == 3 && all[1].runs == 0);
  OK(phub_branch_values(worker, 1, NULL, NULL, 0, &count)); /* the server's optimizer has them */
  CHECK(count == 0);
  FAILS(phub_branch_values(worker, 9, NULL, NULL, 0, &count), PHUB_NOT_FOUND, "no branch 9");
  FAILS(phub_branch_values(worker, 1, NULL, NULL, 1, &count), PHUB_INVALID, "names");
  OK(phub_set_hyper(worker, &batch_name, &thirty_two, 1, NULL));
  OK(phub_batch_in(worker, 100, &batch));
  CHECK(batch == 32);
  FAILS(phub_batch_in(worker, 100, NULL), PHUB_INVALID, "samples");
  OK(phub_branches(worker, all, 3, &count));
  CHECK(all[0].batch == 32 && all[1].batch == 0);
  FAILS(phub_discard(worker, 0, NULL), PHUB_INVALID, "schedule another");
  FAILS(phub_kill(worker, 1, NULL), PHUB_INVALID, "keeps no checkpoints");
  FAILS(phub_revive(worker, 1, NULL), PHUB_INVALID, "not killed");
  CHECK(all[1].killed == 0);
  OK(phub_discard(worker, 1, NULL));
  OK(phub_branches(worker, NULL, 0, &count));
  CHECK(count == 1);
  OK(phub_worker_destroy(worker));
}

/* A matrix of 3 x 2, of which factors are sent. */
static void factors(void) {
  static const uint64_t shape[2] = {3, 2};
  static const float left[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, right[] = {1, -1, 2, 0, 5, 5};
  static const float want[] = {9, -1, 12, -2, 15, -3};
  phub_options* options = plain_options("factors", 0, 1);
  phub_worker* worker;
  const void* parameters = NULL;
  void* gradient = NULL;
  size_t bytes = 0;
  OK(phub_options_add_shaped_key(options, "m", shape, 2));
  OK(phub_options_add_key(options, "v", 5));
  OK(phub_options_set_rank_limit(options, 0, 2));
  worker = join(options);
  OK(phub_wait_all(worker));
  OK(phub_push_factors(worker, 0, left, right, 2, 0));
  OK(phub_wait(worker, 0));
  OK(phub_parameters(worker, 0, &parameters, &bytes));
  CHECK(bytes == sizeof want && memcmp(parameters, want, sizeof want) == 0);
  FAILS(phub_push_factors(worker, 0, left, right, 3, 0), PHUB_INVALID, "rank_limit is 2");
  FAILS(phub_push_factors(worker, 0, left, NULL, 1, 0), PHUB_INVALID, "null");
  FAILS(phub_push_factors(worker, 1, left, right, 1, 0), PHUB_INVALID, "sent as it is");
  FAILS(phub_push_factors(worker, 2, left, right, 1, 0), PHUB_INVALID, "out of range");
  FAILS(phub_push(worker, 0, 0), PHUB_INVALID, "push_factors");
  FAILS(phub_gradient(worker, 0, &gradient, &bytes), PHUB_INVALID, "no memory for its gradient");
  OK(phub_push_factors(worker, 0, NULL, NULL, 0, 0));
  OK(phub_wait(worker, 0));
  OK(phub_parameters(worker, 0, &parameters, &bytes));
  CHECK(((const float*)parameters)[0] == 0);
  OK(phub_worker_destroy(worker));
}

/* The shortest round: of a large matrix of few samples the factors go, others whole. */
static void choices(void) {
  static const size_t rows[] = {10, 1000, 5}, columns[] = {1, 1000, 5}, samples[] = {0, 10, 100};
  static const size_t nothing[] = {0}, many[] = {(size_t)1 << 33};
  static const double long_s[] = {1, 0, 1}, never_s[] = {INFINITY, NAN, -1};
  unsigned char as_factors[3] = {7, 7, 7};
  double seconds[2];
  OK(phub_choose_factors(2, 1, 2, 1000, 3, rows, columns, samples, NULL, as_factors, seconds));
  CHECK(as_factors[0] == 0 && as_factors[1] == 1 && as_factors[2] == 0);
  CHECK(fabs(seconds[0] - 32.00112e-3) < 1e-9);          /* 1,000,035 elements */
  CHECK(fabs(seconds[1] - (1.28112e-3 + 40e-6)) < 1e-9); /* 2 x 10 x 2,000 and 35; products */
  OK(phub_choose_factors(2, 1, 2, 1, 3, rows, columns, samples, long_s, as_factors, seconds));
  CHECK(as_factors[1] == 0); /* hidden, and its products would not be shorter */
  CHECK(fabs(seconds[0] - 2 - 25 * 32e-9) < 1e-9 && seconds[1] == seconds[0]);
  OK(phub_choose_factors(2, 1, 2, 1, 3, rows, columns, samples, NULL, as_factors, NULL));
  OK(phub_choose_factors(2, 1, 2, 1, 0, rows, columns, samples, NULL, as_factors, NULL));
  FAILS(phub_choose_factors(0, 1, 2, 1, 3, rows, columns, samples, NULL, as_factors, NULL),
        PHUB_INVALID, "number of ranks");
  FAILS(phub_choose_factors(2, 1, -2, 1, 3, rows, columns, samples, NULL, as_factors, NULL),
        PHUB_INVALID, "all NICs");
  FAILS(phub_choose_factors(2, 1, 2, 1, 3, rows, columns, NULL, NULL, as_factors, NULL),
        PHUB_INVALID, "samples");
  for (size_t i = 0; i < sizeof never_s / sizeof *never_s; ++i) {
    const double wrong_s[3] = {1, 0, never_s[i]};
    FAILS(phub_choose_factors(2, 1, 2, 1, 3, rows, columns, samples, wrong_s, as_factors, NULL),
          PHUB_INVALID, "backward_s of key 2");
  }
  FAILS(phub_choose_factors(2, 1, 2, 1, 1, nothing, columns, samples, NULL, as_factors, NULL),
        PHUB_INVALID, "key 0 has 0 rows");
  FAILS(phub_choose_factors(2, 1, 2, 1, 1, rows, nothing, samples, NULL, as_factors, NULL),
        PHUB_INVALID, "rows of 0 elements");
  FAILS(phub_choose_factors(2, 1, 2, 1, 1, many, many, samples, NULL, as_factors, NULL),
        PHUB_INVALID, "at most");
  /* At the box, whose 8 chunks of 128 rows get all right vectors: where results have few bits. */
  OK(phub_choose_box_factors(2, 1, 2, 4, 1000, 4, 3, rows, columns, samples, NULL, as_factors,
                             seconds));
  CHECK(as_factors[1] == 0 && seconds[0] == seconds[1]);
  OK(phub_choose_box_factors(2, 1, 2, 4, 1000, 0.25, 3, rows, columns, samples, NULL, as_factors,
                             seconds));
  CHECK(as_factors[0] == 0 && as_factors[1] == 1 && as_factors[2] == 0);
  CHECK(fabs(seconds[1] - ((360032 + 140) * 8e-9 + 0.256 * 40e-6)) < 1e-9);
  FAILS(
      phub_choose_box_factors(2, 1, 2, 4, 0, 1, 3, rows, columns, samples, NULL, as_factors, NULL),
      PHUB_INVALID, "must be");
  FAILS(phub_choose_box_factors(2, 1, 2, 0, 1000, 1, 3, rows, columns, samples, NULL, as_factors,
                                NULL),
        PHUB_INVALID, "box_cores: must be");
  as_factors[1] = 1;
  OK(phub_choose_factors(2, 1e-320, 2, 1, 3, rows, columns, samples, NULL, as_factors, seconds));
  CHECK(as_factors[1] == 0 && isinf(seconds[0]) && isinf(seconds[1])); /* nothing comes through */
}

/* A table of 4 x 2, of whose gradient rows are sent. */
static void rows(void) {
  static const uint64_t shape[2] = {4, 2};
  static const int64_t indices[] = {3, 0, 3}, beyond[] = {4};
  static const float elements[] = {1, 2, 3, 4, 5, 6};
  static const float want[] = {-3, -4, 0, 0, 0, 0, -6, -8};
  phub_options* options = plain_options("rows", 0, 1);
  phub_worker* worker;
  const void* parameters = NULL;
  void* gradient = NULL;
  size_t bytes = 0;
  OK(phub_options_set(options, "optimizer", "sgd"));
  OK(phub_options_set_hyper(options, "lr", 1));
  OK(phub_options_add_shaped_key(options, "t", shape, 2));
  OK(phub_options_add_key(options, "v", 5));
  OK(phub_options_set_rows_limit(options, 0, 2, 1));
  worker = join(options);
  OK(phub_wait_all(worker));
  OK(phub_push_rows(worker, 0, indices, elements, 3, 0));
  OK(phub_wait(worker, 0));
  OK(phub_parameters(worker, 0, &parameters, &bytes));
  CHECK(bytes == sizeof want && memcmp(parameters, want, sizeof want) == 0);
  FAILS(phub_push_rows(worker, 0, beyond, elements, 1, 0), PHUB_INVALID, "no row 4");
  FAILS(phub_push_rows(worker, 0, NULL, elements, 1, 0), PHUB_INVALID, "indices is null");
  FAILS(phub_push_rows(worker, 0, indices, NULL, 1, 0), PHUB_INVALID, "elements is null");
  FAILS(phub_push_rows(worker, 0, indices, elements, SIZE_MAX / 4, 0), PHUB_INVALID, "rows are");
  FAILS(phub_push_rows(worker, 1, indices, elements, 1, 0), PHUB_INVALID, "all rows are sent");
  FAILS(phub_push_rows(worker, 2, indices, elements, 1, 0), PHUB_INVALID, "out of range");
  FAILS(phub_push_copy(worker, 0, elements, sizeof elements, 0), PHUB_INVALID, "rows are sent");
  FAILS(phub_push_copy(worker, 1, elements, 19, 0), PHUB_INVALID, "has 20 bytes");
  FAILS(phub_push_copy(worker, 1, NULL, 20, 0), PHUB_INVALID, "gradient is null");
  OK(phub_push_copy(worker, 1, elements, 20, 0));
  OK(phub_wait(worker, 1));
  OK(phub_parameters(worker, 1, &parameters, &bytes));
  CHECK(bytes == 20 && ((const float*)parameters)[4] == -elements[4]);
  FAILS(phub_push(worker, 0, 0), PHUB_INVALID, "push_rows");
  FAILS(phub_gradient(worker, 0, &gradient, &bytes), PHUB_INVALID, "no memory for its gradient");
  OK(phub_push_rows(worker, 0, NULL, NULL, 0, 0));
  OK(phub_wait(worker, 0));
  OK(phub_parameters(worker, 0, &parameters, &bytes));
  CHECK(memcmp(parameters, want, sizeof want) == 0);
  OK(phub_worker_destroy(worker));
}

/* Of a key of two chunks this rank writes the first, and reads the second. */
static void interest(void) {
  static const phub_range writes[] = {{0, 1}}, reads[] = {{32, 33}}, beyond[] = {{60, 65}};
  phub_options* options = plain_options("interest", 0, 1);
  phub_worker* worker;
  const void* parameters = NULL;
  void* gradient = NULL;
  size_t bytes = 0, i;
  phub_stats stats = {sizeof stats, 0, 0, 0, 0, 0, 0, 0};
  OK(phub_options_set_number(options, "chunk_elements", 32));
  OK(phub_options_add_key(options, "t", 64));
  OK(phub_options_add_key(options, "none", 64));
  FAILS(phub_options_set_interest(options, 2, NULL, 0, NULL, 0), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_interest(options, 0, NULL, 1, NULL, 0), PHUB_INVALID, "writes is null");
  FAILS(phub_options_set_interest(options, 0, NULL, 0, NULL, 1), PHUB_INVALID, "reads is null");
  FAILS(phub_options_set_interest(options, 0, NULL, 0, beyond, 1), PHUB_INVALID, "64 elements");
  OK(phub_options_set_interest(options, 0, NULL, 0, NULL, 0));
  OK(phub_options_set_interest(options, 0, writes, 1, reads, 1));
  OK(phub_options_set_interest(options, 1, NULL, 0, NULL, 0));
  worker = join(options);
  OK(phub_wait_all(worker));
  OK(phub_gradient(worker, 0, &gradient, &bytes));
  for (i = 0; i < 64; ++i) ((float*)gradient)[i] = 3;
  OK(phub_push(worker, 0, 0));
  OK(phub_wait(worker, 0));
  OK(phub_parameters(worker, 0, &parameters, &bytes));
  CHECK(((const float*)parameters)[32] == 0);
  OK(phub_worker_stats(worker, &stats));
  CHECK(stats.chunks_pushed == 2);
  FAILS(phub_push(worker, 1, 0), PHUB_INVALID, "neither write nor read");
  OK(phub_worker_destroy(worker));
}

/* What a wrong call gets. */
static void misuse(void) {
  static const uint64_t shape[9] = {kSmall, 2, 0};
  phub_options* options = options_of("misuse", 0, 1);
  phub_worker *worker = NULL, *other = NULL;
  const char* name = NULL;
  uint64_t elements = 0;
  void* memory = NULL;
  size_t key = 0;
  int status = 0;
  pid_t child;
  phub_info info = {0, 0, 0, 0, 0, 0, 0};
  FAILS(phub_options_set(options, "job_name", "x"), PHUB_INVALID, "no option 'job_name'");
  FAILS(phub_options_set(options, "world-size", "2"), PHUB_INVALID, "'world_size'?");
  FAILS(phub_options_set(options, "world_size", "two"), PHUB_INVALID, "'two'");
  FAILS(phub_options_set(options, "work", "none"), PHUB_INVALID,
        "work: must be one of all, sum, got 'none'");
  FAILS(phub_options_set_number(options, "world_size", -1), PHUB_INVALID, "got -1");
  FAILS(phub_options_set(options, NULL, "2"), PHUB_INVALID, "name is null");
  FAILS(phub_options_set(options, "job", NULL), PHUB_INVALID, "value is null");
  FAILS(phub_options_set(NULL, "job", "x"), PHUB_BAD_HANDLE, "null");
  FAILS(phub_options_add_shaped_key(options, "s", NULL, 1), PHUB_INVALID, "shape is null");
  FAILS(phub_options_add_shaped_key(options, "s", shape, 0), PHUB_INVALID, "1 to 8 dimensions");
  FAILS(phub_options_add_shaped_key(options, "s", shape, 9), PHUB_INVALID, "not 9");
  FAILS(phub_options_add_shaped_key(options, "s", shape, 3), PHUB_INVALID, "[7, 2, 0] has no");
  FAILS(phub_options_tune_key(options, 2, 0, 1, 1), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_rank_limit(options, 2, 1), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_rank_limit(options, 1, 1 << 20), PHUB_INVALID, "from 0 to 1048575");
  FAILS(phub_options_set_rows_limit(options, 2, 1, 0), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_rows_limit(options, 1, 1 << 20, 0), PHUB_INVALID, "from 0 to 1048575");
  FAILS(phub_options_set_group(options, 2, 0), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_group(options, 1, 256), PHUB_INVALID, "groups 0 to 255");
  FAILS(phub_options_set_fragment(options, 2, 0), PHUB_INVALID, "out of range");
  FAILS(phub_options_set_fragment(options, 1, 256), PHUB_INVALID, "fragments 0 to 255");
  FAILS(phub_worker_create(options, NULL), PHUB_INVALID, "worker is null");
  OK(phub_options_set(options, "groups", "1,1"));
  FAILS(phub_worker_create(options, &other), PHUB_INVALID, "groups: '1,1' has more than 1 ranks");
  OK(phub_options_set(options, "groups", "1"));
  OK(phub_worker_create(options, &worker));
  FAILS(phub_worker_create(options, &other), PHUB_TAKEN, "rank 0");
  CHECK(other == NULL);

  FAILS(phub_push(worker, 2, 0), PHUB_INVALID, "2 keys");
  FAILS(phub_wait(worker, (size_t)-1), PHUB_INVALID, "out of range");
  FAILS(phub_gradient(worker, 0, NULL, NULL), PHUB_INVALID, "memory is null");
  FAILS(phub_key_by_name(worker, "medium", &key), PHUB_NOT_FOUND, "medium");
  FAILS(phub_push_then(worker, 0, 0, NULL, NULL), PHUB_INVALID, "completion");
  FAILS(phub_broadcast(worker, NULL, 5), PHUB_INVALID, "initial is null");
  FAILS(phub_set_hyper(worker, NULL, NULL, 1, NULL), PHUB_INVALID, "names");
  FAILS(phub_get_state(worker, &key, 1, NULL, NULL, NULL), PHUB_INVALID, "arrays is null");
  FAILS(phub_worker_info(worker, &info), PHUB_INVALID, "sizeof");
  info.size = sizeof(size_t) + sizeof(uint32_t); /* an older program */
  info.incarnation = 77;
  OK(phub_worker_info(worker, &info));
  CHECK(info.incarnation == 77);
  OK(phub_key_info(worker, 1, &name, &elements));
  CHECK(strcmp(name, "large") == 0 && elements == kLarge);

  FAILS(phub_push((phub_worker*)options, 0, 0), PHUB_BAD_HANDLE, "a phub_worker is needed");
  FAILS(phub_options_set((phub_options*)worker, "rank", "0"), PHUB_BAD_HANDLE, "phub_options");
  FAILS(phub_wait((phub_worker*)&status, 0), PHUB_BAD_HANDLE, "never made");
  fflush(NULL);
  child = fork();
  if (child == 0) {
    const int refused = phub_wait(worker, 0) == PHUB_WRONG_THREAD &&
                        phub_worker_destroy(worker) == PHUB_WRONG_THREAD &&
                        phub_options_create(&options) == PHUB_OK &&
                        phub_options_destroy(options) == PHUB_OK;
    _exit(refused ? 0 : 1);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(phub_push(worker, 0, 0));
  OK(phub_wait(worker, 0));

  OK(phub_options_destroy(options));
  FAILS(phub_options_destroy(options), PHUB_BAD_HANDLE, "was destroyed");
  OK(phub_worker_destroy(worker));
  FAILS(phub_wait(worker, 0), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_gradient(worker, 0, &memory, NULL), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_worker_destroy(worker), PHUB_BAD_HANDLE, "was destroyed");
  FAILS(phub_job_status("nowhere", "x", NULL), PHUB_INVALID, "status is null");
  CHECK(memory == NULL);
  CHECK(strcmp(phub_code_name(PHUB_RANK_LOST), "rank_lost") == 0);
  CHECK(strcmp(phub_code_name(99), "unknown") == 0);
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  CHECK(phub_abi_version() == PHUB_ABI_VERSION && phub_version()[0] != 0);
  CHECK(phub_last_error()[0] == 0);
  start_server(argv[1]);
  each_rank(kRanks, train);
  exchange_alone();
  states();
  gated();
  branches();
  factors();
  choices();
  rows();
  interest();
  misuse();
  check_threads();
  check_geeps();
  check_device();
  check_formats();
  stop_server();
  puts("ok");
  return 0;
}
