"""When the box of a training dies: somewhere in a step, with a checkpoint before."""

import multiprocessing
import random
import time

from conftest import SEED, wait_until

import phub

STEPS = 60
JOB = "rejoins"
FORK = multiprocessing.get_context("fork")


class Death:
    """Of the box, when rank 1 is at a place of a step. No step begins that is not allowed."""

    def __init__(self, step, place, per_round=1):
        self.step, self.place, self.per_round = step, place, per_round
        self.due, self.allowed = FORK.Event(), FORK.Value("i", 0, lock=False)

    def at(self, rank, step, place):
        while step >= self.allowed.value:
            time.sleep(0.001)
        if (rank, step, place) == (1, self.step, self.place):
            self.due.set()

    def allow(self, steps):
        self.allowed.value = steps

    def allow_a_checkpoint(self, box):
        """However fast the steps are, they do not leave the round behind that the box saves."""

        def is_there():
            status = box.status(JOB)
            durable = status.get("durable_round", 0)
            if not durable:
                rounds = status.get("next_saved_round", 0) + 3
                self.allow(min(STEPS - 1, rounds * self.per_round))
            return durable > 0

        wait_until(is_there, "a checkpoint")
        self.allow(STEPS - 1)  # nobody ends before the box dies

    def await_due(self):
        assert self.due.wait(60)

    def happens(self, box, ranks):
        """To the box, after a checkpoint. What the ranks return, in their second life."""
        self.allow_a_checkpoint(box)
        self.await_due()
        box.die_and_come_back()
        self.allow(STEPS)
        return ranks.results()

    def happens_to_all(self, box, ranks):
        """To the box, which comes back, and to the ranks."""
        self.allow_a_checkpoint(box)
        self.await_due()
        box.kill()
        ranks.end()
        box.die_and_come_back()


def death_anywhere(how="", per_round=1):
    """per_round: steps of a round of the job."""
    draw = random.Random(f"{SEED} {how}")
    death = Death(draw.randrange(STEPS - 1), draw.randrange(3), per_round)
    print(f"the box dies in step {death.step} at {death.place}")
    return death


class NoDeath:
    def at(self, rank, step, place):
        pass


def live(optimizer, make_step, **kept):
    """Makes all steps, whatever happens to the box. Returns in how many lives."""
    lives = 1
    while True:
        try:
            for step in optimizer.steps(STEPS, **kept):
                make_step(step)
            return lives
        except phub.RewoundError:
            lives += 1
            optimizer.rejoin()
