/* The client library for C, and for languages that can call C. A training process links or loads
 * libphub_worker.so.0. worker.h is the same for C++.
 *
 *   phub_options* options;
 *   phub_worker* worker;
 *   phub_options_from_environment(&options);             // PHUB_SERVER, RANK, WORLD_SIZE ...
 *   phub_options_set(options, "job", "mnist");
 *   phub_options_set(options, "optimizer", "nesterov");
 *   phub_options_add_key(options, "w1", 784 * 128);
 *   if (phub_worker_create(options, &worker) != PHUB_OK) puts(phub_last_error());
 *   phub_gradient(worker, 0, &gradient, &bytes);         // compute into it, then, every round:
 *   phub_push(worker, 0, 0);                             // lent until phub_wait
 *   phub_wait(worker, 0);
 *   phub_parameters(worker, 0, &parameters, &bytes);     // valid until the next push
 *
 * Errors. Every function that can fail returns a phub_code: PHUB_OK (0) if it succeeded, otherwise
 * phub_last_error() has a message for people, and no output argument was written. Wrong handles,
 * keys, null pointers and orders of calls are errors, never an exception or a signal. The library
 * cannot check that a pointer that is not null points to memory as the function needs it.
 *
 * Handles are numbers that look like pointers: never dereferenced, never used twice. A handle that
 * is null, was destroyed, or has another type is PHUB_BAD_HANDLE. Destroying a handle that other
 * threads use is safe: their calls soon end with an error, and the last one frees the object.
 *
 * Threads. Any thread may call any function; calls for one key must be in the order push, wait. One
 * thread per worker calls completions (phub_push_then), one at a time. Within a completion, calls
 * that wait or destroy are PHUB_WRONG_THREAD. After fork() the child cannot use the parent's
 * handles (PHUB_WRONG_THREAD), but can make its own.
 *
 * Strings are UTF-8 and end with a zero; they are copied. Times are in milliseconds, sizes in bytes
 * or elements, as named. Keys are numbered from 0 in the order in which they were added.
 */
#ifndef PHUB_WORKER_PHUB_H
#define PHUB_WORKER_PHUB_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PHUB_API __attribute__((visibility("default")))

/* A program must be compiled with the number of the library that it uses. Under one number,
 * functions, codes and options may be added, and structs may grow at their end. */
#define PHUB_ABI_VERSION 0

/* NOLINTBEGIN(readability-identifier-naming): the names are C's. */
typedef struct phub_options phub_options;
typedef struct phub_worker phub_worker;

typedef enum phub_code {
  PHUB_OK = 0,
  PHUB_INVALID = 1,      /* a wrong argument, option, key or length; a call in the wrong order */
  PHUB_MISMATCH = 2,     /* the ranks of the job disagree about it */
  PHUB_TAKEN = 3,        /* the rank or name is in use */
  PHUB_FULL = 4,         /* memory, ranks or another limit */
  PHUB_NOT_FOUND = 5,    /* no such job, rank or key */
  PHUB_UNAUTHORIZED = 6, /* the server refuses this process */
  PHUB_FENCED = 7,       /* this worker left, was replaced, or lost its lease */
  PHUB_RANK_LOST = 8,    /* another rank is gone, and the job's policy is to fail */
  PHUB_NON_FINITE = 9,   /* a NaN or an infinity in a gradient, and the job's policy is to stop */
  PHUB_TIMEOUT = 10,
  PHUB_UNAVAILABLE = 11, /* the server does not answer */
  PHUB_INTERNAL = 12,
  PHUB_BAD_HANDLE = 13,
  PHUB_WRONG_THREAD = 14,
  PHUB_REWOUND = 15 /* the server of a job that it saves is gone: phub_rejoin */
} phub_code;

/* The message of this thread's latest failed call: the function, the problem, what to do. It is
 * never null, and valid until this thread's next failed call. */
PHUB_API const char* phub_last_error(void);

/* "timeout" for PHUB_TIMEOUT; "unknown" for a number that is not a code. */
PHUB_API const char* phub_code_name(int code);

PHUB_API const char* phub_version(void); /* of the library: "0.1.0" */
PHUB_API int phub_abi_version(void);     /* its PHUB_ABI_VERSION */

/* ---- Options: of the job, and of this process as its worker. ---- */

PHUB_API phub_code phub_options_create(phub_options** options);

/* The same, with values from the launcher's environment: PHUB_SERVER, PHUB_TRANSPORT,
 * PHUB_MIN_RANKS, PHUB_WORKER_TRACE; rank and world size from the first of these pairs:
 * PHUB_RANK/PHUB_WORLD_SIZE, RANK/WORLD_SIZE, OMPI_COMM_WORLD_RANK/_SIZE, PMI_RANK/PMI_SIZE,
 * SLURM_PROCID/SLURM_NTASKS, JOB_COMPLETION_INDEX/WORLD_SIZE (Kubernetes); the job from PHUB_JOB,
 * TORCHELASTIC_RUN_ID, or SLURM_JOB_ID and SLURM_STEP_ID ("slurm-JOB.STEP"): training.md has the
 * rules. If one variable of the pair is missing, or the rank is outside of the world,
 * phub_worker_create is PHUB_INVALID, unless the option rank is set. */
PHUB_API phub_code phub_options_from_environment(phub_options** options);

PHUB_API phub_code phub_options_destroy(phub_options* options);

/* Sets an option by its name. PHUB_INVALID: an unknown option (the message has the nearest name),
 * a word that the option does not have, or not a number where one is needed. phub_worker_create
 * checks whether the values fit together.
 *   server              HOST:PORT, or several with commas: one has the job     127.0.0.1:7717
 *   token               for a server that asks for one
 *   job                 letters, digits, '.', '_', '-'
 *   transport           auto, shm, tcp, verbs or ofi; the same for all ranks   auto
 *   rank                -1: the server chooses                                 -1
 *   replace             1: take the rank over from who has it now              0
 *   await_ranks         0: phub_worker_create does not wait for other ranks    1
 *   connect_timeout_ms  how long to wait for the server                        5000
 *   wait_timeout_ms     of phub_wait and phub_barrier; 0: the job's policy     0
 *   rejoin_limit_ms     how long phub_rejoin waits for a server                600000
 *   silence_limit_ms    a server that is silent for so long counts as gone     60000
 *   spin_us             before a wait sleeps; -1: 50 if CPUs are to spare      -1
 *   local_world_size    ranks of the job on this host; 0: over shm all, else 1 0
 *   nic_budget          what each NIC of this host may send: "250mbit", "1gbit", or
 *                       bytes per second; "": no limit
 *   send_order          what goes first of what waits: priority, fifo, random or
 *                       magnitude                                              priority
 *   carry_over          out of lock-step, for how many rounds in a row a chunk
 *                       without budget is left to the next one                 0
 *   trace               file for the exchange's trace (ui.perfetto.dev); "": none
 *   trace_events        the latest ones that it keeps; 48 bytes each           200000
 *   world_size          ranks of the job when it begins                        1
 *   min_ranks           ranks with which it may begin after join_limit_ms;
 *                       0: world_size                                          0
 *   max_ranks           ranks at a time, at most; 0: world_size                0
 *   quorum              ranks with which a round may end, the others being late
 *                       (training.md, "Without waiting for the slowest"); 0: all 0
 *   grace_ms            how long it waits for the others once a quorum is there 0
 *   grace               fixed; or auto: the server chooses that time by what it
 *                       measures, at most grace_ms unless that is 0        fixed
 *   late_decay          factor of a gradient that is late, once for each round,
 *                       from 0 (dropped) to 1; a text or number                1
 *   chunk_elements      a multiple of 32                                       8192
 *   optimizer           none (all-reduce), sgd, momentum, nesterov, adam ...   none
 *                       or fold (phub_options_set_operation)
 *   state_dtype         of the optimizer's state at the box: f32 or 8bit       f32
 *   gradient_dtype      of gradients on the wire: f32, bf16 or f16, or coded:
 *                       fp8-e4m3, fp8-e5m2, int32, int8, int4, topk, topk-10,
 *                       topk-100 or topk-1000, or these four with -int4 or
 *                       -int2; or several by the round, such as
 *                       "f32*100,int8*900,topk"                                f32
 *   rounding            of coded gradients: nearest or stochastic              nearest
 *   parameter_dtype     of results: f32, bf16 or f16; or coded, as gradients
 *                       are, but not int32 or topk: what comes back is the difference that
 *                       a round has made, and parameters in memory are f32   f32
 *   reduction           sum; mean: times float(1/n), n ranks that took part    sum
 *   weights             yes: gradients have weights (phub_set_weight)          no
 *   groups              "4,4": gradients are added within two groups of four
 *                       ranks, then the groups' sums; "(2,2),(2,2)": groups of
 *                       groups; of all max_ranks; "": by ascending ranks
 *   work                all, or sum: no optimizer (benchmarks)                 all
 *   consistency         bsp (rounds), ssp or async (applied as they come)      bsp
 *   slack               ssp: how many rounds a rank may be ahead               0
 *   initial             zeros, or broadcast: rank 0 calls phub_broadcast       zeros
 *   on_loss             shrink, wait, fail or stop, when a rank is lost        shrink
 *   on_nonfinite        stop, exclude, pass or skip (the round, on all ranks)  stop
 *   unused              zero; skip: what all ranks push null of is no step     zero
 *   branches            how many the box keeps beside the one that runs: phub_fork   0
 *   saved               yes, or no: a server with --checkpoints takes none     yes
 *   lease_ms            a rank without heartbeats for so long is lost          3000
 *   progress_limit_ms   so is one that others wait for so long                 60000
 *   wait_limit_ms       on_loss wait: how long the job pauses                  60000
 *   join_limit_ms       how long the first ranks wait for the last             60000 */
PHUB_API phub_code phub_options_set(phub_options* options, const char* name, const char* value);
PHUB_API phub_code phub_options_set_number(phub_options* options, const char* name, int64_t value);

/* Adds the next key. All ranks add the same ones. */
PHUB_API phub_code phub_options_add_key(phub_options* options, const char* name, uint64_t elements);
/* The same with a shape, the last dimension varying fastest: the product of up to 8 dimensions is
 * the number of elements. Checkpoints have it, and all ranks give the same. PHUB_INVALID: there are
 * more dimensions or none, one is 0, or the product is more than 2^40. */
PHUB_API phub_code phub_options_add_shaped_key(phub_options* options, const char* name,
                                               const uint64_t* shape, size_t dimensions);

/* For a key that was added: its priority among keys that wait (higher goes first), and the factors
 * of the job's learning rate and weight decay. The defaults are 0, 1 and 1. */
