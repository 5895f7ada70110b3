/* The client library for C and whatever can call C: what a training process links or loads
 * (libphub_worker.so.0). worker.h is the same for C++.
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
 * Errors. Every function that can fail returns a phub_code, and PHUB_OK (0) if it did not. A
 * message for people is then in phub_last_error(). Nothing is written to an output argument on
 * failure. No C++ exception and no signal comes out of this library, whatever handles, orders, keys
 * and null pointers it is given; what it cannot check is that a pointer that is not null points to
 * what the function asks for.
 *
 * Handles are numbers in the shape of a pointer: never dereferenced, never used twice. One that is
 * null, was destroyed, or is of another type is PHUB_BAD_HANDLE. Destroying one that other
 * threads are using is safe: their calls end, soon and with an error, and what it owned goes with
 * the last.
 *
 * Threads. Any thread may call anything; calls for one key are made in the order push, wait. A
 * completion (phub_push_then) is called on a thread of the library's, one per worker, one at a
 * time; within it, calls that wait or destroy are PHUB_WRONG_THREAD. After fork() the child cannot
 * use the parent's handles (PHUB_WRONG_THREAD): it makes its own.
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

/* Programs that were compiled with another number cannot use this library. Functions, codes and
 * options may be added, and structs may grow at their end, under the same number. */
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
  PHUB_UNAUTHORIZED = 6, /* the server does not let this process in */
  PHUB_FENCED = 7,       /* this worker left, was replaced, or lost its lease */
  PHUB_RANK_LOST = 8,    /* another rank is gone, and the job's policy is to fail */
  PHUB_NON_FINITE = 9,   /* a NaN or an infinity in a gradient, and the job's policy is to stop */
  PHUB_TIMEOUT = 10,
  PHUB_UNAVAILABLE = 11, /* the server is not there */
  PHUB_INTERNAL = 12,
  PHUB_BAD_HANDLE = 13,
  PHUB_WRONG_THREAD = 14
} phub_code;

/* The message of this thread's last call that failed: which function, what was wrong, what to do.
 * Never null. Valid until this thread's next call that fails. */
PHUB_API const char* phub_last_error(void);

/* "timeout" for PHUB_TIMEOUT; "unknown" for a number that is no code. */
PHUB_API const char* phub_code_name(int code);

PHUB_API const char* phub_version(void); /* of the library: "0.1.0" */
PHUB_API int phub_abi_version(void);     /* its PHUB_ABI_VERSION */

/* ---- Options: what a job is, and how this process takes part in it. ---- */

PHUB_API phub_code phub_options_create(phub_options** options);

/* As above, with what launchers set: PHUB_SERVER, PHUB_JOB, PHUB_TRANSPORT, PHUB_MIN_RANKS,
 * PHUB_WORKER_TRACE; rank and world size from RANK/WORLD_SIZE, OMPI_COMM_WORLD_RANK/_SIZE or
 * SLURM_PROCID/SLURM_NTASKS.
 * PHUB_INVALID: a value is no number, or the rank is outside the world. */
PHUB_API phub_code phub_options_from_environment(phub_options** options);

PHUB_API phub_code phub_options_destroy(phub_options* options);

