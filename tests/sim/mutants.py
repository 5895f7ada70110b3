#!/usr/bin/env python3
"""Have the simulated racks teeth? Each mutant below breaks one thing on purpose, in a copy of the tree;
the racks must notice. Nightly or by hand: takes about half a minute per mutant.

  tests/sim/mutants.py                     all of them
  tests/sim/mutants.py --only dedup,fence  some
  tests/sim/mutants.py --check             only whether each one still fits the sources (in ctest)
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

CORE = "phub/core_job.cc"
CONTROL = "phub/core_job_control.cc"
CLOCKS = "phub/core_job_clocks.cc"
MEMBERS = "phub/membership.cc"
SERVER = "phub/server.cc"
SESSION = "worker/session.cc"

# name, file, what is there, what stands there instead
MUTANTS = [
    ("dedup: a contribution counts again when it is sent again", CORE,
     "if (has(arrived_bits_, index, rank)) return;  // a contribution counts once",
     ""),
    ("late: the round of an immediate is not looked at", CORE,
     "if (imm.round != low8(chunk.round)) {",
     "if (false) {"),
    ("divisor: a mean divides by all ranks that there could be", CORE,
     "(parameters_.mean ? participants : 1)",
     "(parameters_.mean ? parameters_.max_ranks : participants / participants)"),
    ("order: the sum is not in rank order", CORE,
     "slots_.push_back(ranks_[rank].slots + slot_offset);",
     "slots_.insert(slots_.begin(), ranks_[rank].slots + slot_offset);"),
    ("stale: now and then the result of the round before goes out", CORE,
     "if (ready && !held && !reduce_and_optimize(chunk, index)) return false;",
     "if (ready && !held && chunk.round % 5 != 3 && !reduce_and_optimize(chunk, index)) return false;"),
    ("null: a null contribution is read from the slot", CORE,
     "if (null) null_bits_[index * words_ + rank / 64] |= bit;",
     ""),
    ("owe: a result that found a full queue is forgotten", CORE,
     "if (owed_count_[rank] > 0 || !endpoint_.post(qp, write)) return owe(rank, index);",
     "if (!endpoint_.post(qp, write)) return;"),
    ("hyper: new hyperparameters apply to rounds before theirs", CORE,
     "return *std::prev(after);  // the first version is from round 0",
     "return after != hyper_->end() ? *after : hyper_->back();"),
    ("skip: rounds that nobody can take part in are waited for", CORE,
     "return next == kNever || next > hold_from_ ? round + 1 : next;",
     "return round + 1;"),
    ("missing: a chunk completes one rank too early", CORE,
     "const bool ready = chunk.missing == 0 && chunk.arrived > 0;",
     "const bool ready = chunk.arrived > 0;"),
    ("early: a chunk is queued when one rank is missing still", CORE,
     "if (chunk.missing > 0 && !clocks_) return;",
     "if (chunk.missing > 1 && !clocks_) return;"),
    ("hold: cores complete rounds beyond the boundary", CONTROL,
     "hold_from_ = held.round;",
     "hold_from_ = kNever;"),
    ("fence: a lost rank is not detached", CONTROL,
     "if (rank.attached) detach(lost.rank);  // it may never have come",
     ""),
    ("own: contributions in a fenced worker's own memory still count", CONTROL,
     "if (took_part && parameters_.slots_belong_to_worker && !(null_bits_[word] & bit)) {",
     "if (false) {"),
    ("last: the log counts a lost rank in a round that it missed", CONTROL,
     "const uint64_t last = took_part ? chunk.round : chunk.round == 0 ? 0 : chunk.round - 1;",
     "const uint64_t last = chunk.round;"),
    ("first: a new rank is waited for in rounds before its first", CONTROL,
     "const uint64_t expected_before = std::exchange(rank.first_round, admitted.first_round);",
     "const uint64_t expected_before = std::exchange(rank.first_round, uint64_t{1});"),
    ("again: a reconnected rank does not get lost results again", CONTROL,
     "} else if (chunks_[i].round > 0 && !has(arrived_bits_, i, rank)) {",
     "} else if (false) {"),
    ("parts: initial parameters of a lost rank 0 stay half taken", CONTROL,
     "if (lost.rank == 0 && chunk.round == 0) chunk.initial_parts = 0;",
     ""),
    ("arm: a core sleeps and asks nobody to wake it", CONTROL,
     "wake_after_[qp] = only == CoreReport::kNoRank || only == qp % parameters_.max_ranks;",
     "wake_after_[qp] = 0;"),
    ("slack: a rank may be one round further ahead", "phub/core_clocks.h",
     "clock - slowest <= slack_;",
     "clock - slowest <= slack_ + 1;"),
    ("update: an update that is sent again is applied again", CLOCKS,
     "if (imm.round == low8(clock) && clock >= ranks_[rank].first_round) {",
     "if (imm.round == low8(clock) && clock >= ranks_[rank].first_round) {\n"
     "    add_update(rank, index);"),
    ("copy: a result is not what it was when its clock came", CLOCKS,
     "clocks_->withhold(index, rank, false);\n    copy_result(rank, chunk);",
     "clocks_->withhold(index, rank, false);\n    if (chunk.round % 3 != 2) copy_result(rank, chunk);"),
    ("withheld: a withheld result goes out when another one is owed or asked for again", CORE,
     "if (clocks_ && clocks_->withheld(index, rank)) return;",
     ""),
    ("clock: who is lost still holds the others back", CLOCKS,
     "clocks_->set(index, rank, expected_again == kNever ? kNever : expected_again - 1);",
     "if (expected_again != kNever) clocks_->set(index, rank, expected_again - 1);"),
    ("silent: updates that a lost rank had sent are dropped, and the log counts them", CLOCKS,
     "if (!reliable || stopped_ || !apply(rank, index)) drop_update(rank, index);",
     "drop_update(rank, index), clocks_->tick(index, rank);"),
    ("newcomer: its first result is not sent", CONTROL,
     "clocks_->withhold(i, admitted.rank, true);",
     ""),
    ("boundary: new ranks begin a round too early", MEMBERS,
     "r.first_round = std::max(boundary_.round, r.last_round + 1);",
     "r.first_round = std::max<uint64_t>(1, boundary_.round - 1);"),
    ("mark: the last round of the predecessor's predecessor is forgotten", MEMBERS,
     "r.last_round, *std::max_element(last_rounds_[i].begin(), last_rounds_[i].end()));",
     "uint64_t{0}, *std::max_element(last_rounds_[i].begin(), last_rounds_[i].end()));"),
    ("failing: a job ends in the middle of a boundary", MEMBERS,
     "if (phase_ == Phase::kCommitting) {",
     "if (false) {"),
    ("progress: who hangs with a heartbeat is waited for", MEMBERS,
     "if (now - rank.waited_since > spec_.progress_limit_ms) {",
     "if (false) {"),
    ("lease: nobody looks at the leases", MEMBERS,
     "now > rank.lease_until) {",
     "now > rank.lease_until + 100000000) {"),
    ("excluded: the log does not say who was left out", MEMBERS,
     "  log_.push_back({.kind = LogRecord::Kind::kExcluded,",
     "  if (log_.empty()) log_.push_back({.kind = LogRecord::Kind::kExcluded,"),
    ("attach: only the first core answers for a reconnection", SERVER,
     "++at->second.answers < running.job->cores()) return;",
     "++at->second.answers < 1) return;"),
    ("resend: the worker sends nothing again after a reconnection", SESSION,
     "if (chunks_[c].pushed) enqueue(c, 0, false);",
     ""),
    ("any: the worker takes a result of any round", SESSION,
     "if (!chunk.outstanding || imm.round != low8(chunk.awaited)) {",
     "if (!chunk.outstanding) {"),
]


def check(mutants):
    stale = [name for name, file, old, _ in mutants if (ROOT / file).read_text().count(old) != 1]
    for name in stale:
        print(f"does not fit the sources any more: {name}")
    print(f"{len(mutants) - len(stale)} of {len(mutants)} mutants fit")
    return not stale


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False, **options)


def build(tree):
    result = run(["cmake", "--build", tree / "build", "--target", "rack_sim"])
    if result.returncode != 0:
        print(result.stdout[-3000:])
        sys.exit("the build failed")


def racks(tree, seeds):
    return run([tree / "build/tests/rack_sim", "--seeds", f"1..{seeds}", "--stop"])


def reason(output):
    for line in output.splitlines():
        if line.startswith(("seed", "signal", "phub:")):
            return line[:150]
    return output[-150:]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="apply nothing, build nothing")
    parser.add_argument("--only", default="", help="first words of mutants, by commas")
    parser.add_argument("--seeds", type=int, default=1000, help="racks per mutant, at most")
    arguments = parser.parse_args()
    wanted = [word for word in arguments.only.split(",") if word]
    mutants = [m for m in MUTANTS if not wanted or m[0].split(":")[0] in wanted]
    if not check(mutants):
        return 1
    if arguments.check:
        return 0

    survivors = []
    with tempfile.TemporaryDirectory(prefix="phub-mutants-") as folder:
        tree = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("build", ".git"))
        configured = run(["cmake", "-G", "Ninja", "-S", tree, "-B", tree / "build",
                          "-DCMAKE_BUILD_TYPE=Release"])
        if configured.returncode != 0:
            sys.exit(configured.stdout[-3000:])
        build(tree)
        unharmed = racks(tree, min(arguments.seeds, 200))
        if unharmed.returncode != 0:
            sys.exit("the racks fail without any mutant:\n" + unharmed.stdout[-1000:])
        for name, file, old, new in mutants:
            source = tree / file
            text = source.read_text()
            source.write_text(text.replace(old, new))
            begin = time.monotonic()
            build(tree)
            result = racks(tree, arguments.seeds)
            source.write_text(text)
            caught = result.returncode != 0
            if not caught:
                survivors.append(name)
            print(f"{'caught  ' if caught else 'SURVIVED'} {name} ({time.monotonic() - begin:.0f} s)"
                  f"{': ' + reason(result.stdout) if caught else ''}", flush=True)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