PHUB_API phub_code phub_options_tune_key(phub_options* options, size_t key, int32_t priority,
                                         double lr_scale, double decay_scale);

/* Puts a key into a group, 0 to 255, with hyperparameters of its own; 0 is the default. */
PHUB_API phub_code phub_options_set_group(phub_options* options, size_t key, uint32_t group);

/* In a job with a quorum: puts a key into a fragment, 0 to 255; 0 is the default, and no number
 * below the last is left out. A rank takes part in a round of a fragment with all of its keys or
 * with none, and ranks may be at different fragments: worker/training.md. Without a quorum it
 * changes nothing. */
PHUB_API phub_code phub_options_set_fragment(phub_options* options, size_t key, uint32_t fragment);

/* For a key with a shape of two dimensions, rows and columns: this rank sends its gradient as at
 * most so many pairs of vectors (phub_push_factors), and the server adds up their outer products.
 * With a rows_limit of all rows, too, each push is phub_push_factors or phub_push_rows.
 * 0: the gradient is sent as it is. PHUB_INVALID: more than 1048575. */
PHUB_API phub_code phub_options_set_rank_limit(phub_options* options, size_t key,
                                               uint32_t rank_limit);

/* For a key with a shape of two dimensions, rows and columns, as an embedding has: this rank sends
 * the rows of its gradient that are not zero, at most so many different ones in a round
 * (phub_push_rows). `lazy` not 0: the optimizer's step of a round changes the rows that a rank
 * sent, and leaves alone parameters and state of the others, as torch.optim.SparseAdam does; 0: the
 * others have a gradient of zero. rows_limit 0: all rows are sent. PHUB_INVALID: more than 1048575.
 */
PHUB_API phub_code phub_options_set_rows_limit(phub_options* options, size_t key,
                                               uint32_t rows_limit, int lazy);

/* Of a job whose optimizer is "fold": what is done with the key's values, in rank order, and then
 * with its state and the outcome: "add", "multiply", "min", "max" or "or". With the optimizer
 * "none", for all keys, the outcome of each round is its result. They are of value_type
 * "f32", "f64", "i32" or "i64"; the key's elements are words of 4 bytes, two of them a value of 64
 * bits, the lower first. Memory of floats (phub_gradient, phub_parameters) holds these words. A
 * null leaves all as it is. Whether there are such words is checked when the job is made. */
PHUB_API phub_code phub_options_set_operation(phub_options* options, size_t key,
                                              const char* operation, const char* value_type);

/* Elements from `begin` up to, and without, `end`. */
typedef struct phub_range {
  uint64_t begin;
  uint64_t end;
} phub_range;

/* Sets the ranges of an added key that this rank writes and reads: outside of the first its
 * gradient is zero, and it wants the results of the second. Other ranks may say other ranges, or
 * nothing, which is all of the key. Chunks of which it writes nothing are not sent, nor do those
 * come back of which it reads nothing; at one that it neither writes nor reads nobody waits for it.
 * The last call for a key counts. PHUB_INVALID, here: the key was not added, or a range is empty or
 * beyond it. */
PHUB_API phub_code phub_options_set_interest(phub_options* options, size_t key,
                                             const phub_range* writes, size_t write_ranges,
                                             const phub_range* reads, size_t read_ranges);

/* Gives the keys that were added so far and whose names match the pattern ("*.weight", "layer?.*":
 * fnmatch(3), without flags) a format of their gradients, which wins over gradient_dtype. The last
 * call that matches a key counts.
 *   f32, bf16, f16        plain: the gradient's memory is in this format, and is sent as it is
 *   fp8-e4m3, fp8-e5m2,   coded, with a scale for each chunk of chunk_elements: 8 bits or, int4, 4
 *   int8, int4            an element
 *   int32                 coded, as these: 32 bits, and sums of integers
 *   topk                  coded: the largest one in 32 of a chunk, as bf16, with its index; for
 *                         chunk_elements of at most 65536. topk-int4, topk-int2: in 4 or 2 bits
 *   f32*100,int8*900,topk   a schedule: in f32 for 100 rounds of the job, in int8 for 900, and in
 *                         topk from then on; up to 8 formats, f32 or coded, but not int32. Only in
 *                         lock-step, and without branches
 * Keys of coded formats, and those with a schedule, have f32 memory (phub_gradient), and are
 * coded when they are pushed. The part that the format cannot hold stays in a residual of this
 * rank, which is added to the next gradient of the key; a null leaves it. It is zero when the
 * rank begins, and again when a rank takes over from a lost one; where a job goes on from a
 * checkpoint, it is as it was: it is saved with the rank's own state. PHUB_INVALID: there is no
 * such format; PHUB_NOT_FOUND: no key matches.
 */
PHUB_API phub_code phub_options_set_format(phub_options* options, const char* pattern,
                                           const char* format);

/* Sets a hyperparameter from round 1 on, or from `round` on, by ascending round. "lr" is the value
 * of all groups, "lr@2" that of group 2, which wins over "lr" of the same round. Names are checked
 * when the job is made: a value that the optimizer does not use, or of a group without keys, is
 * PHUB_INVALID, unless it is 0.
 *   lr                  all                                 0.01; adam, adamw, sparse-adam, lamb,
 *                                                           muon: 0.001, adadelta, lars: 1, lion:
 *                                                           0.0001
 *   weight_decay        all                                 0; adamw, lamb: 0.01, muon: 0.1
 *   momentum            momentum, nesterov, lars, muon      0.9; muon: 0.95
 *   dampening           momentum                            0
 *   beta1, beta2        adam, adamw, sparse-adam, lion,     0.9, 0.999; lion: 0.9, 0.99
 *                       lamb, muon
 *   eps                 adam, adamw, adagrad, rmsprop,      1e-8; adagrad: 1e-10, adadelta, lamb:
 *                       sparse-adam, adadelta, lars, lamb,  1e-6, adafactor: 2^-23, muon: 1e-7
 *                       adafactor, muon
 *   alpha               rmsprop                             0.99
 *   rho                 adadelta                            0.9
 *   rmsprop_momentum    rmsprop; cannot change later, or have groups   0
 *   lr_decay            adagrad                             0
 *   grad_scale          gradients arrive multiplied by it   1
 *   max_norm            all but lamb, adafactor, muon; norm of all keys together to which they are
 *                       clipped, 0: none; no groups, may change if it was set before round 1   0
 *   trust_coeff         lars; factor of a key's trust ratio   0.001
 *   always_adapt        lars, lamb; not 0: keys without a weight decay have a trust ratio, too   0
 *   nesterov            muon; 0: the direction is the momentum itself   1
 *   ns_steps            muon; steps of its iteration, below 100, 0: AdamW's steps, of matrices,
 *                       too; cannot change later   5
 *   match_rms           muon; 0: the rate is times max(1, rows / columns)^0.5, else times 0.2 *
 *                       max(rows, columns)^0.5   0
 *   beta2_power         adafactor; step t takes over t^-beta2_power of the new squares   0.8
 *   eps2                adafactor; the least size of a key that the rate goes by   0.001
 *   clip_threshold      adafactor; an update's root mean square is clipped to it, at least 1   1
 *   batch               of a branch: samples of a rank's gradient, which the ranks ask for
 *                       (phub_batch_in), 0: as the program has it; whole; no groups   0
 *   slack               ssp, async: rounds that a rank may be ahead of the slowest, in ssp at
 *                       most the option `slack`; no groups   the option's
 * Schedules of the learning rate, of all optimizers; where several are set, the rate is lr times
 * all of their factors. n rounds came before, since the warm-up:
 *   lr_rounds_before    rounds that they have behind them in round 1   0
 *   lr_warmup           rounds in which the rate rises in a line to lr, 0: none   0
 *   lr_warmup_from      where it begins, as a part of lr   0
 *   lr_exponential      lr_exponential ^ n   1
 *   lr_inverse          (1 + lr_inverse * n) ^ -lr_inverse_power, 0: not   0
 *   lr_inverse_power    1
 *   lr_polynomial       rounds in which it falls to lr_end, as (1 - n/rounds) ^
 *                       lr_polynomial_power, 0: not   0
 *   lr_polynomial_power 1
 *   lr_cosine           rounds in which it falls to lr_end, as half a wave, 0: not   0
 *   lr_end              where the last two end, as a part of lr   0 */
PHUB_API phub_code phub_options_set_hyper(phub_options* options, const char* name, double value);
PHUB_API phub_code phub_options_schedule_hyper(phub_options* options, uint64_t round,
                                               const char* name, double value);

/* A rank may have state that it needs beside the job's parameters to go on to the bit: that of its
 * random numbers, its position in the data. The library calls `saver` after some rounds (the
 * server's --checkpoint-every), if the server saves the job: in the phub_wait, phub_wait_all,
 * phub_pull or phub_try_wait that returns the last key's result of `round`, before a completion
 * that tells of it, or in the first phub_push of the next round, if that comes before. It gives the
 * state with which the next round begins to phub_save, and returns PHUB_OK: then the checkpoint of
 * this round has it, and phub_restored gives it back. With another code there is no checkpoint of
 * this round, and the call that called it is PHUB_INVALID; a completion is not: stderr says it. It
 * must neither push nor wait. Before its first push of the next round the program must have pushed
 * every key. With a phub_geeps only phub_geeps_save_point calls it, in lock-step. Null: none.
 * `user_data` must be valid as long as a worker that was made with it. */
typedef struct phub_state phub_state;
typedef phub_code (*phub_saver)(void* user_data, uint64_t round, phub_state* state);
PHUB_API phub_code phub_options_set_saver(phub_options* options, phub_saver saver, void* user_data);
/* Copies `size` bytes under this name, of 1 to 255 bytes; all of a rank are at most 64 MiB.
 * PHUB_BAD_HANDLE: the saver that `state` was for has returned; PHUB_TAKEN: there is this name. */
PHUB_API phub_code phub_save(phub_state* state, const char* name, const void* bytes, size_t size);

/* ---- A worker: one rank of a job. ---- */

/* Joins the job, which the first rank creates. Returns when world_size ranks have joined
 * (await_ranks 0: at once; the first wait waits for them). Takes up to connect_timeout_ms +
 * join_limit_ms: after join_limit_ms, min_ranks are enough; with fewer it is PHUB_RANK_LOST, with a
 * message that names the missing ranks. If the job is in progress it waits for no other rank. The
 * options may be changed and destroyed afterwards.
 * PHUB_UNAVAILABLE, PHUB_INVALID, PHUB_MISMATCH, PHUB_TAKEN, PHUB_FULL, PHUB_UNAUTHORIZED. */
