/* What goes wrong, and the next life of the box: SavedJobs. */

inline reset() {
  phase = kIdle;
  answers = 0; started = 0; asked = 0; waiting = 0; joins = 0; losing = 0; loss = 0; snapshot_wanted = 0;
  boundary.round = 0; boundary.lost = 0; boundary.expected_again = 0; boundary.joins = 0; boundary.snapshot = 0;
  live = 0; running = 0; expected = 0; last_round = 0; assembled = 0;
  saving = 0; snapshot_round = 0; cores_snapped = 0; durable_round = 0;
  step = 0; writing = 0;
  restored_round = 0; restored_ranks = 0;
  i = 0;
  do
  :: i < MEMBERS -> from[i] = 0; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < CORES -> core[i].mail = kNothing; core[i].hold_from = 0; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < CHUNKS ->
    chunk[i].round = 0; chunk[i].applied = 0; chunk[i].sent = 0; chunk[i].arrived = 0; chunk[i].attached = 0;
    chunk[i].awaited = 0; chunk[i].due = 0; chunk[i].copy = 0;
    chunk[i].joined = 0; chunk[i].lost = 0; chunk[i].last_round = 0;
    j = 0;
    do
    :: j < WORKERS -> chunk[i].first_round[j] = 0; j++
    :: else -> break
    od;
    i++
  :: else -> break
  od;
  has_begun = 0
}

/* From the newest checkpoint, if there is one; leftovers of the writer go. */
inline begin_life() {
  epoch++;
  restored_round = 0;
  restored_ranks = bit(WORKERS) - 1;
  i = 0;
  do
  :: i < EPOCHS * ROUNDS && exists(i) ->
    assert(checkpoint[i].data && checkpoint[i].names); /* whatever has a manifest is whole */
    restored_round = round_of(i);
    restored_ranks = checkpoint[i].ranks;
    checkpoint[i].folder = kDurable; /* raise_epoch() syncs the folder of the job */
#ifndef NO_SYNC_AT_RESTORE
    checkpoint[i].manifest = kDurable;
#endif
    i++
  :: i < EPOCHS * ROUNDS && !exists(i) -> clear(i); i++
  :: else -> break
  od;
  durable_round = restored_round;
  assert(durable_round >= reported); /* what was said to be safe is there */
  reported = durable_round;
  expected = restored_ranks;
  i = 0;
  do
  :: i < CHUNKS ->
    chunk[i].round = restored_round + 1;
    chunk[i].applied = restored_round;
    j = 0;
    do
    :: j < WORKERS ->
#ifdef FORGET_RANKS
      chunk[i].first_round[j] = (restored_round == 0 -> 1 : kNever);
#else
      chunk[i].first_round[j] = (has(expected, j) -> restored_round + 1 : kNever);
#endif
      j++
    :: else -> break
    od;
    i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < CORES -> core[i].hold_from = kNever; i++
  :: else -> break
  od;
  has_begun = 1
}

/* What is not synced may be on the disk, or not. */
inline lose_power(what) {
  if
  :: what == kUnsynced -> what = kAbsent
  :: what == kUnsynced -> what = kDurable
  :: else
  fi
}

proctype faults() {
  byte id;
end:
  do
  :: d_step { !has_begun -> begin_life() }
  :: d_step { crashes < CRASHES && has(live, LAST) && !losing -> crashes++; losing = 1; loss = 1 }
  :: atomic { /* kill -9 */ has_begun && crashes < CRASHES -> crashes++; d_step { reset() } }
  :: atomic {
      has_begun && crashes < CRASHES -> crashes++;
      do
      :: id < EPOCHS * ROUNDS ->
        lose_power(checkpoint[id].data);
        lose_power(checkpoint[id].names);
        lose_power(checkpoint[id].folder);
        lose_power(checkpoint[id].manifest);
        id++
      :: else -> id = 0; break
      od;
      d_step { reset() }
    }
  od
}
