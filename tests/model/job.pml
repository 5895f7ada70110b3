/* A job in lock-step on a box that saves it: join, fence, commit, snapshot, restore.
 *
 * Every option of a process is one step. Names are those of the code: phub/core/ (boundary.cc, lock_step.*,
 * snapshot.*), phub/job/ (membership.cc, changes.cc, save_desk.cc, saved_jobs.cc), phub/checkpoint/writer.cc.
 *
 * What is smaller than the box:
 * - Results reach the workers as soon as a chunk completes its round. A worker that was fenced goes on sending.
 * - Ranks are alike, so the one that is lost is always the last. Member WORKERS is its successor.
 * - A worker that is killed and one that is stopped until after it was replaced are the same here: what
 *   counts is that the box gives it up, while what it has sent, or still sends, is under way.
 * - After a crash of the box all workers join again.
 *
 * Parameters: WORKERS (2 or 3), CORES (1 or CHUNKS), ROUNDS, CRASHES (of the box and of workers, together);
 * ON_LOSS_WAIT: policy wait instead of shrink; SLOTS_BELONG_TO_WORKER: as over shared memory. `run` has the mutants. */
#ifndef WORKERS
#define WORKERS 3
#endif
#define CHUNKS 2
#ifndef CORES
#define CORES CHUNKS
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

#define MEMBERS (WORKERS + 1) /* incarnations: a worker of each rank, and the successor */
#define LAST (WORKERS - 1)
#define SUCCESSOR WORKERS
#define EPOCHS (CRASHES + 1)
#define kNever 15

#define bit(m) (1 << (m))
#define has(set, m) (((set) >> (m)) & 1)
#define rank_of(m) ((m) == SUCCESSOR -> LAST : (m))
#define incarnations_of(r) ((r) == LAST -> bit(LAST) | bit(SUCCESSOR) : bit(r))
#define core_of(c) (CORES == 1 -> 0 : (c))
#define max(a, b) ((a) > (b) -> (a) : (b))
#define min(a, b) ((a) < (b) -> (a) : (b))

mtype = { kIdle, kHolding, kCommitting, kNothing, kHold, kCommit };

typedef Chunk {
  byte round;                 /* in progress */
  byte applied;               /* the last round whose update is in the parameters */
  byte sent;                  /* members whose contribution is on its way to the core */
  byte arrived;               /* members */
  byte attached;              /* members whose queue is open */
  byte first_round[WORKERS];  /* of each rank */
  bit awaited;                /* by a snapshot */
  bit due;
  byte copy;                  /* the snapshot's: what `applied` was */
  /* The log, as far as this chunk's core knows it. */
  byte joined;                /* members */
  byte lost;                  /* members */
  byte last_round;            /* that the lost one took part in */
};
Chunk chunk[CHUNKS];

typedef Core {
  mtype mail;
  byte hold_from;
};
Core core[CORES];

/* Membership. */
mtype phase = kIdle;
byte answers, started;
byte asked;    /* members that have ever asked to join this life of the box */
bit waiting;   /* the successor does, for the end of its predecessor */
byte joins;    /* members that are admitted at the next boundary */
bit losing;    /* the last rank */
bit loss;      /* it is to be lost at the next boundary */
bit snapshot_wanted;
typedef Boundary {
  byte round;
  byte lost;  /* members */
  byte expected_again;
  byte joins;  /* members */
  bit snapshot;
};
Boundary boundary;
byte live;           /* members */
byte running;        /* members whose process has had its answer: also when they are lost */
byte expected;       /* ranks */
byte last_round;     /* of the last rank's lost incarnation */
byte from[MEMBERS];  /* first_round */
bit assembled;

/* SaveDesk and SavedJobs. */
byte epoch;
bit has_begun, saving;
byte snapshot_round, cores_snapped;
byte durable_round;
byte restored_round, restored_ranks;

/* The directory. Of what is written, and of names: */
#define kAbsent 0
#define kUnsynced 1 /* there; after a loss of power perhaps not */
#define kDurable 2
typedef Checkpoint {
  byte data;      /* of the files */
  byte names;     /* of the files */
  byte folder;    /* its name without "writing-" */
  byte manifest;  /* its name without ".new" */
  byte ranks;     /* that are expected */
};
Checkpoint checkpoint[EPOCHS * ROUNDS]; /* by epoch, then by round */
#define id_of(epoch, round) (((epoch) - 1) * ROUNDS + (round) - 1)
#define round_of(id) ((id) % ROUNDS + 1)
#define exists(id) (checkpoint[id].folder && checkpoint[id].manifest)
byte step, writing; /* of the writer; a checkpoint */

/* Of the proof. */
byte crashes;
byte reported; /* the highest durable_round that anybody was told */
hidden byte i, j; /* within a step */

#define arrived_of(c, r) (chunk[c].arrived & incarnations_of(r))
#define lacks(c, r) (chunk[c].first_round[r] <= chunk[c].round && !arrived_of(c, r))
#if WORKERS == 2
#define lacks_any(c) (lacks(c, 0) || lacks(c, 1))
#else
#define lacks_any(c) (lacks(c, 0) || lacks(c, 1) || lacks(c, 2))
#endif

#include "core.pml"
#include "members.pml"
#include "checkpoint.pml"
#include "faults.pml"

/* Nothing moves any more: everybody has what they wanted. */
proctype end_of_all() {
  timeout ->
  assert(has_begun && phase == kIdle && !joins && !waiting && assembled);
  assert(chunk[0].round == ROUNDS + 1 && chunk[1].round == ROUNDS + 1);
  assert(durable_round == ROUNDS && !saving)
}

init {
  byte k;
  atomic {
    for (k : 0 .. CORES - 1) { core[k].mail = kNothing; run core_loop(k) }
    for (k : 0 .. CHUNKS - 1) { run chunk_loop(k) }
    for (k : 0 .. MEMBERS - 1) { run member(k) }
    run control();
    run writer();
    run faults();
    run end_of_all()
  }
}