PHUB_API phub_code phub_worker_create(const phub_options* options, phub_worker** worker);

/* After PHUB_REWOUND, which every call of the worker then is: waits for a server that goes on with
 * the job, for up to rejoin_limit_ms, and joins as the same rank. The handle then is the new
 * worker's: pointers to gradients and parameters become invalid; registered memory stays
 * registered. `first_round` (null: not wanted) may be earlier than what this rank has seen, and all
 * parameters are those of the round before: call phub_broadcast, and go on from there. With a
 * quorum what was pushed for an earlier round, without a result so far, counted once or never will.
 * Calls of other threads end with PHUB_REWOUND, and so do pushes whose completion is due. May be
 * called again if it fails: PHUB_UNAVAILABLE or PHUB_TIMEOUT after the limit; PHUB_RANK_LOST, the
 * other ranks did not come until then; PHUB_NOT_FOUND, the job has ended; PHUB_TAKEN, another
 * worker has the rank; PHUB_FENCED, only servers with an earlier state of the job answer, or the
 * worker was destroyed; PHUB_INVALID, the worker has not lost its server, or has a phub_geeps. */
PHUB_API phub_code phub_rejoin(phub_worker* worker, uint64_t* first_round);

/* Leaves the job, unless phub_leave did, and frees the worker: its pointers to gradients and
 * parameters become invalid. Calls of other threads end at once with PHUB_FENCED, and so do pushes
 * whose completion is due. PHUB_OK even if the server does not answer within 2 s; it then notices
 * by itself. */
PHUB_API phub_code phub_worker_destroy(phub_worker* worker);

/* Leaves the job. The others go on without this rank, whatever the job's policy; but before the job
 * has begun (all ranks and the initial parameters are there) it counts as a loss. Every later call
 * is PHUB_FENCED. */
PHUB_API phub_code phub_leave(phub_worker* worker);

/* Ends the worker as if its process had died: for the others its rank is lost, at once, or after
 * lease_ms if the server does not answer within 2 s, and on_loss decides. For a program that fails
 * and lives on. Every later call is PHUB_FENCED, and phub_worker_destroy frees it. */
PHUB_API phub_code phub_abandon(phub_worker* worker);

typedef struct phub_info {
  size_t size; /* set it to sizeof(phub_info); at most so many bytes are filled */
  uint32_t rank;
  uint32_t incarnation;
  uint32_t world_size;
  uint32_t initial_counts; /* 1: the job begins with this worker's parameters of phub_broadcast */
  uint64_t first_round;    /* the first in which this worker takes part; 1 unless it joined later */
  size_t keys;
  size_t queues; /* of the job: a core of a server and a NIC have one each */
} phub_info;
PHUB_API phub_code phub_worker_info(const phub_worker* worker, phub_info* info);

/* Gives the state that this rank's saver saved after the round before first_round, when the job
 * goes on from a checkpoint of that round. `bytes` belong to the worker, until it is destroyed or
 * phub_rejoin gives the handle another. PHUB_NOT_FOUND: there is nothing of this name; the job
 * begins, the rank is new, or it joined a job in progress: then the state follows from first_round.
 */
PHUB_API phub_code phub_restored(const phub_worker* worker, const char* name, const void** bytes,
                                 size_t* size);

/* For programs whose state is whole only some time after the round's last result: from the first
 * call on only this calls the saver. Call it after every round, before any part of the state
 * changes for the next one: with the round that this rank has done, in which it has pushed every
 * key. If the state after this round is to be saved, it waits for the round's results, and calls
 * the saver. PHUB_INVALID: the saver failed, or keys were not pushed; and so is a push beyond a
 * round that is to be saved and was not given. A program with a phub_geeps uses
 * phub_geeps_save_point instead. */
PHUB_API phub_code phub_save_point(phub_worker* worker, uint64_t round);

/* The job's name. It belongs to the worker. */
PHUB_API phub_code phub_job_name(const phub_worker* worker, const char** name);

/* In the worker that created the job, where the server asks for tokens: a token that joins, shows
 * and deletes this job, and nothing else; else "". It belongs to the worker. */
PHUB_API phub_code phub_job_token(const phub_worker* worker, const char** token);

/* The transport with its devices and memory: a sentence for people, cut to `size` bytes. */
PHUB_API phub_code phub_worker_connection(const phub_worker* worker, char* text, size_t size);

/* ---- Keys. `key` out of range: PHUB_INVALID. ---- */

PHUB_API phub_code phub_key_by_name(const phub_worker* worker, const char* name, size_t* key);
/* `name` belongs to the worker. Either may be null. */
PHUB_API phub_code phub_key_info(const phub_worker* worker, size_t key, const char** name,
                                 uint64_t* elements);

/* The memory of a key's gradient: elements x the size of phub_gradient_dtype, writable unless lent.
 * The same pointer until the worker is destroyed. Over shared memory the server sums this memory,
 * unless the key's format is coded, or the job has weights. */
PHUB_API phub_code phub_gradient(phub_worker* worker, size_t key, void** memory, size_t* bytes);
/* The format of that memory: the key's own (phub_options_set_format), else the job's
 * gradient_dtype; "f32" where that is coded, or the job has weights. It belongs to the worker. */
PHUB_API phub_code phub_gradient_dtype(const phub_worker* worker, size_t key, const char** dtype);
/* A key's parameters (optimizer none: the sum or mean), in parameter_dtype; f32 where that is
 * coded. The same pointer until the worker is destroyed; valid from phub_wait to the next push of
 * the key. Read-only with every transport: writing to it is a SIGSEGV. So is any access to it, or
 * to a gradient, after the worker was destroyed and the last call for it has returned. */
PHUB_API phub_code phub_parameters(const phub_worker* worker, size_t key, const void** memory,
                                   size_t* bytes);

/* For matrices whose factors are exchanged (worker/factors.h): adds the outer products of `samples`
 * pairs of vectors, of `rows` and of `columns` elements and one after another, to a matrix, which
 * lies row after row. Sample by sample, with one rounding each (fma): the same bits on every
 * machine. Any thread; it does not wait. */
PHUB_API phub_code phub_add_products(const float* left, const float* right, size_t samples,
                                     size_t rows, size_t columns, float* out);

/* Whether the gradients of matrices are better exchanged whole, or as factors that all ranks
 * multiply (Poseidon, 2015, Algorithm 3). The `keys` are in the order in which backward makes their
 * gradients: of rows x columns elements, and factors of so many samples of a rank in a round; 0
 * means that the key goes whole in any case. `backward_s`: what backward computes before the key's
 * gradient is there, which hides the exchange of those before it; null: nothing. Links in Gbit/s
 * each way, of a rank and of the box; `product_gflop_s`: of a rank's phub_add_products. Sets
 * `as_factors` of each key to 1 or 0, the choice with the shortest time from the beginning of
 * backward to the last result, and the two of `seconds`, unless null, to that time with all whole
 * and as chosen. A pure function. PHUB_INVALID: an input that is not positive and finite, but
 * `keys`, `samples` and `backward_s` may be 0; or more elements than a job can have. Any thread; it
 * does not wait. */
PHUB_API phub_code phub_choose_factors(uint32_t ranks, double rank_gbit_s, double box_gbit_s,
                                       double product_gflop_s, size_t keys, const size_t* rows,
                                       const size_t* columns, const size_t* samples,
                                       const double* backward_s, unsigned char* as_factors,
                                       double* seconds);

/* The same where the server multiplies, and makes the steps (phub_options_set_rank_limit): with so
 * many cores, each as fast as `product_gflop_s` says, and `result_bytes` of an element of a result,
 * which comes back whole. Keys are as those that have a rows_limit, too. PHUB_INVALID: as above. */
PHUB_API phub_code phub_choose_box_factors(uint32_t ranks, double rank_gbit_s, double box_gbit_s,
                                           uint32_t box_cores, double product_gflop_s,
                                           double result_bytes, size_t keys, const size_t* rows,
                                           const size_t* columns, const size_t* samples,
                                           const double* backward_s, unsigned char* as_factors,
                                           double* seconds);

/* The caller's own memory for a key: the next push sends from it, and its wait leaves the result in
 * it. Over TCP nothing is copied if formats are the key's, which are not coded, and the scale is 1:
 * from push to wait the memory is read and written in place. Otherwise it is copied once each way,
 * and the same pass converts, scales and codes. */
typedef struct phub_key_memory {
  size_t size; /* set it to sizeof(phub_key_memory), and the rest to 0 first */
  /* Null: the memory of phub_gradient. */
  const void* gradient;
  /* Null: the memory of phub_parameters, which otherwise may not have the result. May be the
   * gradient's memory: then only the results of later pushes are written here. */
  void* parameters;
  const char* gradient_dtype;  /* f32, bf16 or f16; null: phub_gradient_dtype */
  const char* parameter_dtype; /* f32, bf16 or f16; null: the job's */
  float gradient_scale;        /* multiplies every element of the gradient; 0 means 1 */
} phub_key_memory;
/* Replaces the memory that was registered for the key before. The library uses the memory until a
 * call that replaces it, phub_leave or phub_worker_destroy has returned. PHUB_INVALID: a format is
 * unknown, or the scale is not finite. */
PHUB_API phub_code phub_register_memory(phub_worker* worker, size_t key,
                                        const phub_key_memory* memory);
/* Does the same with the formats of null, and without a scale. phub_push reads the memory,
 * phub_wait writes it, and phub_parameters has the result as well. */
PHUB_API phub_code phub_use_memory(phub_worker* worker, size_t key, const void* gradient,
                                   void* parameters);

/* ---- The exchange. Waits sleep; a failure of the job or the server ends them. ---- */

/* Sets the job's initial parameters: f32, of all keys one after another. Rank 0's count; others may
 * pass null and 0. Returns when this worker has all keys; `initial` is not used afterwards. If they
 * do not count (phub_info.initial_counts: this is another rank, or the job is in progress), it
 * waits for the job's present parameters. PHUB_INVALID: there are some, and the job's option
 * `initial` is zeros, so nobody would look at them. */
PHUB_API phub_code phub_broadcast(phub_worker* worker, const float* initial, size_t elements);

/* The same with a pointer for each key: `keys` is the number of keys; the others may pass null and
 * 0. */
PHUB_API phub_code phub_broadcast_keys(phub_worker* worker, const float* const* initial,
                                       size_t keys);

/* In a job with the option `weights`: the weight of the pushes that follow, until another one is
 * set; 1 at the beginning. A round adds up the gradients of the ranks times their weights, each
 * product and each sum rounded to f32, in the order of the ranks; with reduction `mean` it divides
 * by the sum of the weights, so that with the number of samples as its weight each sample counts
 * the same. A null counts with its weight, too. PHUB_INVALID: it is not finite or below 2^-126, or
 * the job has no weights. */