/* Sets an option by its name. PHUB_INVALID: no such option (the message has the nearest), or no
 * number where one is needed. Whether values make sense together is checked by phub_worker_create.
 *   server              HOST:PORT                                              127.0.0.1:7717
 *   job                 letters, digits, '.', '_', '-'
 *   transport           auto, shm, tcp or verbs; the same for all ranks        auto
 *   rank                -1: the server chooses                                 -1
 *   replace             1: take the rank over from who has it now              0
 *   await_ranks         0: phub_worker_create does not wait for other ranks    1
 *   connect_timeout_ms  how long to wait for the server                        5000
 *   wait_timeout_ms     of phub_wait and phub_barrier; 0: the job's policy     0
 *   silence_limit_ms    a server that answers nothing for so long is gone      60000
 *   spin_us             before a wait sleeps; -1: where CPUs are left over     -1
 *   local_world_size    ranks of the job on this host; 0: over shm all, else 1 0
 *   trace               file for the exchange's trace (ui.perfetto.dev); "": none
 *   trace_events        that it keeps, the last ones; 48 bytes each            200000
 *   world_size          ranks that are there from the first round on           1
 *   min_ranks           that it begins with if not all come in join_limit_ms;
 *                       0: world_size                                          0
 *   max_ranks           that there is memory for; 0: world_size                0
 *   chunk_elements      a multiple of 32                                       8192
 *   optimizer           none (all-reduce), sgd, momentum, nesterov, adam ...   none
 *   gradient_dtype      f32, bf16 or f16                                       f32
 *   parameter_dtype     f32, bf16 or f16: what comes back                      f32
 *   reduction           sum; mean: times float(1/n), n ranks that took part    sum
 *   work                all, sum or none (benchmarks)                          all
 *   consistency         bsp (rounds), ssp or async (applied as they come)      bsp
 *   slack               ssp: how many rounds a rank may be ahead               0
 *   initial             zeros, or broadcast: rank 0 calls phub_broadcast       zeros
 *   on_loss             shrink, wait or fail, when a rank is lost              shrink
 *   on_nonfinite        stop, exclude or pass                                  stop
 *   lease_ms            a process that says nothing for so long is lost        3000
 *   progress_limit_ms   so is one whose gradients do not come                  60000
 *   wait_limit_ms       on_loss wait: how long the job pauses                  60000
 *   join_limit_ms       how long the first ranks wait for the last             60000 */
PHUB_API phub_code phub_options_set(phub_options* options, const char* name, const char* value);
PHUB_API phub_code phub_options_set_number(phub_options* options, const char* name, int64_t value);

/* Adds the next key. All ranks add the same ones. */
PHUB_API phub_code phub_options_add_key(phub_options* options, const char* name, uint64_t elements);

/* Of a key that was added: its priority where something has to wait (higher goes first), and what
 * the job's learning rate and weight decay are multiplied with. Otherwise 0, 1 and 1. */
PHUB_API phub_code phub_options_tune_key(phub_options* options, size_t key, int32_t priority,
                                         double lr_scale, double decay_scale);

/* A hyperparameter, from round 1 on, or from a later round on, by ascending round. Names are
 * checked when the job is made; one that the optimizer does not use has no effect.
 *   lr                  all                                 0.01; adam, adamw: 0.001
 *   weight_decay        all                                 0; adamw: 0.01
 *   momentum            momentum, nesterov                  0.9
 *   dampening           momentum                            0
 *   beta1, beta2        adam, adamw                         0.9, 0.999
 *   eps                 adam, adamw, adagrad, rmsprop       1e-8; adagrad: 1e-10
 *   alpha               rmsprop                             0.99
 *   rmsprop_momentum    rmsprop; cannot change later        0
 *   lr_decay            adagrad                             0
 *   grad_scale          gradients arrive multiplied by it   1 */
PHUB_API phub_code phub_options_set_hyper(phub_options* options, const char* name, double value);
PHUB_API phub_code phub_options_schedule_hyper(phub_options* options, uint64_t round,
                                               const char* name, double value);

/* ---- A worker: one rank of a job. ---- */

/* Joins the job, and makes it if it is not there; returns when all ranks of world_size are there
 * (await_ranks 0: at once; then the first wait is for them). Waits for up to connect_timeout_ms +
 * join_limit_ms: once join_limit_ms is over, min_ranks of them are enough, and fewer are
 * PHUB_RANK_LOST, with a message that names who is missing. A job that is under way is joined
 * without waiting for others. The options may be changed and destroyed afterwards.
 * PHUB_UNAVAILABLE, PHUB_INVALID, PHUB_MISMATCH, PHUB_TAKEN, PHUB_FULL, PHUB_UNAUTHORIZED. */
