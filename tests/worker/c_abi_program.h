/* What the parts of c_abi_program have in common. */
#ifndef PHUB_TESTS_WORKER_C_ABI_PROGRAM_H
#define PHUB_TESTS_WORKER_C_ABI_PROGRAM_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/phub.h"

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              phub_last_error());                                                             \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)
#define OK(call) CHECK((call) == PHUB_OK)
/* It fails with this code, and the message has these words. */
#define FAILS(call, code, words) CHECK((call) == (code) && strstr(phub_last_error(), (words)))

/* Numbers that several threads use. */
#define GET(number) __atomic_load_n(&(number), __ATOMIC_ACQUIRE)
#define ADD(number) __atomic_add_fetch(&(number), 1, __ATOMIC_ACQ_REL)

extern char server[128];
void sleep_ms(int ms);

/* Threads that each call `body` with a number from 0 on: ranks, mostly. */
struct threads {
  struct one {
    pthread_t thread;
    void (*body)(int number);
    int number;
  } all[4];
  int count;
};
void start_threads(struct threads* threads, int count, void (*body)(int number));
void join_threads(const struct threads* threads);
void each_rank(int ranks, void (*body)(int rank));

enum { kSmall = 7, kLarge = 20000 };
/* Of a job of `ranks` without keys, or with the keys "small" and "large". */
phub_options* plain_options(const char* job, int rank, int ranks);
phub_options* options_of(const char* job, int rank, int ranks);
/* Destroys the options. */
phub_worker* join(phub_options* options);

/* What completions said, in the order in which they did: `tell` is one, for a struct told. */
struct told {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  size_t count;
  struct {
    size_t key;
    uint64_t round;
    phub_code code;
    int has_message;
    pthread_t thread;
  } all[100];
};
#define NOTHING_TOLD                                          \
  {                                                           \
    PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, { \
      { 0, 0, 0, 0, 0 }                                       \
    }                                                         \
  }
void tell(void* told, size_t key, uint64_t round, phub_code code, const char* message);
void await_told(struct told* told, size_t count);
/* Each of the first `rounds` rounds of `keys` keys succeeded, was told of once, and in its order;
 * all on one thread that is not the caller's. */
void all_told_well(const struct told* told, size_t keys, uint64_t rounds);

void check_threads(void); /* c_abi_threads.c */
void check_geeps(void);   /* c_abi_geeps.c */
void check_device(void);  /* c_abi_device.c */
void check_formats(void); /* c_abi_formats.c */

#endif /* PHUB_TESTS_WORKER_C_ABI_PROGRAM_H */
