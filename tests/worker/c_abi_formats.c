/* Formats of gradients in phub.h: by patterns of names, and what memory has beside them. Values are
 * such that the formats hold them, or that their residuals are exact. */
#include "tests/worker/c_abi_program.h"

enum { kRanks = 2, kRounds = 3, kSmallest = 5, kTail = 12, kLeastTopK = 8 };

/* "small" and "tail" topk, "large" int8, "rest" the job's. */
static phub_options* job_of(const char* name, int rank, int ranks) {
  phub_options* options = options_of(name, rank, ranks);
  OK(phub_options_set(options, "gradient_dtype", "bf16"));
  OK(phub_options_set(options, "rounding", "stochastic")); /* which leaves all this alone */
  OK(phub_options_set_format(options, "*", "f16"));
  OK(phub_options_set_format(options, "large", "int8"));
  OK(phub_options_set_format(options, "sm?ll", "topk"));
  OK(phub_options_add_key(options, "rest", kSmallest)); /* nobody's pattern yet */
  OK(phub_options_add_key(options, "tail", kTail));
  OK(phub_options_set_format(options, "tail", "topk"));
  return options;
}

static void* gradient_of(phub_worker* worker, size_t key, size_t expected, const char* format) {
  const char* dtype = NULL;
  void* memory = NULL;
  size_t bytes = 0;
  OK(phub_gradient_dtype(worker, key, &dtype));
  CHECK(strcmp(dtype, format) == 0);
  OK(phub_gradient(worker, key, &memory, &bytes));
  CHECK(bytes == expected);
  return memory;
}

static const float* sum_of(phub_worker* worker, size_t key) {
  const void* memory = NULL;
  OK(phub_parameters(worker, key, &memory, NULL));
  return memory;
}

/* From -127 to 127 in every chunk. */
static int code_of(size_t i) { return (int)(i * 37 % 255) - 127; }

/* Each chunk's largest is 127 times a power of two, so int8 holds the rest. Of "tail" each round
 * sends the largest that are left, and "small" has no more than one sends. */
static void exchange(int rank) {
  phub_worker* worker = join(job_of("formats", rank, kRanks));
  static uint16_t half[kRanks][kLarge]; /* bf16 */
  float* large = gradient_of(worker, 1, kLarge * sizeof(float), "f32");
  float* small = gradient_of(worker, 0, kSmall * sizeof(float), "f32");
  float* tail = gradient_of(worker, 3, kTail * sizeof(float), "f32");
  uint16_t* rest = gradient_of(worker, 2, kSmallest * sizeof(uint16_t), "bf16");
  phub_key_memory memory;
  int round;
  size_t i;
  for (round = 1; round <= kRounds; ++round) {
    const int step = (rank + 1) << round;
    for (i = 0; i < kSmall; ++i) small[i] = round == 1 ? (float)(i + 1) : 0;
    for (i = 0; i < kTail; ++i) tail[i] = round == 1 ? (float)(i + 1) : 0;
    for (i = 0; i < kSmallest; ++i) rest[i] = 0x3F80; /* 1 */
    for (i = 0; i < kLarge; ++i) {
      const float value = (float)(code_of(i) * step);
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      half[rank][i] = (uint16_t)(bits >> 16); /* of 8 bits and less nothing is lost */
      large[i] = value;
    }
    if (round == 2) { /* in its memory's own format; then in one that it names */
      OK(phub_use_memory(worker, 1, large, NULL));
    } else if (round == 3) {
      memset(&memory, 0, sizeof memory);
      memory.size = sizeof memory;
      memory.gradient = half[rank];
      memory.gradient_dtype = "bf16";
      memory.gradient_scale = 0.25f;
      OK(phub_register_memory(worker, 1, &memory));
    }
    for (i = 4; i-- > 0;) OK(phub_push(worker, i, 0));
    OK(phub_wait_all(worker));
    for (i = 0; i < kLarge; ++i) {
      const float sum = (float)(code_of(i) * (3 << round));
      CHECK(sum_of(worker, 1)[i] == (round == 3 ? sum / 4 : sum));
    }
    for (i = 0; i < kSmall; ++i) {
      CHECK(sum_of(worker, 0)[i] == (round == 1 ? 2.0f * (float)(i + 1) : 0));
    }
    for (i = 0; i < kTail; ++i) {
      const int sent_in = i < kTail - kLeastTopK ? 2 : 1;
      CHECK(sum_of(worker, 3)[i] == (round == sent_in ? 2.0f * (float)(i + 1) : 0));
    }
    for (i = 0; i < kSmallest; ++i) CHECK(sum_of(worker, 2)[i] == 2);
  }
  OK(phub_worker_destroy(worker));
}

static void misuse(void) {
  phub_options* options = job_of("formats-misuse", 0, 1);
  phub_worker *worker = NULL, *other = NULL;
  const char* dtype = NULL;
  phub_key_memory memory;
  static float gradient[kLarge];
  FAILS(phub_options_set_format(options, NULL, "int8"), PHUB_INVALID, "pattern is null");
  FAILS(phub_options_set_format(options, "*", NULL), PHUB_INVALID, "format is null");
  FAILS(
      phub_options_set_format(options, "*", "int7"), PHUB_INVALID,
      "f32, bf16, f16, fp8-e4m3, fp8-e5m2, int32, int8, int4, topk, topk-10, topk-100, topk-1000, "
      "topk-int4, topk-10-int4, topk-100-int4, topk-1000-int4, topk-int2, topk-10-int2, "
      "topk-100-int2, topk-1000-int2, got 'int7'; did you mean "
      "'int8'?");
  FAILS(phub_options_set_format(options, "*", ""), PHUB_INVALID, "got ''");
  FAILS(phub_options_set_format(options, "*.weight", "int8"), PHUB_NOT_FOUND,
        "of the 4 keys that were added matches '*.weight'");
  FAILS(phub_options_set(options, "rounding", "up"), PHUB_INVALID,
        "rounding: must be one of nearest, stochastic, got 'up'");
  OK(phub_options_set(options, "gradient_dtype", "int7"));
  FAILS(phub_worker_create(options, &worker), PHUB_INVALID, "'int8'?");
  OK(phub_options_set(options, "gradient_dtype", "fp8-e4m3"));
  OK(phub_options_set_number(options, "max_ranks", 2));
  OK(phub_worker_create(options, &worker));
  FAILS(phub_gradient_dtype(worker, 0, NULL), PHUB_INVALID, "dtype is null");
  FAILS(phub_gradient_dtype(worker, 4, &dtype), PHUB_INVALID, "key 4 is out of range");
  OK(phub_gradient_dtype(worker, 2, &dtype)); /* the job's format is coded as well */
  CHECK(strcmp(dtype, "f32") == 0);
  memset(&memory, 0, sizeof memory);
  memory.size = sizeof memory;
  memory.gradient = gradient;
  memory.gradient_dtype = "int8"; /* on the wire; but memory is plain */
  FAILS(phub_register_memory(worker, 1, &memory), PHUB_INVALID, "'int8'");

  OK(phub_options_set_number(options, "rank", 1));
  OK(phub_options_set_format(options, "large", "int4"));
  FAILS(phub_worker_create(options, &other), PHUB_MISMATCH, "'large'");
  OK(phub_worker_destroy(worker));
  OK(phub_options_destroy(options));
}

void check_formats(void) {
  each_rank(kRanks, exchange);
  misuse();
}