PHUB_API phub_code phub_set_weight(phub_worker* worker, float weight);
/* Starts the exchange of a key: lends its gradient to the library until phub_wait returns, and ends
 * the validity of its parameters. Waits only for the key's previous result. Keys with a higher
 * priority (phub_options_tune_key) overtake others that wait, here and at the server; here,
 * `priority` is added for this push. Every rank must push every key once a round. */
PHUB_API phub_code phub_push(phub_worker* worker, size_t key, int32_t priority);
/* A gradient of zero: nothing is sent, and the rank counts as having taken part. */
PHUB_API phub_code phub_push_null(phub_worker* worker, size_t key);
/* As phub_push, after copying the gradient from memory of the caller to that of phub_gradient,
 * which has as many bytes. PHUB_INVALID: another number, or memory is registered for the
 * gradient. */
PHUB_API phub_code phub_push_copy(phub_worker* worker, size_t key, const void* gradient,
                                  size_t bytes, int32_t priority);
/* As phub_push, of a key with a rank_limit: sends `pairs` pairs of vectors, whose outer products
 * are its gradient. `left` has them one after another, of as many elements as the matrix has rows;
 * `right` likewise, of as many as it has columns. They are copied before it returns. The server
 * adds up those of all ranks, in the order of ranks and then of pairs: element (i, j) of the sum
 * begins at 0 and becomes fmaf(left[i], right[j], sum) for each pair. 0 pairs are a null.
 * PHUB_INVALID: there are more than rank_limit, or the key has none. */
PHUB_API phub_code phub_push_factors(phub_worker* worker, size_t key, const float* left,
                                     const float* right, uint32_t pairs, int32_t priority);
/* As phub_push, of a key with a rows_limit: sends `rows` rows of its gradient, where all others are
 * zero. `indices` are those of the rows; what comes twice is added up, in this order. `elements`
 * has the rows one after another, of as many elements as the matrix has columns. They are copied
 * before it returns. The server adds up each row, in the order of the ranks that have it. 0 rows
 * are a null. PHUB_INVALID: there is no such row, there are more different ones than rows_limit, or
 * the key has none. */
PHUB_API phub_code phub_push_rows(phub_worker* worker, size_t key, const int64_t* indices,
                                  const float* elements, size_t rows, int32_t priority);

/* As phub_push, and calls `completion` once: with PHUB_OK when the result of this push is here, or
 * with the code and message of the error. `message` is valid during the call; "" for PHUB_OK. The
 * call may come before phub_push_then returns. There is none if phub_push_then fails. A completion
 * may push; it must neither throw nor wait for the calling thread. */
typedef void (*phub_completion)(void* user_data, size_t key, uint64_t round, phub_code code,
                                const char* message);
PHUB_API phub_code phub_push_then(phub_worker* worker, size_t key, int32_t priority,
                                  phub_completion completion, void* user_data);

/* Returns when the key's result is here; at once if the key was not pushed since.
 * PHUB_INVALID: others have waited for a tenth of progress_limit_ms (5 s at most) for a key that
 * this rank left out; the message names it, and it can still be pushed. PHUB_TIMEOUT: the message
 * names the missing ranks. PHUB_RANK_LOST, PHUB_NON_FINITE, PHUB_FENCED, PHUB_UNAVAILABLE (the
 * server is gone, or was silent for silence_limit_ms): the worker cannot be used any more.
 * PHUB_REWOUND: it can after phub_rejoin. */
PHUB_API phub_code phub_wait(phub_worker* worker, size_t key);
PHUB_API phub_code phub_wait_all(phub_worker* worker);
/* *ready: 1 if phub_wait would not wait, else 0. */
PHUB_API phub_code phub_try_wait(phub_worker* worker, size_t key, int* ready);
/* Makes progress without waiting. *outstanding: the number of keys whose result is not here yet. */
PHUB_API phub_code phub_poll(phub_worker* worker, size_t* outstanding);

/* Waits, and copies the key's parameters, `bytes` in all, to the caller's memory. */
PHUB_API phub_code phub_pull(phub_worker* worker, size_t key, void* into, size_t bytes);

/* The latest round whose result is here. */
PHUB_API phub_code phub_round(const phub_worker* worker, size_t key, uint64_t* round);

/* In a job with gated rounds (max_norm, on_nonfinite skip, optimizer lars, lamb, adafactor or
 * muon): the verdict on the latest round of which a result is here. All ranks have the same. */
typedef struct phub_round_verdict {
  size_t size;      /* set it to sizeof(phub_round_verdict) */
  uint64_t round;   /* 0: there is none yet, or the job is another */
  double norm;      /* of the gradient before it was clipped */
  uint32_t skipped; /* 1: it is not finite, and changed nothing */
} phub_round_verdict;
PHUB_API phub_code phub_verdict(const phub_worker* worker, phub_round_verdict* verdict);

/* Changes hyperparameters from *round on, by names as in phub_options_set_hyper. `round` NULL, or
 * *round 0: from the first round in which this rank has pushed no key. *round becomes the round
 * from which they hold: a later one if chunks of it are complete already (with a `batch` among the
 * values, not before the round after the one in progress), or a later change exists. It is for all
 * ranks. Any rank may call it, one or all of them: what several set for one round must be the same
 * (PHUB_MISMATCH), and is one change. */
PHUB_API phub_code phub_set_hyper(phub_worker* worker, const char* const* names,
                                  const double* values, size_t count, uint64_t* round);

/* Branches, of a job with the option `branches`: states of the model with hyperparameters of their
 * own, of which one runs in each round, for all ranks. The job begins as branch 0. Any rank may
 * call these; usually one decides. Decisions about branches and hyperparameters hold from rounds
 * that do not descend. `round` NULL, or *round 0: as soon as possible; *round becomes the round
 * from which it holds. PHUB_NOT_FOUND: there is no such branch. PHUB_INVALID: the job has no
 * branches. PHUB_FULL: too many changes are still to come.
 *
 * From *round on there is a branch *child, a copy of `parent` as that is before the round: its
 * parameters, the optimizer's states and its steps; and its hyperparameters but for these `count`
 * values (0: all of them). PHUB_FULL, too: there is room for no more. */
PHUB_API phub_code phub_fork(phub_worker* worker, uint32_t parent, const char* const* names,
                             const double* values, size_t count, uint64_t* round, uint32_t* child);
/* From *round on branches[i] runs for rounds[i] rounds, one after the other; rounds[turns - 1] must
 * be 0: the last one runs until something else is scheduled. The parameters of the first of them
 * become the result of the round before. There may be at most 256 turns. */
PHUB_API phub_code phub_schedule(phub_worker* worker, const uint32_t* branches,
                                 const uint64_t* rounds, size_t turns, uint64_t* round);
/* The branch is gone. PHUB_INVALID: it is the one that runs when all scheduled turns are over. */
PHUB_API phub_code phub_discard(phub_worker* worker, uint32_t branch, uint64_t* round);
/* The branch goes to files, with a checkpoint that the server takes for it after the round before
 * *round, or a later one; then there is room for another. phub_revive: it is as if it had never
 * been killed. It returns when the files are read. PHUB_INVALID: the server keeps no checkpoints;
 * kill: it runs when all scheduled turns are over, or is killed; revive: it is not killed, or its
 * files are damaged (gone: PHUB_NOT_FOUND). PHUB_FULL, too: 255 are killed; there is no room for
 * one that is revived. */
PHUB_API phub_code phub_kill(phub_worker* worker, uint32_t branch, uint64_t* round);
PHUB_API phub_code phub_revive(phub_worker* worker, uint32_t branch, uint64_t* round);
/* The branch that runs in `round`: final for the round after the latest result that this rank has.
 */
PHUB_API phub_code phub_branch_in(phub_worker* worker, uint64_t round, uint32_t* branch);
/* The hyperparameter `batch` of that branch in `round`: samples of a rank's gradient; 0: none is
 * set, and the program decides. The answer is as final as that of phub_branch_in. PHUB_NOT_FOUND:
 * the round is over. */
PHUB_API phub_code phub_batch_in(phub_worker* worker, uint64_t round, uint64_t* samples);
/* From which round on which branch runs, as far as it is decided: rounds ascend, the first is the
 * one in progress or before it. The first `room` of them; *count: how many there are, at most
 * PHUB_MOST_BRANCH_RUNS. */
#define PHUB_MOST_BRANCH_RUNS 1025
PHUB_API phub_code phub_branch_runs(phub_worker* worker, uint64_t* rounds, uint32_t* branches,
                                    size_t room, size_t* count);
/* The branches that there are, ascending: the first `room` of them. *count: how many there are.
 * Their rounds are as of the server's latest look at the job, which is a moment ago. */
typedef struct phub_branch {
  uint64_t round;  /* that it was forked before; 0: it is what the job began as */
  uint64_t rounds; /* that it has run, its parent's up to there included */
  uint32_t branch;
  uint32_t parent;
  uint32_t runs;   /* 1: in the round that is in progress */
  uint32_t killed; /* 1: and there is no room for another yet; 2: it is on disk alone */
  uint64_t batch;  /* its hyperparameter `batch`, samples; 0: none is set */
} phub_branch;
PHUB_API phub_code phub_branches(phub_worker* worker, phub_branch* branches, size_t room,
                                 size_t* count);

/* In a job without an optimizer (optimizer none) branches are states of the ranks alone, and the
 * ranks apply the hyperparameters that a branch was forked with: the first `room` of those of
 * `branch`, its parents' included. The names belong to the library. *count: how many there are. Of
 * a branch that is discarded it is known until the rounds are over in which it runs. */
PHUB_API phub_code phub_branch_values(phub_worker* worker, uint32_t branch, const char** names,
                                      double* values, size_t room, size_t* count);

/* A rank's own state for each branch: statistics of batch normalisation, random numbers, the
 * position in the data, and the like. `save` gives the state as it is, in memory that stays until
 * it is called again; `load` makes it as `save` gave it. A code of theirs other than PHUB_OK is
 * PHUB_INVALID of the call that called them, which can be made again. A child begins with its
 * parent's state at the fork. The state of each branch but the one that runs is in memory; branches
 * with the same state share it. One thread at a time. The two are called in the caller's thread,
 * and must not use the handle; `user_data` must be valid as long as the handle. */
