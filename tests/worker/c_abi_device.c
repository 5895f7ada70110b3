/* The keys on a device of phub.h; here on a device of host memory, whose caller is the stream. */
#include <math.h>

#include "tests/worker/c_abi_program.h"

enum { kRanks = 2, kRounds = 3 };

static phub_options* job_of(const char* name, int rank, int ranks) {
  phub_options* options = options_of(name, rank, ranks);
  OK(phub_options_set_number(options, "lease_ms", 60000));
  return options;
}

/* Sums of small integers, which are exact; from bf16 as well. */
static void exchange(int rank) {
  phub_worker* worker = join(job_of("device", rank, kRanks));
  phub_device* device = NULL;
  phub_device_keys* keys = NULL;
  static float sent[kRanks][kLarge], got[kRanks][kLarge];
  uint16_t bits[kSmall], result[kSmall];
  int round;
  size_t i;
  OK(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES, 0, 0, &device));
  OK(phub_device_keys_create(worker, device, &keys));
  OK(phub_device_close(device));
  FAILS(phub_push(worker, 0, 0), PHUB_INVALID, "exchanged by its phub_device_keys");
  FAILS(phub_use_memory(worker, 0, NULL, NULL), PHUB_INVALID, "its phub_device_keys");
  for (round = 1; round <= kRounds; ++round) {
    for (i = 0; i < kLarge; ++i) sent[rank][i] = (float)((int)(i % 9) + rank * round);
    for (i = 0; i < kSmall; ++i) bits[i] = 0x3F80; /* 1 */
    OK(phub_push_device(keys, 0, bits, "bf16", 3, 0, NULL));
    OK(phub_push_device(keys, 1, sent[rank], NULL, 0, 1, NULL));
    OK(phub_pull_device(keys, 1, got[rank], NULL, NULL));
    OK(phub_pull_device(keys, 0, result, "bf16", NULL));
    for (i = 0; i < kLarge; ++i) CHECK(got[rank][i] == (float)(2 * (int)(i % 9) + round));
    for (i = 0; i < kSmall; ++i) CHECK(result[i] == 0x40C0); /* 6 */
  }
  OK(phub_push_device(keys, 0, NULL, NULL, 0, 0, NULL));
  OK(phub_push_device(keys, 1, NULL, NULL, 0, 0, NULL));
  OK(phub_wait_device(keys));
  OK(phub_pull_device(keys, 1, got[rank], "f32", NULL));
  for (i = 0; i < kLarge; ++i) CHECK(got[rank][i] == 0);
  OK(phub_device_keys_destroy(keys));
  FAILS(phub_wait_device(keys), PHUB_BAD_HANDLE, "this phub_device_keys was destroyed");
  OK(phub_push(worker, 0, 0));
  OK(phub_wait(worker, 0));
  OK(phub_worker_destroy(worker));
}

static void misuse(void) {
  phub_worker* worker = join(job_of("device-misuse", 0, 1));
  phub_device *device = NULL, *small = NULL;
  phub_device_keys *keys = NULL, *more = NULL;
  static float values[kLarge];
  uint64_t bytes = 0;
  int nothing = 0;
  OK(phub_device_keys_bytes(worker, &bytes));
  CHECK(bytes == PHUB_DEVICE_KEYS_BYTES); /* no key is coded */
  FAILS(phub_device_keys_bytes(NULL, &bytes), PHUB_BAD_HANDLE, "phub_worker is null");
  FAILS(phub_device_keys_bytes(worker, NULL), PHUB_INVALID, "bytes is null");
  OK(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES, 0, 0, &device));
  OK(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES - 1, 0, 0, &small));
  FAILS(phub_device_keys_create(worker, NULL, &keys), PHUB_BAD_HANDLE, "phub_device is null");
  FAILS(phub_device_keys_create(NULL, device, &keys), PHUB_BAD_HANDLE, "phub_worker is null");
  FAILS(phub_device_keys_create(worker, device, NULL), PHUB_INVALID, "keys is null");
  FAILS(phub_device_keys_create(worker, small, &keys), PHUB_FULL, "budget");
  CHECK(keys == NULL);
  OK(phub_device_keys_create(worker, device, &keys));
  FAILS(phub_device_keys_create(worker, device, &more), PHUB_TAKEN, "has a phub_device_keys");
  FAILS(phub_push_device(keys, 2, values, NULL, 0, 0, NULL), PHUB_INVALID, "key 2");
  FAILS(phub_push_device(keys, 1, values, "f64", 0, 0, NULL), PHUB_INVALID, "dtype 'f64'");
  FAILS(phub_push_device(keys, 1, values, NULL, 0, 0, &nothing), PHUB_INVALID, "pass null");
  FAILS(phub_push_device(keys, 1, values, NULL, HUGE_VALF, 0, NULL), PHUB_INVALID, "not finite");
  FAILS(phub_pull_device(keys, 1, NULL, NULL, NULL), PHUB_INVALID, "result is null");
  FAILS(phub_push_device((phub_device_keys*)worker, 0, values, NULL, 0, 0, NULL), PHUB_BAD_HANDLE,
        "this is a phub_worker");
  FAILS(phub_rejoin(worker, NULL), PHUB_INVALID, "has a phub_device_keys");
  OK(phub_push_device(keys, 1, values, NULL, 0, 0, NULL));
  OK(phub_wait_device(keys));
  OK(phub_leave(worker));
  phub_push_device(keys, 1, values, NULL, 0, 0, NULL); /* may be taken still */
  FAILS(phub_wait_device(keys), PHUB_FENCED, "has left");
  FAILS(phub_push_device(keys, 1, values, NULL, 0, 0, NULL), PHUB_FENCED, "has left");
  OK(phub_device_keys_destroy(keys));
  OK(phub_worker_destroy(worker));
  OK(phub_device_close(device));
  OK(phub_device_close(small));
}

/* Factors instead of the gradient of the matrix, of 8 columns. */
static void factors(int rank) {
  phub_options* options = job_of("device-factors", rank, kRanks);
  phub_worker* worker;
  phub_device* device = NULL;
  phub_device_keys* keys = NULL;
  static float left[kRanks][2 * kLarge / 8], got[kRanks][kLarge];
  float right[16];
  int i;
  OK(phub_options_set_rank_limit(options, 1, 2));
  worker = join(options);
  OK(phub_device_open_host(PHUB_DEVICE_KEYS_BYTES, 0, 0, &device));
  OK(phub_device_keys_create(worker, device, &keys));
  for (i = 0; i < 2 * kLarge / 8; ++i) left[rank][i] = (float)(i % 5);
  for (i = 0; i < 16; ++i) right[i] = (float)(i + rank);
  FAILS(phub_push_factors_device(keys, 1, left[rank], right, 3, 0, NULL), PHUB_INVALID, "3 pairs");
  FAILS(phub_push_factors_device(keys, 0, left[rank], right, 1, 0, NULL), PHUB_INVALID, "small");
  OK(phub_push_factors_device(keys, 1, left[rank], right, 2, 0, NULL));
  OK(phub_pull_device(keys, 1, got[rank], NULL, NULL));
  for (i = 0; i < kLarge; ++i) {
    const int first = i / 8 % 5, second = (i / 8 + kLarge / 8) % 5, column = i % 8;
    CHECK(got[rank][i] == (float)(first * (2 * column + 1) + second * (2 * column + 17)));
  }
  OK(phub_device_keys_destroy(keys));
  OK(phub_device_close(device));
  OK(phub_worker_destroy(worker));
}

void check_device(void) {
  each_rank(kRanks, exchange);
  each_rank(kRanks, factors);
  misuse();
}
