/* CheckpointWriter: what it makes durable, and in which order. */

#ifdef MANIFEST_FIRST
#define THEN_AFTER_DATA 4
#define THEN_AFTER_MANIFEST 2
#define THEN_AFTER_NAMES 8
#else
#define THEN_AFTER_DATA 2
#define THEN_AFTER_MANIFEST 8
#define THEN_AFTER_NAMES 4
#endif

inline find_older() { /* i: EPOCHS * ROUNDS if there is none */
  i = 0;
  do
  :: i < EPOCHS * ROUNDS && (i == writing || !exists(i)) -> i++
  :: else -> break
  od
}

inline clear(id) {
  checkpoint[id].data = kAbsent;
  checkpoint[id].names = kAbsent;
  checkpoint[id].folder = kAbsent;
  checkpoint[id].manifest = kAbsent;
  checkpoint[id].ranks = 0
}

proctype writer() {
end:
  do
  :: d_step {
      step == 1 ->
      checkpoint[writing].data = kUnsynced;
      checkpoint[writing].names = kUnsynced;
#ifdef PRUNE_FIRST
      find_older();
      if
      :: i < EPOCHS * ROUNDS -> clear(i)
      :: else
      fi;
#endif
      step = THEN_AFTER_DATA
    }
  :: d_step {
      step == 2 ->
#ifndef NO_FSYNC
      checkpoint[writing].data = kDurable;
#endif
      step = 3
    }
  :: d_step { step == 3 -> checkpoint[writing].names = kDurable; step = THEN_AFTER_NAMES }
  :: d_step { step == 4 -> checkpoint[writing].folder = kUnsynced; step = 5 }
  :: d_step {
      step == 5 ->
#ifndef NO_FOLDER_SYNC
      checkpoint[writing].folder = kDurable;
#endif
      step = 6
    }
  :: d_step { step == 6 -> checkpoint[writing].manifest = kUnsynced; step = 7 }
  :: d_step { step == 7 -> checkpoint[writing].manifest = kDurable; step = THEN_AFTER_MANIFEST }
  :: d_step { /* prune; the manifest's removal is synced before anything else of it goes */
      step == 8 ->
      find_older();
      if
      :: i < EPOCHS * ROUNDS -> clear(i)
      :: else -> /* snapshot_written */
        durable_round = round_of(writing);
        reported = max(reported, durable_round);
        saving = 0;
        writing = 0;
        snapshot_round = 0;
        step = 0
      fi
    }
  od
}
