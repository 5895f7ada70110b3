/* A box and its standby (phub/job/standby.h): at most one of the two goes on, and no round is lost.
 *
 * Every option of a process is one step. Names are those of the code: phub/job/ (standby_desk.cc,
 * uplink.cc, save_desk.cc), phub/core/mirrored.cc, phub/job_maker.cc (check_may_take_over),
 * worker/link/link_keeper.cc. `told` are the sets of members of which the source has sent word.
 *
 * What is smaller than the boxes:
 * - A message has no place of its own where the sender's state says that it may come: it comes
 *   then, later, or never. So a partition is a delay, and what a box or a rank makes of it: it
 *   gives somebody up. When one end has given a connection up, the other end learns of it.
 * - Ranks are alike. The last one has a successor, life WORKERS: a new process, which may live
 *   beside the one that it follows. Nothing comes back to a source that has given it up.
 * - Chunks are alike too, so the first one closes a round first.
 * - Ranks always send their gradients. A result is given as soon as the source has it.
 * - A standby that takes over ends the model for itself: what follows is job.pml.
 * - A standby that dies does not come back, as none of its older checkpoints counts.
 *
 * Parameters: WORKERS (2 or 3), ROUNDS, BOX_FAULTS (one box gives the other up, or dies),
 * RANK_FAULTS (a rank dies, or does not reach the source any more), TELLS (of other members);
 * GROWS: the ranks but the first one join later; SOMEBODY: more is asserted at the end, which holds
 * for few faults only. `run` has the mutants. */
#ifndef WORKERS
#define WORKERS 3
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef BOX_FAULTS
#define BOX_FAULTS 2
#endif
#ifndef RANK_FAULTS
#define RANK_FAULTS 2
#endif
#ifndef TELLS
#define TELLS 1
#endif

#define LIVES (WORKERS + 1) /* the first incarnation of each rank, and the successor */
#define LAST (WORKERS - 1)
#define SUCCESSOR WORKERS
#ifdef GROWS
#define FIRST bit(0)
#else
#define FIRST (bit(WORKERS) - 1)
#endif

#define bit(m) (1 << (m))
#define has(set, m) (((set) >> (m)) & 1)
#define min(a, b) ((a) < (b) -> (a) : (b))
#define count(set) (has(set, 0) + has(set, 1) + has(set, 2) + has(set, 3))
#define by_rank(set) ((set) | (has(set, SUCCESSOR) << LAST))

#ifdef HALF
#define is_majority(members, some) (2 * count((members) & (some)) >= count(members))
#else
#define is_majority(members, some) (2 * count((members) & (some)) > count(members))
#endif

mtype = { kThere, kLost, kAlone, kFailed, kStandsBy, kFreezes, kSaved, kGoesOn, kDead };

/* The source. */
mtype source = kThere;    /* what the standby is to it; or its job failed; or kDead */
byte members = FIRST;
byte told[TELLS + 1];     /* sets of members; the standby has taken the first one */
byte acked, sent;         /* numbers of such sets: the latest answer, and the latest message */
bit waiting;              /* for the answer to the latest */
byte forgone;             /* lives that have said so */

typedef Chunk {
  byte round = 1;         /* in progress at the source */
  bit closed;             /* there: its gradient is on its way */
  byte taken;             /* by the standby: the latest round */
  byte gated;             /* of that, what its core has passed to the others */
  bit frozen;             /* the standby's core has detached the source */
};
Chunk chunk[2]; /* each on a core of its own */

/* The standby. */
mtype standby = kStandsBy;
byte on_the_way;          /* by number: word of members that the standby has not taken */
byte answered;            /* by number: the answer is on its way */
byte knows;               /* the number of the members that it knows */
byte saved_round, saved_as; /* as of the source's loss: the round, and the number of the members */
byte joined;              /* lives that count for it */

/* The ranks: by life. */
byte asked = FIRST;       /* have joined the source */
byte forgoes;             /* will never join the standby */
byte cut;                 /* do not reach the source any more */
byte dead;

/* Of the proof. */
byte box_faults = BOX_FAULTS, rank_faults = RANK_FAULTS; /* that may still be */
hidden byte k; /* within a step */

#define runs (source == kThere || source == kLost || source == kAlone)
#define is_lost_to(m) (!runs || has(cut, m) || !has(members, m)) /* so the source is, to the rank */
#define decided (min(chunk[0].gated, chunk[1].gated)) /* the round that the standby has */
#ifdef RESULTS_FIRST
#define given_of(c) (chunk[c].round - 1 + chunk[c].closed)
#else
#define given_of(c) (chunk[c].round - 1)
#endif
#define given (min(given_of(0), given_of(1))) /* the round that a rank may have */
#define no_round_lost (standby != kGoesOn || given <= saved_round)
#define one_goes_on (source != kAlone || standby != kGoesOn)