PHUB_API phub_code phub_worker_create(const phub_options* options, phub_worker** worker);

/* Leaves the job, unless phub_leave did, and gives everything back; pointers to gradients and
 * parameters end here. Calls of other threads end at once, and completions that are due are called,
 * with PHUB_FENCED. PHUB_OK even if the server could not be told within 2 s (it notices by itself).
 */
PHUB_API phub_code phub_worker_destroy(phub_worker* worker);

/* The others go on without this rank; no policy is triggered, unless the job has not begun (not all
 * ranks were there, or the initial parameters): then it is a loss. Every later call is PHUB_FENCED.
 */
PHUB_API phub_code phub_leave(phub_worker* worker);

typedef struct phub_info {
  size_t size; /* set it to sizeof(phub_info): what the caller knows is filled */
  uint32_t rank;
  uint32_t incarnation;
  uint32_t world_size;
  uint32_t initial_counts; /* 1: what this worker gives to phub_broadcast begins the job */
  uint64_t first_round; /* the first one that this worker takes part in; 1 unless it joined later */
  size_t keys;
} phub_info;
PHUB_API phub_code phub_worker_info(const phub_worker* worker, phub_info* info);

/* The transport, over what, from which memory: a sentence for people, cut to `size` bytes. */
PHUB_API phub_code phub_worker_connection(const phub_worker* worker, char* text, size_t size);

/* ---- Keys. `key` out of range: PHUB_INVALID. ---- */

PHUB_API phub_code phub_key_by_name(const phub_worker* worker, const char* name, size_t* key);
/* `name` belongs to the worker. Either may be null. */
PHUB_API phub_code phub_key_info(const phub_worker* worker, size_t key, const char** name,
                                 uint64_t* elements);

/* Where a key's gradient goes: elements x the size of gradient_dtype, writable unless lent. The
 * same until the worker is destroyed. Over shared memory it is the memory that the server sums. */
PHUB_API phub_code phub_gradient(phub_worker* worker, size_t key, void** memory, size_t* bytes);
/* A key's parameters (optimizer none: the sum or mean), in parameter_dtype. The same pointer until
 * the worker is destroyed; its contents are valid from phub_wait to the next push of the key. It
 * can be read and not written, whatever the transport: writing there is a SIGSEGV. So is touching
 * it, or a gradient, after the worker was destroyed and the last call for it has returned. */
PHUB_API phub_code phub_parameters(const phub_worker* worker, size_t key, const void** memory,
                                   size_t* bytes);

/* Memory of the caller's own, of the sizes above, instead (null: none): a push then copies from
 * `gradient`, a wait copies into `parameters`. Until it is unset or the worker destroyed: these
 * calls return when nothing is copied any more. */
PHUB_API phub_code phub_use_memory(phub_worker* worker, size_t key, const void* gradient,
                                   void* parameters);

/* ---- The exchange. These waits sleep; a failure of the job or the server ends them. ---- */

/* Initial parameters, f32, of all keys one after another: rank 0's count, the others may pass null
 * and 0. Returns when they are everywhere; `initial` is not used afterwards. Where they do not
 * count (phub_info.initial_counts: another rank, a job that is under way, or one whose `initial` is
 * zeros) it waits for the job's present parameters. */
PHUB_API phub_code phub_broadcast(phub_worker* worker, const float* initial, size_t elements);

/* Lends the key's gradient and gives its parameters up. Where something has to wait, on this side
 * or at the server, higher priorities go first: the key's own (phub_options_tune_key), to which
 * `priority` is added on this side, for this push. Does not wait, unless the key's previous result
 * is not here yet. Every rank pushes every key once a round. */