typedef struct phub_by_branch phub_by_branch;
typedef phub_code (*phub_state_saver)(void* user_data, const void** bytes, size_t* size);
typedef phub_code (*phub_state_loader)(void* user_data, const void* bytes, size_t size);
PHUB_API phub_code phub_by_branch_create(phub_state_saver save, phub_state_loader load,
                                         void* user_data, phub_by_branch** by_branch);
PHUB_API phub_code phub_by_branch_destroy(phub_by_branch* by_branch);
/* Before this rank begins `round` (0: its next), once all results of the round before are here: the
 * state is that of the branch which runs in it (*branch, if it is not null). Call it before each
 * round, or before none; once more for the same round it has no effect. A rank that comes later
 * begins all branches with what it has then. PHUB_NOT_FOUND: the round is over. PHUB_INVALID: a
 * round with a fork was left out; or this one was begun long before: after phub_rejoin,
 * phub_by_branch_restore comes first. */
PHUB_API phub_code phub_by_branch_begin(phub_by_branch* by_branch, phub_worker* worker,
                                        uint64_t round, uint32_t* branch);
/* For a checkpoint: all but the state that is in place, which is the program's to save. `bytes`
 * belong to the handle, until it begins another round. phub_by_branch_restore: as it was then.
 * PHUB_MISMATCH: they are something else. */
PHUB_API phub_code phub_by_branch_saved(phub_by_branch* by_branch, const void** bytes,
                                        size_t* size);
PHUB_API phub_code phub_by_branch_restore(phub_by_branch* by_branch, const void* bytes,
                                          size_t size);

/* Tells the server this rank's loss in `round`; 0: in the first round in which it has pushed no
 * key. Before it pushes that round, and in ascending rounds; also a loss that is not finite. The
 * server keeps the means of the latest rounds, of all ranks that report, with the branch that ran,
 * for who drives the branches from outside (`phub tune`), and shows the latest. */
PHUB_API phub_code phub_report_loss(phub_worker* worker, double loss, uint64_t round);
/* The same for a job with several losses, each by a name, such as "train" and "validation"; that of
 * phub_report_loss is "loss". A name has 1 to 32 letters, digits and '_', '-', '.', '/'. PHUB_FULL:
 * the job has eight other names. */
PHUB_API phub_code phub_report_named_loss(phub_worker* worker, const char* name, double loss,
                                          uint64_t round);

/* The state of keys at the server, f32 whatever the job's formats are: each key's parameters, and
 * what the optimizer keeps beside them. `phub_state_name` gives the names of the latter, for
 * `state` from 0 on, as in the files of a checkpoint (momentum_buffer; exp_avg, exp_avg_sq ...);
 * `name` belongs to the library. PHUB_NOT_FOUND: there are no more; with n names a key has 1 + n
 * arrays. */
PHUB_API phub_code phub_state_name(const phub_worker* worker, size_t state, const char** name);
/* Copies the state of `count` keys to `arrays`: of each key in turn its 1 + n arrays of the key's
 * elements, the parameters first. steps (null: not wanted) gets the number of steps that the
 * optimizer has made on each key (with unused=skip, where a rank was lost in the middle of a key:
 * on the part with the most), *round (null: not wanted) the round after which all this was so.
 * Call it between rounds: when this rank has the results of all keys, and has pushed none since
 * (PHUB_INVALID: it has pushed keys in different rounds).
 * For jobs in lock-step with an optimizer. PHUB_TAKEN: another rank reads or sets it: try again.
 * PHUB_FULL: the server has no memory for it: ask for fewer keys. */
PHUB_API phub_code phub_get_state(phub_worker* worker, const size_t* keys, size_t count,
                                  float* const* arrays, uint64_t* steps, uint64_t* round);
/* Sets the state of these keys, for all ranks, by one rank's call. From *round on (null: not
 * wanted) the optimizer works on it: the results of that round are the new parameters after one
 * more step. A rank that is to compute its gradients of that round with the new parameters loads
 * them itself, or calls phub_get_state after a phub_barrier. Until that round is complete a second
 * set is PHUB_TAKEN. A job that goes on from a checkpoint of an earlier round goes on without it.
 */
PHUB_API phub_code phub_set_state(phub_worker* worker, const size_t* keys, size_t count,
                                  const float* const* arrays, const uint64_t* steps,
                                  uint64_t* round);

/* Asks for a checkpoint as soon as possible. *round: of the checkpoint; the latest round that is
 * complete, or, if ranks save their own state, the next one that they save. A server that is taking
 * one anyway takes no other. PHUB_INVALID: the server keeps no checkpoints, or the job is not saved
 * (it has no optimizer, and no saver), or no round is complete. */
PHUB_API phub_code phub_checkpoint(phub_worker* worker, uint64_t* round);
/* Returns when a checkpoint of `round` or a later one survives the server. PHUB_TIMEOUT: not within
 * timeout_ms (0: no limit). Otherwise it was not written, and the one before stands:
 * PHUB_RANK_LOST, a rank was lost that had to send its part; PHUB_FULL or PHUB_INTERNAL, the disk.
 */
PHUB_API phub_code phub_await_checkpoint(phub_worker* worker, uint64_t round, uint32_t timeout_ms);

/* Why a wait has lasted for more than a tenth of progress_limit_ms (5 s at most), as the server
 * sees it: "rank 1 has not sent key 'w2' of round 3 for 7.5 s"; "" if nothing holds the job up. Cut
 * to `size` bytes. The same is written to stderr, once for each key and round. */
PHUB_API phub_code phub_waits_for(const phub_worker* worker, char* text, size_t size);

/* Tells who looks at the job (`phub status`, the server's page and its messages) what this rank has
 * decided for it: a sentence about a subject such as "factors", which replaces the one before it,
 * of any rank; "" takes that away. Subjects have 1 to 64 bytes, texts 4096 at most; a job has 32
 * subjects (PHUB_FULL). */
PHUB_API phub_code phub_remark(phub_worker* worker, const char* subject, const char* text);

/* Waits for all live ranks, through the server's control port. */
PHUB_API phub_code phub_barrier(phub_worker* worker);

typedef struct phub_stats {
  size_t size; /* set it to sizeof(phub_stats) */
  uint64_t pushes;
  uint64_t chunks_pushed, chunks_received;
  uint64_t bytes_copied; /* between the caller's memory and the library's */
  uint64_t sleeps;       /* how often a wait slept */
  uint64_t reconnections;
  uint64_t chunks_carried_over; /* to the next round */
} phub_stats;
PHUB_API phub_code phub_worker_stats(const phub_worker* worker, phub_stats* stats);

/* ---- GeePS: parameters and local data in the memory of a device. Data that does not fit is in
 * host memory, and is copied ahead of time in the background. worker/geeps/cache.h is the same for
 * C++, and has more about every call.
 *
 *   phub_geeps_options_create(&tables);
 *   phub_geeps_options_add_table(tables, "layer1", 128, NULL, 785);      // parameters
 *   phub_geeps_options_add_local(tables, "hidden", 128, NULL, 64);       // this worker's own data
 *   phub_options_add_tables(options, tables);                            // the keys of the job
 *   phub_worker_create(options, &worker);
 *   phub_device_open_host(64 << 20, 0, 0, &device);
 *   phub_geeps_create(device, worker, tables, &geeps);
 *   phub_geeps_begin_virtual(geeps);  iteration(geeps);  phub_geeps_finish(geeps);
 *   for (;;) iteration(geeps);
 *
 *   phub_geeps_read(geeps, 0, NULL, 0, PHUB_STALENESS_OF_JOB, &weights);
 *   phub_geeps_local_access(geeps, 1, NULL, 0, 0, &hidden);
 *   ... compute from weights.data into hidden.data ...
 *   phub_geeps_post_read(geeps, weights.handle);
 *   phub_geeps_post_local_access(geeps, hidden.handle, 1);
 *   phub_geeps_pre_update(geeps, 0, NULL, 0, &update);
 *   ... compute the gradient into update.data ...
 *   phub_geeps_update(geeps, update.handle);
 *   phub_geeps_table_clock(geeps, 0);
 *
 * Threads. A phub_geeps is for one thread at a time: a call during another one for the same handle
 * is PHUB_WRONG_THREAD. A call that waits for the job ends when its worker leaves or is destroyed.
 *
 * Streams. A caller that computes in a stream says which (phub_geeps_options_set_stream). Then it
 * need not wait for the stream, and buffers are returned before the device has filled them. Several
 * devices of a process share a worker as a phub_device_group.
 *
 * Errors. PHUB_INVALID, a wrong call, which changes nothing; PHUB_FULL, device memory;
 * PHUB_TIMEOUT; what a device or the job failed with, which every later call fails with. ---- */

typedef struct phub_device phub_device;
typedef struct phub_geeps_options phub_geeps_options;
typedef struct phub_geeps phub_geeps;
typedef struct phub_device_group phub_device_group;

/* A device of host memory within a budget, for workers without a GPU. Data pointers are host
 * memory. Copies take as long as bandwidth and latency say; 0 bytes per second: as fast as this
 * machine copies; otherwise at least 1000. PHUB_FULL. */
PHUB_API phub_code phub_device_open_host(uint64_t budget_bytes, double copy_bytes_per_second,
                                         uint64_t copy_latency_ns, phub_device** device);
/* A GPU, on which `budget_bytes` are allocated at once. Data pointers are device memory, which any
 * stream may use when the call that returned them has returned. No call waits for streams of the
 * caller: they must have finished with a buffer before it is released. With
 * phub_geeps_options_set_stream only that stream may use them, in its order.
 * PHUB_UNAVAILABLE: there is no such device, no driver, or the library was built without CUDA. */
PHUB_API phub_code phub_device_open_cuda(int index, uint64_t budget_bytes, phub_device** device);
/* The memory is freed with the last phub_geeps, phub_device_keys and phub_worker that use it. */
PHUB_API phub_code phub_device_close(phub_device* device);

/* A stream of a device of host memory, in place of a cudaStream_t: work of the program, one after
 * another, in threads of the device. Programs that compute in a stream run with it, and are tested,
 * where there is no GPU. PHUB_INVALID: the device is a GPU, whose streams are the driver's.
 *
 * Any thread may call these functions. Destroying waits for the stream's work; a phub_geeps whose
 * stream it is keeps it as long as it lives. phub_host_stream_wait returns when all work is done
 * that was given before, or with the failure of the device, after which later work is dropped. */
typedef struct phub_host_stream phub_host_stream;
PHUB_API phub_code phub_host_stream_create(phub_device* device, phub_host_stream** stream);
PHUB_API phub_code phub_host_stream_destroy(phub_host_stream* stream);
PHUB_API phub_code phub_host_stream_wait(phub_host_stream* stream);
/* Calls work(user_data) once, when all work is done that the stream was given before. The call
 * itself returns at once. `work` calls no function of this header. While it runs, the work of other
 * streams of the device may wait. */