/* A chunk at the source: Mirrored. And at the standby. */
proctype chunk_loop(byte c) {
end:
  do
  :: d_step {
      runs && members && !chunk[c].closed && chunk[c].round <= ROUNDS &&
      (source == kAlone || chunk[1 - c].round >= chunk[c].round) &&
      (c == 0 || chunk[0].closed || chunk[0].round > chunk[1].round) ->
      chunk[c].closed = 1;
      assert(no_round_lost)
    }
  :: d_step { /* it has been taken, and the source has heard it; or that goes on alone */
      runs && chunk[c].closed &&
      (source == kAlone || chunk[c].taken == chunk[c].round) ->
      chunk[c].closed = 0;
      chunk[c].round++;
      assert(no_round_lost)
    }
  :: d_step { /* also when the source is dead: it was on its way */
      chunk[c].closed && chunk[c].taken < chunk[c].round && !chunk[c].frozen &&
      source != kAlone && (standby == kStandsBy || standby == kFreezes) ->
      chunk[c].taken = chunk[c].round;
#ifndef LATE_GATE
      chunk[c].gated = chunk[c].taken
#endif
    }
#ifdef LATE_GATE
  :: d_step { chunk[c].gated < chunk[c].taken -> chunk[c].gated = chunk[c].taken }
#endif
  :: d_step { standby == kFreezes && !chunk[c].frozen -> chunk[c].frozen = 1 }
  od
}

/* What the standby may know. */
inline find_first() {
#ifdef NEWEST_ONLY
  k = sent;
#else
  k = acked;
#endif
}
#ifdef DROPS_UNANSWERED
#define last_known (waiting -> sent : acked)
#else
#define last_known sent
#endif
#ifdef OLD_LIFE_FORGOES
#define has_forgone by_rank(forgone)
#else
#define has_forgone forgone
#endif

/* k: behind the last if there is a majority of all. */
inline look(counts) {
  find_first();
  do
  :: k <= last_known && (!told[k] || is_majority(told[k], counts)) -> k++
  :: else -> break
  od
}

#define lives_of_source (members | has_forgone)

inline end_source(how) {
  source = how;
  members = 0; forgone = 0; waiting = 0; answered = 0; cut = 0 /* nobody asks any more */
}

inline check() {
  look(has_forgone);
  if
  :: k > last_known -> source = kAlone; assert(one_goes_on)
  :: else ->
    look(lives_of_source);
    if
    :: k > last_known
    :: else -> end_source(kFailed)
    fi
  fi
}

inline lose_standby() {
#ifdef NO_ASKING
  source = kAlone;
  assert(one_goes_on)
#else
  source = kLost;
  answered = 0;
  check()
#endif
}

proctype source_loop() {
end:
  do
  :: d_step { /* one word after the other */
      source == kThere && !waiting && sent < TELLS && members != told[acked] ->
      sent++;
      told[sent] = members;
      on_the_way = on_the_way | bit(sent);
      waiting = 1
    }
  :: d_step {
      source == kThere && waiting && has(answered, sent) ->
      acked = sent;
      waiting = 0
    }
  :: d_step { source == kThere && waiting -> waiting = 0 } /* it takes too long */
  :: d_step { source == kThere && standby != kStandsBy -> lose_standby() }
  :: d_step { source == kThere && box_faults -> box_faults--; lose_standby() }
  :: d_step { runs && !members -> end_source(kFailed) }
  :: d_step { runs && box_faults -> box_faults--; end_source(kDead) }
  od
}

#ifdef LATE_NEWS
#define takes_news (standby == kStandsBy || standby == kFreezes || (standby == kSaved && !joined))
#else
#define takes_news (standby == kStandsBy)
#endif

inline take_news(number) {
  on_the_way = on_the_way & ~bit(number);
  answered = answered | bit(number);
#ifdef UNORDERED
  knows = number
#else
  knows = (number > knows -> number : knows)
#endif
}

#if defined(STALE_LIST) || defined(OLD_CHECKPOINT)
#define CHECKPOINTS
bit has_checkpoint;
byte checkpoint_round, checkpoint_as;
#endif
#ifdef ABANDON_CLEARS
bit is_cleared;
#define list_at_standby (is_cleared -> 0 : told[saved_as])
#else
#define list_at_standby (told[saved_as])
#endif

inline lose_source() {
  standby = kFreezes;
#ifndef LATE_NEWS
  on_the_way = 0
#endif
}

