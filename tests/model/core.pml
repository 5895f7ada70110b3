/* What a core does with its chunks: CoreJob, LockStep, Snapshot. */

/* Whoever the log says took part in the chunk's round is in it, and nobody else. */
inline check_participants(c) {
  i = 0;
  do
  :: i < MEMBERS ->
    assert(has(chunk[c].arrived, i) ==
           (has(chunk[c].joined, i) && from[i] <= chunk[c].round &&
            (!has(chunk[c].lost, i) || chunk[c].round <= chunk[c].last_round)));
    i++
  :: else -> break
  od
}

inline reached(c) {
  if
  :: chunk[c].awaited && chunk[c].round >= snapshot_round -> chunk[c].awaited = 0; chunk[c].due = 1
  :: else
  fi
}

inline copy_chunk(c) {
  chunk[c].copy = chunk[c].applied;
  chunk[c].due = 0;
  /* i: CHUNKS if the core has copied all that it has */
  i = 0;
  do
  :: i < CHUNKS && (core_of(i) != core_of(c) || !(chunk[i].due || chunk[i].awaited)) -> i++
  :: else -> break
  od;
  if
  :: i == CHUNKS -> cores_snapped++
  :: else
  fi
}

inline close(c) {
#ifndef SNAPSHOT_AFTER_R
  if
  :: chunk[c].due -> copy_chunk(c)
  :: else
  fi;
#endif
  check_participants(c);
  assert(chunk[c].applied == chunk[c].round - 1); /* no round is lost, and none applied twice */
  chunk[c].applied = chunk[c].round;
  chunk[c].round++;
  chunk[c].arrived = 0;
  reached(c)
}

inline hold(k) {
  core[k].mail = kNothing;
  core[k].hold_from = 0;
  i = 0;
  do
  :: i < CHUNKS ->
    if
    :: core_of(i) == k ->
      core[k].hold_from = max(core[k].hold_from, chunk[i].round);
      started = max(started, (chunk[i].arrived -> chunk[i].round : 0))
    :: else
    fi;
    i++
  :: else -> break
  od;
  boundary.round = max(boundary.round, core[k].hold_from);
#ifdef NO_HOLD
  core[k].hold_from = kNever;
#endif
  answers++
}

inline lose(c) {
  if
  :: boundary.lost ->
#ifndef NO_FENCE
    chunk[c].attached = chunk[c].attached & ~boundary.lost;
    chunk[c].sent = chunk[c].sent & ~boundary.lost;
#endif
#ifdef SLOTS_BELONG_TO_WORKER
    chunk[c].arrived = chunk[c].arrived & ~boundary.lost;
#endif
    chunk[c].last_round = (chunk[c].arrived & boundary.lost -> chunk[c].round : chunk[c].round - 1);
    chunk[c].lost = chunk[c].lost | boundary.lost;
    chunk[c].first_round[LAST] = boundary.expected_again
  :: else
  fi
}

inline admit(c) {
  chunk[c].attached = chunk[c].attached | boundary.joins;
  chunk[c].joined = chunk[c].joined | boundary.joins;
  j = 0;
  do
  :: j < MEMBERS ->
    if
    :: has(boundary.joins, j) -> chunk[c].first_round[rank_of(j)] = from[j]
    :: else
    fi;
    j++
  :: else -> break
  od
}

inline commit(k) {
  core[k].mail = kNothing;
#ifndef NO_RELEASE
  core[k].hold_from = kNever;
#endif
  i = 0;
  do
  :: i < CHUNKS ->
    if
    :: core_of(i) == k ->
      lose(i);
      admit(i);
      if
      :: boundary.snapshot -> chunk[i].awaited = 1; reached(i)
      :: else
      fi
    :: else
    fi;
    i++
  :: else -> break
  od;
  answers++
}


proctype core_loop(byte k) {
end:
  do
  :: d_step { core[k].mail == kHold -> hold(k) }
  :: d_step { core[k].mail == kCommit -> commit(k) }
  od
}

proctype chunk_loop(byte c) {
end:
  do
  :: d_step { chunk[c].due -> copy_chunk(c) }
  :: d_step { chunk[c].arrived && !lacks_any(c) && chunk[c].round < core[core_of(c)].hold_from -> close(c) }
  od
}
