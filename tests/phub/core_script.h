// Scripts of what reaches a CoreJob and of what it must do then:
//
//     job mean | push 0 1@1=9 | null 1,2 1@1 | sent 0-2:1@1 | has 1=3
//     hold 2 1 1 | commit 2 -1 | attached 0 2
//
// RANKS and CHUNKS are numbers and ranges, "0,2-4"; a rank's gradient is 4^rank where no value is
// given. A job has 4 chunks of 64 elements, and ranks 0, 1 and 2 are there, if nothing else is
// said:
//
//   job [max=N] [ranks=RANKS] [nobody] [chunks=N] [elements=N] [f16|bf16] [mean]
//       [sgd|momentum] [half-momentum] [slack=N|async] [unused=skip] [nan=stop|exclude|pass|skip]
//       [groups=TREE] [workers-own] [initial] [priorities=N,…] [snapshots] [shelves=N] [first=N]
//       [formats=SCHEDULE]   of gradients, by the round
//       [gated]           of one core
//       [quorum=N]        of one core; the grace is over when the script says so
//       [fragments=N,…]   of the chunks, in order, with a quorum
//       [late-decay=F]    with a quorum
//       [weights]         gradients have weights, f32 as gradients are
//       [interest=OF,OF/OF,OF/…]   by rank and chunk: wr, w, r or -
//       [pending]         results are done when the script says so
//       [parent=N,N,N]    the ranks are racks, with so many ranks each
//       [rack]            results come from a parent
//       [switch]          sums come through a switch
//
// What arrives; nothing is taken before the job runs:
//   push RANKS CHUNKS@ROUND[=VALUE[/PARTICIPANTS]]… | null RANKS CHUNKS@ROUND[/PARTICIPANTS]…
//                                        or a weight in the place of participants
//   pushes ROUND [RANKS]                 to all chunks, which runs after each
//   again|control RANKS CHUNKS@ROUND     a gradient, announced once more; a control message
//   initial RANK CHUNK[.PART][=VALUE]    initial parameters
//   raw RANK data|null|initial CHUNK@ROUND BYTES OFFSET | break RANK
// What is done:
//   run | step [N] | forget-posts | room N | detach RANK | reattach RANK.INCARNATION
//   hold [ROUND [STARTED [LOWEST]]]      and what it must say
//   commit ROUND CHANGE…                 of -RANK, ~RANK@ROUND (expected again), xRANK (forgotten),
//                                        +RANK.INCARNATION@ROUND (admitted), snapshot[@ROUND],
//                                        at-end, get, set:CHUNKS=PARAMETER/STATE/STEPS,
//                                        copy|swap@ROUND:FROM>TO (orders of branches)
//   lr|slack ROUND VALUE                 from that round on, told with the next commit
//   order CHANGE…                        hold and commit
//   shelf SHELF VALUE | restore VALUE STEPS CLOCK…
//   done CHUNKS                          what is pending
//   grace-over [N:]RANKS                 (of fragment N, else 0)
//                                        these are expected in the round that is collected
// What must be seen:
//   sent POST…          runs, then: all that was posted since; sent-mixed POST…: in any order;
//                       sends N: so many; posted POST…: without running; flushed N: of them
//                       POST: RANKS:CHUNKS@ROUND, with "n" if it is null; RANK:CHUNKiPART
//   told REPORT, …      runs, then: all that was reported since; reported REPORT, …: without
//   has [RANK:]CHUNKS[.ELEMENTS]=VALUE…       results; "14/7" is 14 times a seventh
//   is|got|copied CHUNKS=PARAMETER/STATE/STEPS   now (steps 0); what a commit gets; a snapshot
//   shelf-is|shelf-copied SHELF CHUNKS=PARAMETER/STATE/STEPS
//   at PLACE CHUNK=VALUE… | steps SHELF N | copied-clocks STEPS CLOCK…
//   last RANK ROUND…    of the last commit: by chunk, the last round that it took part in
//   lowest ROUND        what the last commit said
//   attached RANK… | owes | owes-nothing | retries-in MS | is-pending CHUNK…
//   sleeps [N…] | busy  whether it can be armed, and after how many arrivals of each rank it wakes
//   for-one yes|no      whether it sleeps for one rank alone
//   activity grows|stays                      since it was looked at
//   waits RANK… | arrivals N… | parts N… | completed N | open ROUND | lacks RANK N   of a probe
// Of a rack:
//   answer CHUNKS@ROUND=VALUE | senseless QUEUE CHUNK@ROUND KIND [BYTES OFFSET]   from the parent
//   up-room N | up-full QUEUE | up-refused NS | up-breaks | up-again | up-violates
//   up SUM…             runs, then: what went up since: CHUNK@ROUND=SUM/RANKS, CHUNK@ROUNDn/RANKS,
//                       CHUNKi=VALUE, CHUNK?ROUND; up-flushed N: of them
// Behind a switch:
//   sum CHUNKS@ROUND=VALUE | waiting CHUNK@ROUND RANKS     it has parts of these ranks
//   generation INDEX ROUND | answered taken|ended|nothing | answered-last taken|ended
//   begins INDEX ROUND RANK…   posted since: these, and no others, were told of it in time
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phub::testing {

// For each of the words once, which stands for every '$'.
void play_core(std::string_view script, const std::vector<std::string>& words = {""});

}  // namespace phub::testing