typedef void (*phub_stream_work)(void* user_data);
PHUB_API phub_code phub_host_stream_call(phub_host_stream* stream, phub_stream_work work,
                                         void* user_data);

/* Gradients and parameters of the workers that are made with these options lie in the device's
 * memory, which the NIC reads and writes itself: over transport verbs or ofi, where it reaches that
 * memory. Then phub_gradient and phub_parameters return addresses there (of phub_device_open_host:
 * of the host), phub_register_memory takes no memory, and with phub_device_keys_create on the same
 * device keys are pushed and pulled in its streams. The budget has room for both, once more during
 * phub_rejoin, and PHUB_DEVICE_KEYS_BYTES. Null: the host's memory again.
 * phub_worker_create: PHUB_INVALID, the transport or the NIC does not reach that memory, or the
 * host would have to compute (coded formats, carry_over, send_order magnitude); PHUB_FULL, the
 * budget. */
PHUB_API phub_code phub_options_set_memory_device(phub_options* options, const phub_device* device);

typedef struct phub_memory {
  size_t size;                                   /* set it to sizeof(phub_memory) */
  uint64_t budget_bytes, used_bytes, peak_bytes; /* of the device */
  uint64_t host_bytes;                           /* pinned in host memory */
} phub_memory;
PHUB_API phub_code phub_device_memory(const phub_device* device, phub_memory* memory);

PHUB_API phub_code phub_geeps_options_create(phub_geeps_options** options);
PHUB_API phub_code phub_geeps_options_destroy(phub_geeps_options* options);

/* Sets an option by its name, as phub_options_set does.
 *   budget_bytes    of device memory; 0: what the device has left            0
 *   reserved_bytes  of these, for calls outside the sequence; 0: one largest buffer, if that fits
 *   max_lead        phases by which buffers are filled ahead, at most        4
 *   peak_first      1: rows are pinned in the order of GeePS's Algorithm 2   0
 *   prefetch        0: buffers are filled only when they are requested       1
 *   strict          1: a call outside the sequence is an error               0
 *   infer_clocks    1: the last update clocks a table that the sequence does not clock      0
 *   poison          1: released buffers become NaN                           0
 *   measure_stalls  1: times waits of a stream, for stalled_ns (0: none there)              0
 *   partitions      sets of copying threads, which share a table's pieces    1
 *   timeout_ms      of calls that wait; 0: none but the worker's             0
 *   trace           file for the trace (ui.perfetto.dev); "": none */
PHUB_API phub_code phub_geeps_options_set(phub_geeps_options* options, const char* name,
                                          const char* value);
PHUB_API phub_code phub_geeps_options_set_number(phub_geeps_options* options, const char* name,
                                                 int64_t value);

/* Adds the next table, of parameters or of this worker's own data (zero at first): `rows` rows of
 * `row_floats` floats. `keys` has the rows' keys, each once, in their order in memory; null: 0 to
 * rows - 1. Every worker adds the same tables of parameters. At most 2^28 rows. */
PHUB_API phub_code phub_geeps_options_add_table(phub_geeps_options* options, const char* name,
                                                uint32_t row_floats, const uint64_t* keys,
                                                uint64_t rows);
PHUB_API phub_code phub_geeps_options_add_local(phub_geeps_options* options, const char* name,
                                                uint32_t row_floats, const uint64_t* keys,
                                                uint64_t rows);
/* For a table of parameters: whether reads include this worker's updates that were not clocked yet
 * (only for jobs that add updates to the parameters), and the largest staleness, in clocks, that a
 * read may request. The defaults are 0 and 0. */
PHUB_API phub_code phub_geeps_options_tune_table(phub_geeps_options* options, uint32_t table,
                                                 int read_my_writes, uint32_t max_staleness);

/* This table of local data is not saved (phub_geeps_save_point): no iteration needs it from the one
 * before. PHUB_INVALID: it is a table of parameters, or there is none. */
PHUB_API phub_code phub_geeps_options_set_scratch(phub_geeps_options* options, uint32_t table);
/* Each branch of the job has rows of its own in this table of local data: a child begins with its
 * parent's, as they are at the fork. phub_geeps_save_point at the end of every iteration changes
 * over. In a job without branches it has no effect. PHUB_INVALID: it is a table of parameters, or
 * there is none; phub_geeps_create refuses one that is scratch, too. */
PHUB_API phub_code phub_geeps_options_set_by_branch(phub_geeps_options* options, uint32_t table);

/* The updates of this table of parameters are factors: at most so many pairs of a clock, of a
 * vector of as many elements as it has rows and one of row_floats. phub_geeps_clock_factors takes
 * them. 0: they are updates. PHUB_INVALID: it is a table of local data, or there is none. */
PHUB_API phub_code phub_geeps_options_set_samples(phub_geeps_options* options, uint32_t table,
                                                  uint32_t samples);

/* A table of more bytes is divided into pieces of so many, of whole rows: each is a key of the job
 * "NAME[FIRST:END] #DIGEST", END being the row behind its last, and moves by itself to the server
 * and to the device. The default is 2 MiB; 0: the table is one piece, and one key. With samples it
 * is always one. Every worker sets the same for tables of parameters. PHUB_INVALID: there is no
 * such table. */
PHUB_API phub_code phub_geeps_options_set_piece_bytes(phub_geeps_options* options, uint32_t table,
                                                      uint64_t bytes);

/* The caller of the phub_geeps that are made with these options computes in this stream of their
 * device: a cudaStream_t, also 0, or a phub_host_stream; of a device of host memory null is the
 * calling thread. It is used until phub_geeps_destroy has returned, which waits for its work.
 *
 * A call that returns a buffer then does not wait until the device has filled it: work that is
 * enqueued in the stream after the call finds it filled. A call that releases a buffer, and a
 * clock, take effect behind the work that was enqueued before, and do not wait for that. What calls
 * wait for is on the host: a result of the server's, and with it the work of the stream from which
 * the updates came; the copy to the host of what this buffer's memory, or this table's log, held
 * before; free reserved memory. Outside the sequence the call also waits for the copies of the rows
 * to the device. phub_geeps_finish waits for the stream, as does phub_geeps_save_point where it
 * saves rows or changes them over; phub_geeps_wait_all waits for the work up to the last clocks.
 *
 * Without this call the caller computes on a GPU in any stream: calls that return a buffer wait
 * until it is filled. phub_geeps_create: PHUB_BAD_HANDLE, of a device of host memory it is no
 * phub_host_stream; PHUB_INVALID, it is one of another device. A cudaStream_t cannot be checked. */
PHUB_API phub_code phub_geeps_options_set_stream(phub_geeps_options* options, void* stream);

/* Adds a key to the job for every piece of the tables of parameters, in their order: all parameters
 * of the job are the rows of one table behind those of the other. The job has no other keys. */
PHUB_API phub_code phub_options_add_tables(phub_options* options, const phub_geeps_options* tables);
/* Does the same for a job whose processes have groups of so many devices: keys of tables with
 * samples have room for the pairs of all. Every process has equally many. PHUB_INVALID: 0 members,
 * or too many pairs. */
PHUB_API phub_code phub_options_add_group_tables(phub_options* options,
                                                 const phub_geeps_options* tables,
                                                 uint32_t members);

/* Makes a cache of the parameters of the worker's job. From now on only the cache pushes keys:
 * phub_push, phub_use_memory and phub_register_memory of the worker are PHUB_INVALID. The options
 * may be changed and destroyed afterwards. PHUB_INVALID: the job's keys are not those of the
 * tables, or the worker has a saver and the local tables are too large to be saved; PHUB_TAKEN: the
 * worker has a cache; PHUB_MISMATCH: a local table was saved with other rows. */
PHUB_API phub_code phub_geeps_create(phub_device* device, phub_worker* worker,
                                     const phub_geeps_options* options, phub_geeps** geeps);
/* Does the same without a server, for one process: a thread of the library applies the optimizer.
 * Only the job's keys, optimizer and options of its arithmetic count. `initial` has the parameters
 * of all tables one after another; null and 0: zeros. */
PHUB_API phub_code phub_geeps_create_standalone(phub_device* device, const phub_options* job,
                                                const phub_geeps_options* options,
                                                const float* initial, size_t elements,
                                                phub_geeps** geeps);
/* Waits until pushes in progress are sent; data pointers become invalid. The worker may then push
 * itself or get another phub_geeps, even before the results are here. */
PHUB_API phub_code phub_geeps_destroy(phub_geeps* geeps);

/* Several devices of this process are one rank: each has a phub_geeps, and threads of the library
 * sum their updates of a key when the last of them has clocked it, in the order of the members, and
 * push the sum. All read the same result. From now on only the group pushes the worker's keys,
 * which are those of phub_options_add_group_tables. Members that clock without an update are left
 * out of the sum.
 *
 *   phub_device_group_create(worker, tables, 2, 0, 0, &group);
 *   phub_geeps_create_member(first_device, group, 0, tables, &first);    // one thread calls it
 *   phub_geeps_create_member(second_device, group, 1, tables, &second);  // another calls this
 *   phub_device_group_destroy(group);                                    // they keep it
 *
 * `mean` 1: sums are multiplied by float(1 / members), for jobs that take the mean. `threads` sum;
 * 0: two, or one if there is one CPU. At most 1024 members and threads.
 *
 * Errors of a group are those of a phub_geeps, for all members. PHUB_RANK_LOST: a member was
 * destroyed without the update that the others wait for. PHUB_INVALID, at first: there are no
 * members; or several, and the worker has a saver (their iterations have no common end), or `mean`
 * is 1 and a table has samples; PHUB_TAKEN: the worker has a phub_geeps or a group. */
PHUB_API phub_code phub_device_group_create(phub_worker* worker, const phub_geeps_options* tables,
                                            uint32_t members, int mean, uint32_t threads,
                                            phub_device_group** group);
/* Does the same without a server, as phub_geeps_create_standalone. */
PHUB_API phub_code phub_device_group_create_standalone(const phub_options* job,
                                                       const float* initial, size_t elements,
                                                       uint32_t members, int mean, uint32_t threads,
                                                       phub_device_group** group);
/* The group ends with its last phub_geeps. Then the worker may push itself. */
PHUB_API phub_code phub_device_group_destroy(phub_device_group* group);
/* Makes the cache of member `member`, from 0, on its device, with the tables of the group. Members
 * may have other options, streams among them. PHUB_INVALID: there is no such member; PHUB_TAKEN: it
 * has, or had, a phub_geeps; else as phub_geeps_create. */