PHUB_API phub_code phub_push(phub_worker* worker, size_t key, int32_t priority);
/* A gradient of zero: nothing is sent, and the rank counts as having taken part. */
PHUB_API phub_code phub_push_null(phub_worker* worker, size_t key);

/* As phub_push, and calls `completion` once: with PHUB_OK when the result of this push is here (as
 * phub_wait would return), or with the code and message of what went wrong. `message` is "" for
 * PHUB_OK and lives as long as the call. May be called before phub_push_then returns. Not called if
 * phub_push_then fails. It may push, and must neither throw nor wait for the calling thread. */
typedef void (*phub_completion)(void* user_data, size_t key, uint64_t round, phub_code code,
                                const char* message);
PHUB_API phub_code phub_push_then(phub_worker* worker, size_t key, int32_t priority,
                                  phub_completion completion, void* user_data);

/* Until the key's result is here; a key that was not pushed since: its present parameters.
 * PHUB_INVALID: others have waited for a tenth of progress_limit_ms (5 s at most) for a key that
 * this rank passed over; the message names it, and it can still be pushed. PHUB_TIMEOUT (the
 * message names the missing ranks), PHUB_RANK_LOST, PHUB_NON_FINITE, PHUB_FENCED, PHUB_UNAVAILABLE
 * (the server is gone, or has answered nothing for silence_limit_ms): but for PHUB_INVALID and
 * PHUB_TIMEOUT, the worker is done. */
PHUB_API phub_code phub_wait(phub_worker* worker, size_t key);
PHUB_API phub_code phub_wait_all(phub_worker* worker);
/* *ready: 1 if phub_wait would not wait, else 0. */
PHUB_API phub_code phub_try_wait(phub_worker* worker, size_t key, int* ready);
/* Moves what can move without waiting. *outstanding: keys whose result is not here yet. */
PHUB_API phub_code phub_poll(phub_worker* worker, size_t* outstanding);

/* Waits, and copies the key's parameters, `bytes` of them, into memory that stays as it is. */
PHUB_API phub_code phub_pull(phub_worker* worker, size_t key, void* into, size_t bytes);

/* The last round whose result is here. */
PHUB_API phub_code phub_round(const phub_worker* worker, size_t key, uint64_t* round);

/* Hyperparameters from *round on, for all keys from the same one. `round` NULL, or *round 0: from
 * the next push on, that is, from the first round in which this rank has pushed no key. *round
 * becomes the round that they got: a later one where chunks of it are complete already, or where a
 * change was made beyond it. Rank 0 only. */
PHUB_API phub_code phub_set_hyper(phub_worker* worker, const char* const* names,
                                  const double* values, size_t count, uint64_t* round);

/* What holds up a wait that has lasted for a tenth of progress_limit_ms (5 s at most), as the
 * server sees it: "rank 1 has not sent key 'w2' of round 3 for 7.5 s"; "" if nothing does. Cut to
 * `size` bytes. The same is said on stderr, once for each key and round. */
PHUB_API phub_code phub_waits_for(const phub_worker* worker, char* text, size_t size);

/* Waits for all live ranks, through the server's control port. */
PHUB_API phub_code phub_barrier(phub_worker* worker);

typedef struct phub_stats {
  size_t size; /* set it to sizeof(phub_stats) */
  uint64_t pushes;
  uint64_t chunks_pushed, chunks_received;
  uint64_t bytes_copied; /* between the caller's memory and the library's */
  uint64_t sleeps;       /* times that a wait had to sleep */
  uint64_t reconnections;
} phub_stats;
PHUB_API phub_code phub_worker_stats(const phub_worker* worker, phub_stats* stats);

/* ---- GeePS: parameters and local data in the memory of a device, and what does not fit there in
 * host memory, moved ahead of time in the background. worker/geeps/cache.h is the same for C++, and
 * says more about every call.
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
 * Errors. PHUB_INVALID, a wrong call, which changes nothing; PHUB_FULL, device memory;
 * PHUB_TIMEOUT; what a device or the job failed with, which every later call fails with. ---- */

