// Scripts of what ranks, cores and the clock do to a Membership, and of what it must do then:
//
//     assembled 2 wait | cores 6 5 5 | lose 1 | settle
//     trace hold, commit 6: ~1@6, revoke 1 | state paused | missing 1
//     back = join 1 | settle | back: ok @6
//
// (script.h says how commands are written.) The rules of the driver hold, too.
//
//   job RANKS [max N] [min N] [wait|fail] [broadcast] [ssp]   a job that nobody is in yet
//   assembled …                                           the same, and the first ranks are there
//   NAME = join RANK [replace] | leave RANK | barrier RANK
//   NAME = hyper NAME=VALUE… [from ROUND by RANK]
//   lose RANK | give-up RANK                              it ends; it leaves the barrier
//   remove | nonfinite RANK TEXT                          what ends a job; '-': no rank
//   answer [N] | settle                                   N cores answer; all do, to the end
//   cores ROUND STARTED LOWEST | committed LOWEST         what the cores say next
//   last ROUND [ROUND ROUND]                              that lost ranks were in, by chunk
//   probe LOWEST ARRIVALS… [waited RANK…]
//   beat RANK… | tick MS | at +MS                         the last: nobody looks at the clock
//   beats N MS RANK…                                      N times a heartbeat of each, then MS
//   memory none|there|slow                                how admissions end
//   forget-trace
//
//   NAME: -                                               it has no answer yet
//   NAME: ok [RANK.INCARNATION] [@ROUND] [sends|waits]    of a join: who it is, from when on
//   NAME: TEXT                                            its error
//   state WORD | of RANK WORD | over | alive
//   missing RANK… | waiting RANK…
//   trace ENTRY, … | last-traced ENTRY                    all that was done since; the last of it
//   log ENTRY, … | reason TEXT                            the whole log; why the job ended
//   current RANK.INCARNATION | insecure RANK.INCARNATION
//   out RANK.INCARNATION TEXT | never-came RANK TEXT      why it is not there
//
// "...TEXT" is to be somewhere in what is said, and "TEXT..." at its begin.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tests/phub/membership_driver.h"

namespace phub::testing {

JobSpec membership_spec(uint32_t world_size, uint32_t max_ranks = 0,
                        std::string on_loss = "shrink");

// Rounds go on and the first ranks are there.
struct Assembled : MembershipDriver {
  explicit Assembled(const JobSpec& spec);
};

void lose(MembershipDriver& m, uint32_t rank);
std::vector<std::string> log_of(MembershipDriver& m);

// For each of the words once, which stands for every '$'.
void play(std::string_view script, const std::vector<std::string>& words = {""});

}  // namespace phub::testing