PHUB_API phub_code phub_geeps_create_member(phub_device* device, phub_device_group* group,
                                            uint32_t member, const phub_geeps_options* options,
                                            phub_geeps** geeps);

/* Record the calls of an iteration: a virtual one (nothing is moved, buffers have no data), or a
 * real one. phub_geeps_finish places all buffers by them; the contents of tables stay.
 * PHUB_TIMEOUT: results are missing, call it again. PHUB_FULL: the old sequence stays in use. */
PHUB_API phub_code phub_geeps_begin_virtual(phub_geeps* geeps);
PHUB_API phub_code phub_geeps_begin_gathering(phub_geeps* geeps);
PHUB_API phub_code phub_geeps_finish(phub_geeps* geeps);

typedef struct phub_buffer {
  size_t size; /* set it to sizeof(phub_buffer) */
  float*
      data; /* the rows in the order of the keys, in device memory; null in a virtual iteration */
  uint64_t rows;
  uint64_t handle; /* for the call that releases it; never used twice */
  int64_t age;     /* of a read: so many clocks of every worker are in it; -1: the job is async */
  uint32_t row_floats;
  uint32_t reserved;
} phub_buffer;

#define PHUB_STALENESS_OF_JOB (-1) /* what the job's consistency gives */

/* Table 1 of GeePS: calls that return a buffer, when it can be used, or later work of the caller's
 * stream can use it. `keys` has the keys of `count` rows; null and 0: all rows. `staleness` in
 * clocks: 0 is BSP. `fetch` 0: the old contents of the rows are not needed. A buffer of
 * phub_geeps_read must not be written: the next read may use it. */
PHUB_API phub_code phub_geeps_read(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                   size_t count, int64_t staleness, phub_buffer* buffer);
PHUB_API phub_code phub_geeps_pre_update(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                         size_t count, phub_buffer* buffer);
PHUB_API phub_code phub_geeps_local_access(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                           size_t count, int fetch, phub_buffer* buffer);

/* Calls that release a buffer. They return at once. `save` 0: its contents are not needed any more.
 * phub_geeps_discard releases any buffer, without an update or save. */
PHUB_API phub_code phub_geeps_post_read(phub_geeps* geeps, uint64_t handle);
PHUB_API phub_code phub_geeps_update(phub_geeps* geeps, uint64_t handle);
PHUB_API phub_code phub_geeps_post_local_access(phub_geeps* geeps, uint64_t handle, int save);
PHUB_API phub_code phub_geeps_discard(phub_geeps* geeps, uint64_t handle);

/* Sends the table's updates of this clock, which are complete. */
PHUB_API phub_code phub_geeps_table_clock(phub_geeps* geeps, uint32_t table);
/* The same of a table with samples, whose update is the sum of the outer products of `pairs` pairs
 * of vectors in memory of the device: `left` has them one after another, as `right`. They are
 * copied where the caller computes: in this call, or in the order of its stream. 0 pairs are none
 * at all. PHUB_INVALID: there are more than its samples, or they are not memory of the device. */
PHUB_API phub_code phub_geeps_clock_factors(phub_geeps* geeps, uint32_t table, const float* left,
                                            const float* right, uint32_t pairs);
/* Waits until all clocked updates are pushed and their results are here. */
PHUB_API phub_code phub_geeps_wait_all(phub_geeps* geeps);
/* For a worker with a saver, and in a job with branches with tables by branch: call it at the end
 * of every iteration, when each table of parameters was clocked once and no local buffer is in use.
 * With tables by branch it waits for the round's results, and gives the tables the rows of the
 * branch that runs in the next round; without it the next TableClock is refused. If the rank's
 * state is to be saved after this round, it waits for the round's results, calls the saver, and
 * saves the local tables beside what the saver gave, as "geeps/NAME" (but not those of
 * phub_geeps_options_set_scratch). They come back in the phub_geeps that a restored rank creates.
 * PHUB_INVALID: a buffer is in use, or updates were not clocked; or the saver failed: then there is
 * no checkpoint of this round. PHUB_TIMEOUT: results are missing; PHUB_UNAVAILABLE: with tables by
 * branch, the server did not answer. Then call it again. */
PHUB_API phub_code phub_geeps_save_point(phub_geeps* geeps);

typedef struct phub_geeps_counters {
  size_t size; /* set it to sizeof(phub_geeps_counters) */
  uint64_t calls, outside_sequence;
  uint64_t prefetched; /* buffers that were filled before they were requested */
  uint64_t stalled_ns; /* time for which calls waited for buffers, or a stream (measure_stalls) */
  uint64_t bytes_to_device, bytes_to_host; /* copied in the background */
  uint64_t bytes_staged;                   /* of these, gathered or added by threads of the cache */
  uint64_t bytes_copied_by_caller;         /* within calls, which waited for the copy */
  uint64_t pushes, pulls;
  uint64_t branch_bytes; /* in host memory, now: rows of branches that do not run */
} phub_geeps_counters;
PHUB_API phub_code phub_geeps_stats(phub_geeps* geeps, phub_geeps_counters* counters);

typedef struct phub_placement {
  size_t size;           /* set it to sizeof(phub_placement) */
  uint64_t pinned_bytes; /* of device memory: rows that stay there, with their updates */
  uint64_t index_bytes, pool_bytes, reserved_bytes;
  uint64_t total_bytes;
  uint64_t moved_bytes;     /* copied between host and device in an iteration */
  uint32_t double_buffered; /* 1: every buffer is filled at least one phase ahead */
  uint32_t reserved;
} phub_placement;
/* PHUB_INVALID before phub_geeps_finish. */
PHUB_API phub_code phub_geeps_placement(phub_geeps* geeps, phub_placement* placement);

/* ---- Keys in the memory of a device: gradients are taken from there and results are put there on
 * its streams, and no call waits for a stream or for the server. worker/device_keys.h is the same
 * for C++.
 *
 *   phub_device_keys_bytes(worker, &bytes);
 *   phub_device_open_cuda(0, bytes, &device);
 *   phub_device_keys_create(worker, device, &keys);       // after phub_broadcast
 *   phub_push_device(keys, 0, gradient, NULL, 1, 0, stream);
 *   phub_pull_device(keys, 0, parameters, NULL, stream);  // later work of `stream` has the result
 *
 * With a device of phub_device_open_host the calling thread takes the place of the stream: data
 * pointers are memory of the process, `stream` is null, and phub_pull_device waits.
 *
 * Threads. Any thread may call any function. Pushes and pulls of one key take effect in the order
 * of the calls. Memory is lent from phub_push_device until its stream is behind the key's next
 * pull, and from phub_pull_device until its stream is behind that.
 *
 * Errors. PHUB_INVALID, a wrong call, which changes nothing. When the worker or the device fails,
 * results that are not here yet become bytes of 0xFF (NaN), streams go on at once, and every later
 * call is what the worker or the device failed with; memory stays lent until the end. ---- */

typedef struct phub_device_keys phub_device_keys;

/* The part of its budget that a device must have left. With phub_device_keys_bytes, gradients of
 * coded keys are encoded on the device, and only codes cross its bus; with less the worker encodes
 * them. worker/device_keys.h has the rest. */
#define PHUB_DEVICE_KEYS_BYTES 16777216
/* PHUB_DEVICE_KEYS_BYTES, and 4 bytes for each element of this worker's coded keys. */
PHUB_API phub_code phub_device_keys_bytes(const phub_worker* worker, uint64_t* bytes);

/* From now on only these functions exchange the worker's keys: phub_push, phub_use_memory and
 * phub_register_memory are PHUB_INVALID, and registered memory is registered no more. Before
 * phub_save_point, phub_get_state and phub_set_state call phub_wait_device; before phub_rejoin
 * destroy the phub_device_keys. If the job needs initial parameters, phub_broadcast comes first.
 * PHUB_TAKEN: the worker has a phub_geeps or phub_device_keys; PHUB_FULL: memory of the device, or
 * pinned memory of the host; PHUB_UNAVAILABLE: the driver is older than CUDA 12's. */
PHUB_API phub_code phub_device_keys_create(phub_worker* worker, phub_device* device,
                                           phub_device_keys** keys);
/* Waits until what was pushed is sent. Results that are not here yet become bytes of 0xFF. */
PHUB_API phub_code phub_device_keys_destroy(phub_device_keys* keys);

/* Takes part in the key's next round, as phub_push: when `stream` (a cudaStream_t, also 0) comes
 * here, the key's elements at `gradient`, memory of the device in the format `dtype` (null: the
 * job's), are multiplied by `scale` (0 means 1), converted to the job's format, and sent. Null: a
 * gradient of zero. PHUB_INVALID: it is not memory of this device. */
PHUB_API phub_code phub_push_device(phub_device_keys* keys, size_t key, const void* gradient,
                                    const char* dtype, float scale, int32_t priority, void* stream);
/* The same of a key with a rank_limit, as phub_push_factors, with factors in memory of the device.
 */
PHUB_API phub_code phub_push_factors_device(phub_device_keys* keys, size_t key, const float* left,
                                            const float* right, uint32_t pairs, int32_t priority,
                                            void* stream);
/* Later work of `stream` waits until the result of the latest push (none: the present parameters)
 * is at `result`, in the format `dtype` (null: the job's). It may be the gradient's memory. */
PHUB_API phub_code phub_pull_device(phub_device_keys* keys, size_t key, void* result,
                                    const char* dtype, void* stream);
/* Returns when the results of all pushes are here, and in their place if they were pulled. */
PHUB_API phub_code phub_wait_device(phub_device_keys* keys);

/* ---- IterStore: a store of rows for iterative programs. Threads of several processes read rows of
 * tables, update them, and say where an iteration ends. The accesses of one iteration, once
 * recorded, say where rows should lie for the next. worker/iterstore/store.h is the same for C++;
 * README.md there says when updates are read, and in which order they are combined.
 *
 *   phub_options_from_environment(&options);            // server, rank and world size
 *   phub_options_set(options, "job", "ranks");          // the store's jobs are ranks.1-rows ...
 *   phub_store_options_create(&tables);
 *   phub_store_options_set(tables, "threads", "4");
 *   phub_store_options_add_table(tables, "rank", pages, 1, "f64", "add", 0, 0);
 *   phub_store_create(options, tables, &store);
 *   ... in each of the 4 threads:
 *   phub_store_thread_create(store, number, &mine);
 *   phub_store_begin_virtual(mine);  iteration(mine);  phub_store_finish(mine);
 *   for (...) iteration(mine);
 *   phub_store_thread_destroy(mine);
 *
 *   phub_store_read(mine, 0, rows, count, "f64", ranks, count * sizeof(double));
 *   ... compute ...
 *   phub_store_update(mine, 0, others, count, "f64", changes, count * sizeof(double));
 *   phub_store_clock(mine);
 *
 * Threads. A phub_store_thread is for the thread that made it: for others its calls are
 * PHUB_WRONG_THREAD, but for phub_store_thread_destroy. phub_store_table, phub_store_rows and
 * phub_store_stats are that while a thread of the store is in a call. A call takes locks that all
 * threads share: give it many rows.
 *
 * Errors. PHUB_INVALID, a wrong call, which changes nothing; what the job failed with. An error of
 * phub_store_clock or phub_store_finish is that of all threads, and ends the store: every later
 * call fails with it. ---- */