typedef struct phub_device phub_device;
typedef struct phub_geeps_options phub_geeps_options;
typedef struct phub_geeps phub_geeps;

/* Host memory within a budget that copies move at a set speed: for workers without a GPU. Data
 * pointers are host memory. 0 bytes per second: as fast as this machine copies; otherwise at least
 * 1000. PHUB_FULL. */
PHUB_API phub_code phub_device_open_host(uint64_t budget_bytes, double copy_bytes_per_second,
                                         uint64_t copy_latency_ns, phub_device** device);
/* A GPU, of which `budget_bytes` are taken at once. Data pointers are device memory, for any stream
 * as soon as the call that asked for them returns. No call waits for streams of the caller's: they
 * must have finished with a buffer before it is given back.
 * PHUB_UNAVAILABLE: there is no such device, no driver, or the library was built without CUDA. */
PHUB_API phub_code phub_device_open_cuda(int index, uint64_t budget_bytes, phub_device** device);
/* Its memory goes with the last phub_geeps that uses it. */
PHUB_API phub_code phub_device_close(phub_device* device);

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
 *   prefetch        0: buffers are filled when they are asked for            1
 *   strict          1: a call outside the sequence is an error               0
 *   infer_clocks    1: a table that is not clocked in the sequence is, by its last update   0
 *   poison          1: buffers that are given back become NaN                0
 *   partitions      of the tables, each with its own moving threads          1
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
/* Of a table of parameters: whether reads contain this worker's updates that were not clocked yet
 * (jobs that add updates to the parameters only), and the largest staleness that a read may ask
 * for, in clocks. Otherwise 0 and 0. */
PHUB_API phub_code phub_geeps_options_tune_table(phub_geeps_options* options, uint32_t table,
                                                 int read_my_writes, uint32_t max_staleness);

/* Adds a key to a job for every table of parameters, in their order: all keys that it has. */
PHUB_API phub_code phub_options_add_tables(phub_options* options, const phub_geeps_options* tables);

/* A cache of the parameters of the worker's job. From now on it pushes the worker's keys, and
 * phub_push and phub_use_memory are PHUB_INVALID. The options may be changed and destroyed
 * afterwards. PHUB_INVALID: the job's keys are not the tables; PHUB_TAKEN: the worker has a cache.
 */
PHUB_API phub_code phub_geeps_create(phub_device* device, phub_worker* worker,
                                     const phub_geeps_options* options, phub_geeps** geeps);
/* The same without a server, for one process: a thread of the library applies the optimizer. Of the
 * job's options count the keys, the optimizer and what its arithmetic depends on. `initial` has the
 * parameters of all tables one after another; null and 0: zeros. */
PHUB_API phub_code phub_geeps_create_standalone(phub_device* device, const phub_options* job,
                                                const phub_geeps_options* options,
                                                const float* initial, size_t elements,
                                                phub_geeps** geeps);
/* Waits for pushes that are under way; data pointers end here. The worker stays, and may push
 * itself or have another phub_geeps, before the results are here. */
PHUB_API phub_code phub_geeps_destroy(phub_geeps* geeps);

/* The calls of an iteration, recorded: virtually (nothing else happens, buffers have no data) or in
 * a real iteration. phub_geeps_finish places everything by them; what tables hold stays.
 * PHUB_TIMEOUT, results are not here: it can be called again; PHUB_FULL: the sequence before goes
 * on. */
PHUB_API phub_code phub_geeps_begin_virtual(phub_geeps* geeps);
PHUB_API phub_code phub_geeps_begin_gathering(phub_geeps* geeps);
PHUB_API phub_code phub_geeps_finish(phub_geeps* geeps);

