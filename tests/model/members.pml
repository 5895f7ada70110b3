/* The workers, and who decides which of them take part: Membership and RunningJob. */

#define can_push(m, c) (has(running, m) && !has(chunk[c].sent | chunk[c].arrived, m) && \
                        chunk[c].round <= ROUNDS && from[m] <= chunk[c].round)

inline receive(m, c) {
  chunk[c].sent = chunk[c].sent & ~bit(m);
  if
  :: arrived_of(c, rank_of(m)) /* a duplicate */
  :: else -> chunk[c].arrived = chunk[c].arrived | bit(m)
  fi
}

proctype member(byte m) {
end:
  do
  :: d_step {
      has_begun && !has(asked, m) && (m != SUCCESSOR || losing || has(chunk[0].lost, LAST)) ->
      asked = asked | bit(m);
      if
      :: m == SUCCESSOR -> waiting = 1
      :: else -> joins = joins | bit(m)
      fi
    }
  :: d_step { can_push(m, 0) -> chunk[0].sent = chunk[0].sent | bit(m) }
  :: d_step { can_push(m, 1) -> chunk[1].sent = chunk[1].sent | bit(m) }
  :: d_step { has(chunk[0].sent & chunk[0].attached, m) -> receive(m, 0) }
  :: d_step { has(chunk[1].sent & chunk[1].attached, m) -> receive(m, 1) }
  od
}

inline send_all(what) {
  i = 0;
  do
  :: i < CORES -> core[i].mail = what; i++
  :: else -> break
  od;
  answers = 0
}

inline advance() {
  phase = kHolding;
  started = 0;
  boundary.round = 1;
  boundary.lost = (loss -> bit(LAST) : 0);
  boundary.joins = joins;
  boundary.snapshot = snapshot_wanted;
  loss = 0;
  joins = 0;
  snapshot_wanted = 0;
  send_all(kHold)
}

inline build_boundary() {
#ifdef ON_LOSS_WAIT
  boundary.expected_again = started + 1;
#else
  boundary.expected_again = kNever;
#endif
  if
  :: !assembled && has(restored_ranks, LAST) -> boundary.expected_again = boundary.round
  :: else
  fi;
  j = 0;
  do
  :: j < MEMBERS ->
    if
    :: has(boundary.joins, j) ->
#ifdef ADMIT_AT_R
      from[j] = boundary.round;
#else
      from[j] = (j == SUCCESSOR -> max(boundary.round, last_round + 1) : boundary.round);
#endif
      /* Whom a job goes on with goes back to what was restored, all alike. */
      assert(j == SUCCESSOR || !has(restored_ranks, j) || from[j] == restored_round + 1)
    :: else
    fi;
    j++
  :: else -> break
  od;
  if
  :: boundary.snapshot -> snapshot_round = boundary.round
  :: else
  fi;
  phase = kCommitting;
  send_all(kCommit)
}

inline finish_boundary() {
  if
  :: boundary.lost ->
    live = live & ~boundary.lost;
    losing = 0;
    i = 0;
    do
    :: i < CHUNKS -> last_round = max(last_round, chunk[i].last_round); i++
    :: else -> break
    od;
    if
    :: boundary.expected_again == kNever -> expected = expected & ~bit(LAST)
    :: else
    fi
  :: else
  fi;
  live = live | boundary.joins;
  running = running | boundary.joins;
  j = 0;
  do
  :: j < MEMBERS ->
    if
    :: has(boundary.joins, j) -> expected = expected | bit(rank_of(j))
    :: else
    fi;
    j++
  :: else -> break
  od;
  if
  :: (expected & ~(live | (has(live, SUCCESSOR) -> bit(LAST) : 0))) == 0 -> assembled = 1
  :: else
  fi;
  boundary.round = 0;
  boundary.lost = 0;
  boundary.expected_again = 0;
  boundary.joins = 0;
  boundary.snapshot = 0;
  started = 0;
  answers = 0;
  phase = kIdle
}

inline write_snapshot() {
  cores_snapped = 0;
  i = 0;
  do
  :: i < CHUNKS -> assert(chunk[i].copy == snapshot_round - 1); i++ /* all chunks are of one round */
  :: else -> break
  od;
  writing = id_of(epoch, snapshot_round - 1);
  checkpoint[writing].ranks = expected;
  step = 1
}

#define completed_round (min(chunk[0].round, chunk[1].round) - 1)

#ifdef FIRST_CORE_SNAPPED
#define CORES_THAT_SNAP 1
#else
#define CORES_THAT_SNAP CORES
#endif

proctype control() {
end:
  do
  :: d_step { waiting && !losing -> waiting = 0; joins = joins | bit(SUCCESSOR) }
  :: d_step { phase == kIdle && (loss || joins || snapshot_wanted) -> advance() }
  :: d_step { phase == kHolding && answers == CORES -> build_boundary() }
  :: d_step { phase == kCommitting && answers == CORES -> finish_boundary() }
  :: d_step { assembled && !saving && completed_round > durable_round -> saving = 1; snapshot_wanted = 1 }
  :: d_step { cores_snapped == CORES_THAT_SNAP -> write_snapshot() }
  od
}