typedef struct phub_store_options phub_store_options;
typedef struct phub_store phub_store;
typedef struct phub_store_thread phub_store_thread;

#define PHUB_NO_ROW UINT64_MAX /* no row has this number */

PHUB_API phub_code phub_store_options_create(phub_store_options** options);
PHUB_API phub_code phub_store_options_destroy(phub_store_options* options);

/* Sets an option by its name, as phub_options_set does. All processes set the same.
 *   threads          of each process; each has a phub_store_thread                1
 *   gather_again     the share of an iteration's accesses that do not come as recorded, from
 *                    which on the store records again by itself: 0.2; 0: never    0
 * What is made of a recorded iteration; none of these changes a bit of a result:
 *   placement        0: rows that the same processes access do not lie together   1
 *   numa             0: threads are not pinned to cores                           1
 *   static_index     0: every row is found by a hash map, with locks              1
 *   batches          in which rows of a table come, at most; 1 to 64              8
 *   push_early       1: a batch goes with its last recorded access, before the clock; in lock-step
 *                    only. An update that comes later waits until all other threads, of all
 *                    processes, are in phub_store_clock, phub_store_finish or phub_store_table:
 *                    so an iteration has no barrier of its own. After a lost rank it ends the
 *                    store                                                        0 */
PHUB_API phub_code phub_store_options_set(phub_store_options* options, const char* name,
                                          const char* value);
PHUB_API phub_code phub_store_options_set_number(phub_store_options* options, const char* name,
                                                 int64_t value);

/* Adds the next table: rows of `columns` values of `type` ("f32", "f64", "i32" or "i64"), which an
 * update changes by `operation` ("add", "multiply", "min", "max"; "or", of whole numbers); it
 * begins with the operation's identity. All processes add the same ones; they are numbered from 0.
 * `fixed` not 0: this process will access rows that it recorded, and update those that it recorded
 * as updated; only these travel. A call that strays from that is right, and takes as long as a
 * phub_store_finish: it waits until all other threads, of all processes, have come to a clock.
 * `spare`: places for rows that are added later, in lock-step, not of a table that is fixed.
 * phub_store_create says what is wrong with a table. */
PHUB_API phub_code phub_store_options_add_table(phub_store_options* options, const char* name,
                                                uint64_t rows, uint32_t columns, const char* type,
                                                const char* operation, int fixed, uint64_t spare);

/* The options of `worker` count but for its keys: the server, the job's name, rank (which must be
 * given) and world_size, consistency, slack, on_loss, limits. Joins nothing yet: the first access
 * or phub_store_finish does, and waits for all ranks. The options may be changed and destroyed
 * afterwards.
 *
 * With phub_options_set_saver the store is saved from its first phub_store_finish on, if the box
 * keeps checkpoints: the saver is called in phub_store_clock or phub_store_table, by one thread
 * while all threads of the process are in that call, with the number of clocks in place of a round.
 * Of the store it calls nothing but phub_store_clocks. A run that is to go on has as many ranks and
 * makes the same calls up to its first phub_store_finish, which goes on: tables, phub_store_clocks
 * and phub_store_restored are those of the checkpoint then. It needs on_loss "fail", and neither
 * gather_again nor spare rows; rows are placed once. */
PHUB_API phub_code phub_store_create(const phub_options* worker, const phub_store_options* options,
                                     phub_store** store);
/* Leaves the job, when the last phub_store_thread is destroyed, too. */
PHUB_API phub_code phub_store_destroy(phub_store* store);
/* Ends the store as if its process had died: for the others its rank is lost, and the next store
 * goes on from the checkpoint, if there is one. For a program that fails and lives on. Any thread,
 * also while others are in a call: what they wait for, and every later phub_store_clock,
 * phub_store_finish and phub_store_table, is PHUB_FENCED. phub_store_destroy frees it. */
PHUB_API phub_code phub_store_abandon(phub_store* store);

/* The rank of this process and the number of ranks, by which an application divides its data.
 * Either may be null. */
PHUB_API phub_code phub_store_rank(const phub_store* store, uint32_t* rank, uint32_t* world_size);

/* Copies the whole state of a table, row after row, with all that was clocked. `bytes` are those of
 * its rows and spare rows. All ranks call it, after equally many clocks. A table with spare rows is
 * copied place after place, with the identity where there is no row. */
PHUB_API phub_code phub_store_table(phub_store* store, uint32_t table, void* into, size_t bytes);
/* The row in each of its `count` places, which are its rows and spare rows; PHUB_NO_ROW: none. */
PHUB_API phub_code phub_store_rows(const phub_store* store, uint32_t table, uint64_t* rows,
                                   size_t count);

/* The number of clocks so far; of a store that goes on from a checkpoint, those before count from
 * its first phub_store_finish on. Any thread. */
PHUB_API phub_code phub_store_clocks(const phub_store* store, uint64_t* clocks);
/* Gives what this process's saver saved as `name` after so many clocks, where phub_store_finish
 * went on from a checkpoint. The bytes are valid until phub_store_destroy. Any thread.
 * PHUB_NOT_FOUND: the store began, or there is no such entry. */
PHUB_API phub_code phub_store_restored(const phub_store* store, const char* name,
                                       const void** bytes, size_t* size);

typedef struct phub_store_counters {
  size_t size;             /* set it to sizeof(phub_store_counters) */
  uint64_t in_sequence;    /* accesses since rows were placed last that came as recorded */
  uint64_t by_index;       /* others, of rows that the thread is known to access */
  uint64_t dynamic;        /* others: by a hash map with locks */
  uint64_t places, cached; /* rows of threads that have a place; of these, with a copy */
  uint64_t clocks;
  uint64_t placed;  /* times that rows were placed */
  uint64_t widened; /* times that a table ceased to be fixed, until rows were placed anew */
  /* These are for the present job, as in phub_stats. */
  uint64_t pushes, chunks_pushed, chunks_received, bytes_copied, sleeps, reconnections;
  uint64_t pushed_early; /* batches that went before the clock, in the present job */
} phub_store_counters;
PHUB_API phub_code phub_store_stats(const phub_store* store, phub_store_counters* counters);

/* The calling thread becomes thread `number` of the store, from 0; each once at a time. One that is
 * destroyed makes no more clocks: the next clock or finish of others is PHUB_INVALID. When all have
 * been there and are gone, new ones may be made. */
PHUB_API phub_code phub_store_thread_create(phub_store* store, uint32_t number,
                                            phub_store_thread** thread);
/* Any thread; a call in progress goes on. */
PHUB_API phub_code phub_store_thread_destroy(phub_store_thread* thread);

/* Record the calls of an iteration, until phub_store_finish: of a virtual one, in which they do
 * nothing else, reads leave `into` as it is, and the program must not change anything of its own;
 * or of a real one. May be called again when the accesses have changed. phub_store_finish is called
 * by all threads of all processes, with everything clocked, and places the rows. */
PHUB_API phub_code phub_store_begin_virtual(phub_store_thread* thread);
PHUB_API phub_code phub_store_begin_gathering(phub_store_thread* thread);
PHUB_API phub_code phub_store_finish(phub_store_thread* thread);
/* *is_virtual: 1 or 0. */
PHUB_API phub_code phub_store_is_virtual(const phub_store_thread* thread, int* is_virtual);

/* Reads `count` rows, one after another, into `bytes` bytes of values of `type`, which must be the
 * table's: the state after the last clock, with what this thread has updated since. Aligned to 4
 * bytes. */
PHUB_API phub_code phub_store_read(phub_store_thread* thread, uint32_t table, const uint64_t* rows,
                                   size_t count, const char* type, void* into, size_t bytes);
/* row <- row, operation, values: of `count` rows, in their order. The values are copied. */
PHUB_API phub_code phub_store_update(phub_store_thread* thread, uint32_t table,
                                     const uint64_t* rows, size_t count, const char* type,
                                     const void* by, size_t bytes);
/* All threads of the process call it. Their updates go out with the last of them; reads after it
 * have the updates of all ranks, in lock-step. */
PHUB_API phub_code phub_store_clock(phub_store_thread* thread);

/* Asks for one more or one less row in a table with spare rows, of any number but PHUB_NO_ROW. From
 * the second clock behind the call on, at the latest, all ranks have it, from the same clock on.
 * PHUB_INVALID: the table has the row already, or has it not; no spare row is left. */
PHUB_API phub_code phub_store_add_row(phub_store_thread* thread, uint32_t table, uint64_t row);
PHUB_API phub_code phub_store_delete_row(phub_store_thread* thread, uint32_t table, uint64_t row);
/* *has_row: 1 or 0. */
PHUB_API phub_code phub_store_has_row(const phub_store_thread* thread, uint32_t table, uint64_t row,
                                      int* has_row);

/* ---- Jobs, from outside. `server` is HOST:PORT; PHUB_TOKEN or PHUB_TOKEN_FILE has
 * the token, if it asks for one. A call takes up to 10 s. ---- */

typedef struct phub_job {
  size_t size;    /* set it to sizeof(phub_job) */
  char state[16]; /* assembling, running, paused or failed */
  uint64_t keys, chunks, elements, memory_bytes;
  uint64_t completed_round; /* of the slowest chunk */
  double rounds_per_s;      /* over the last seconds */
  uint32_t ranks_live, ranks_lost;
  uint32_t ranks_waited_for; /* ranks that the oldest round lacks */
  uint32_t reserved;
  char error[256]; /* of a job that failed */
} phub_job;
/* PHUB_NOT_FOUND, PHUB_UNAVAILABLE, PHUB_TIMEOUT. */
PHUB_API phub_code phub_job_status(const char* server, const char* job, phub_job* status);
/* Ends a job: its workers' calls fail with PHUB_NOT_FOUND or PHUB_FENCED. */
PHUB_API phub_code phub_job_remove(const char* server, const char* job);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif /* PHUB_WORKER_PHUB_H */