proctype standby_loop() {
end:
  do
  :: d_step { takes_news && has(on_the_way, 1) -> take_news(1) }
#if TELLS > 1
  :: d_step { takes_news && has(on_the_way, 2) -> take_news(2) }
#endif
  :: d_step {
      standby == kStandsBy && source != kThere ->
#ifdef ABANDON_CLEARS
      is_cleared = (source != kDead);
#endif
      lose_source()
    }
  :: d_step { standby == kStandsBy && box_faults -> box_faults--; lose_source() }
  :: d_step {
      standby == kFreezes && chunk[0].frozen && chunk[1].frozen ->
      saved_round = decided;
      saved_as = knows;
#ifdef STALE_LIST
      if
      :: has_checkpoint && checkpoint_round == decided -> saved_as = checkpoint_as
      :: else
      fi;
#endif
      standby = kSaved
    }
  :: d_step {
      (standby == kStandsBy || standby == kFreezes) && box_faults ->
      box_faults--;
      standby = kDead
    }
#ifdef CHECKPOINTS
  :: d_step {
      standby == kStandsBy && !has_checkpoint && decided ->
      has_checkpoint = 1;
      checkpoint_round = decided;
      checkpoint_as = knows
    }
#endif
#ifdef OLD_CHECKPOINT
  :: d_step {
      standby == kDead && has_checkpoint ->
      saved_round = checkpoint_round;
      saved_as = checkpoint_as;
      standby = kSaved
    }
#endif
  od
}

/* A rank, in one of its lives: LinkKeeper, and Worker::rejoin(). */
#ifdef FORGOES_AND_JOINS
#define may_join(m) (!has(dead | joined, m))
#else
#define may_join(m) (!has(dead | joined | forgoes, m))
#endif
#ifdef OLD_LIFE_JOINS
#define counts_for_standby by_rank(joined)
#else
#define counts_for_standby joined
#endif
#define one_word (!(forgoes & joined))
#if WORKERS == 2 || defined(GROWS)
#define may_fail(m) (rank_faults)
#else /* ranks 0 and 1 are alike: rank 1 is not the first */
#define may_fail(m) (rank_faults && (m != 1 || rank_faults < RANK_FAULTS))
#endif

proctype life(byte m) {
end:
  do
  :: d_step { /* joins the source */
      (source == kThere || source == kLost) && !has(asked, m) &&
      (m != SUCCESSOR || (has(asked, LAST) && !has(members, LAST))) ->
      asked = asked | bit(m);
      members = members | bit(m)
    }
  :: d_step { /* has heard that the standby is lost; it holds from before the source hears of it */
      source == kLost && has(members, m) && !has(cut | forgoes | joined, m) ->
      forgoes = forgoes | bit(m);
      assert(one_word)
    }
  :: d_step { /* the source has heard it, perhaps late */
      (source == kLost) && has(members & forgoes, m) && !has(forgone, m) ->
      forgone = forgone | bit(m);
      check()
    }
  :: d_step {
      standby == kSaved && has(asked, m) && is_lost_to(m) && may_join(m) ->
      joined = joined | bit(m);
      if
      :: is_majority(list_at_standby, counts_for_standby) ->
        standby = kGoesOn;
        assert(one_goes_on);
        assert(no_round_lost)
      :: else
      fi;
      assert(one_word)
    }
  :: d_step {
      may_fail(m) && has(members, m) && !has(cut, m) ->
      rank_faults--;
      cut = cut | bit(m)
    }
  :: d_step {
      may_fail(m) && has(asked, m) && !has(dead | cut, m) ->
      rank_faults--;
      cut = cut | bit(m);
      dead = dead | bit(m)
    }
  :: d_step { /* the source gives it up */
      runs && has(members & cut, m) ->
      members = members & ~bit(m);
      if
      :: source == kLost -> check()
      :: else
      fi
    }
  od
}

/* No fault has to be. */
proctype faults() {
end:
  do
  :: d_step { box_faults || rank_faults -> box_faults = 0; rank_faults = 0 }
  od
}

/* Nothing moves any more, and all faults are over. */
proctype end_of_all() {
  timeout ->
  if
  :: runs -> /* its rounds are complete */
    assert(source != kLost);
    assert(chunk[0].round == ROUNDS + 1 && chunk[1].round == ROUNDS + 1)
  :: else -> /* the standby goes on, if there is one, and enough ranks that may join it */
    assert(standby == kSaved || standby == kGoesOn || standby == kDead);
    assert(standby != kSaved || !is_majority(told[saved_as], ~(dead | forgoes)))
  fi;
#ifdef SOMEBODY
  assert(runs || standby == kGoesOn || !is_majority(told[knows], ~dead))
#endif
}

init {
  byte m;
  atomic {
    told[0] = FIRST;
    for (m : 0 .. 1) { run chunk_loop(m) }
    for (m : 0 .. LIVES - 1) { run life(m) }
    run source_loop();
    run standby_loop();
    run faults();
    run end_of_all()
  }
}