typedef struct phub_buffer {
  size_t size; /* set it to sizeof(phub_buffer) */
  float* data; /* the rows in the order of the keys, in device memory; null if recorded only */
  uint64_t rows;
  uint64_t handle; /* for the call that gives it back; never used twice */
  int64_t age;     /* of a read: clocks of every worker that are in it; -1: the job is async */
  uint32_t row_floats;
  uint32_t reserved;
} phub_buffer;

#define PHUB_STALENESS_OF_JOB (-1) /* what the job's consistency gives */

/* Table 1 of GeePS. Rows are named by `count` keys, or are all of the table (null and 0). These
 * wait until the buffer can be used. `staleness` in clocks: 0 is BSP. `fetch` 0: what the rows held
 * is not needed. What was read is not to be written: it may stay there for the next read. */
PHUB_API phub_code phub_geeps_read(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                   size_t count, int64_t staleness, phub_buffer* buffer);
PHUB_API phub_code phub_geeps_pre_update(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                         size_t count, phub_buffer* buffer);
PHUB_API phub_code phub_geeps_local_access(phub_geeps* geeps, uint32_t table, const uint64_t* keys,
                                           size_t count, int fetch, phub_buffer* buffer);

/* These give a buffer back and return at once. `save` 0: what it holds is not needed any more.
 * phub_geeps_discard takes any buffer, nothing is updated or saved. */
PHUB_API phub_code phub_geeps_post_read(phub_geeps* geeps, uint64_t handle);
PHUB_API phub_code phub_geeps_update(phub_geeps* geeps, uint64_t handle);
PHUB_API phub_code phub_geeps_post_local_access(phub_geeps* geeps, uint64_t handle, int save);
PHUB_API phub_code phub_geeps_discard(phub_geeps* geeps, uint64_t handle);

/* The table's updates of this clock are complete: they go out. */
PHUB_API phub_code phub_geeps_table_clock(phub_geeps* geeps, uint32_t table);
/* Until what was clocked is pushed, and its result is here. */
PHUB_API phub_code phub_geeps_wait_all(phub_geeps* geeps);

typedef struct phub_geeps_counters {
  size_t size; /* set it to sizeof(phub_geeps_counters) */
  uint64_t calls, outside_sequence;
  uint64_t prefetched;                     /* buffers that were filled before they were asked for */
  uint64_t stalled_ns;                     /* that calls waited for buffers */
  uint64_t bytes_to_device, bytes_to_host; /* copied in the background */
  uint64_t bytes_staged;                   /* of these, gathered or added by threads of the cache */
  uint64_t bytes_copied_by_caller;         /* within calls, which waited for it */
  uint64_t pushes, pulls;
} phub_geeps_counters;
PHUB_API phub_code phub_geeps_stats(phub_geeps* geeps, phub_geeps_counters* counters);

typedef struct phub_placement {
  size_t size;           /* set it to sizeof(phub_placement) */
  uint64_t pinned_bytes; /* of device memory: what stays there, with its updates */
  uint64_t index_bytes, pool_bytes, reserved_bytes;
  uint64_t total_bytes;
  uint64_t moved_bytes;     /* between host and device in one iteration */
  uint32_t double_buffered; /* 1: every buffer is filled at least one phase ahead */
  uint32_t reserved;
} phub_placement;
/* PHUB_INVALID before phub_geeps_finish. */
PHUB_API phub_code phub_geeps_placement(phub_geeps* geeps, phub_placement* placement);

/* ---- Jobs, without being a part of them. `server` is HOST:PORT. Up to 10 s each. ---- */

typedef struct phub_job {
  size_t size;    /* set it to sizeof(phub_job) */
  char state[16]; /* assembling, running, paused or failed */
  uint64_t keys, chunks, elements, memory_bytes;
  uint64_t completed_round; /* by every chunk */
  double rounds_per_s;      /* over the last seconds */
  uint32_t ranks_live, ranks_lost;
  uint32_t ranks_waited_for; /* that the oldest round lacks */
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
