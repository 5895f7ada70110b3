"""DiLoCo with a quorum in one process: who was late in which fragment's round, the log says."""

from collections import defaultdict

import torch
from exact import mean
from outer_oracle import Oracle, trained_in, weighted_mean


class LateOracle(Oracle):
    """Each rank makes steps of its own, and has the bases of the rounds that it took part in.

    late: of (rank, fragment, round): the fragment's round went on without the rank.
    steps: how many each rank made.
    late_decay: what a contribution is multiplied by for each round that it is late.
    """

    def __init__(self, late, steps, *, late_decay=1.0, **how):
        super().__init__(len(steps), **how)
        self.late, self.steps, self.late_decay = late, steps, late_decay
        fragments = range(len(self.fragments))
        self.bases = {(f, 0): self._seen_of(f) for f in fragments}
        self.has = [[0] * len(self.fragments) for _ in steps]  # of each rank and fragment: a round
        self.sent = defaultdict(dict)  # by fragment and round: moved and weight of each rank
        self.members = defaultdict(set)
        for rank in range(len(steps)):
            for fragment in fragments:
                has = 0
                for _ in range(self._pushes(fragment, steps[rank])):
                    has = self._counts_in(rank, fragment, has)
                    self.members[fragment, has].add(rank)

    def run(self):
        """Returns the parameters of each rank at its end."""
        ranks = [self._train(rank) for rank in range(len(self.steps))]
        wanted = dict.fromkeys(range(len(ranks)))
        while wanted:
            before = dict(wanted), len(self.bases), sum(map(len, self.sent.values()))
            for rank, what in list(wanted.items()):
                if what is None or self._has(*what):
                    wanted[rank] = next(ranks[rank], "ended")
                    if wanted[rank] == "ended":
                        del wanted[rank]
            after = dict(wanted), len(self.bases), sum(map(len, self.sent.values()))
            assert after != before, f"ranks wait for {wanted}, and all they need is not there"
        return self.parameters()

    def _train(self, rank):
        """Yields each fragment and round whose result it waits for."""
        net, due = self.nets[rank], defaultdict(list)
        has = self.has[rank]
        for step in range(1, self.steps[rank] + 1):
            self._inner_step(rank, net, step - 1)
            for fragment in due.pop(step, []):
                yield fragment, has[fragment]
                self._merge_at(rank, fragment)
            for fragment in range(len(self.fragments)):
                if self._ends(fragment, step):
                    self._push(rank, fragment)
                    due[step + self.delay].append(fragment)
            for fragment in due.pop(step, []):
                yield fragment, has[fragment]
                self._merge_at(rank, fragment)
        for step in sorted(due):
            for fragment in due[step]:
                yield fragment, has[fragment]
                self._merge_at(rank, fragment)

    def seen_by(self, rank, name):
        fragment = next(f for f, names in enumerate(self.fragments) if name in names)
        return self.bases[fragment, self.has[rank][fragment]][name]

    def _ends(self, fragment, step):
        return (step - (fragment + 1) * self.every // len(self.fragments)) % self.every == 0

    def _pushes(self, fragment, steps):
        return sum(self._ends(fragment, step) for step in range(1, steps + 1))

    def _counts_in(self, rank, fragment, has):
        """The round that counts what is sent after round `has`."""
        number = has + 1
        while (rank, fragment, number) in self.late:
            number += 1
        return number

    def _push(self, rank, fragment):
        has = self.has[rank][fragment]
        counts_in = self._counts_in(rank, fragment, has)
        names = self.fragments[fragment]
        moved = {name: self._sent(rank, name, self.seen_by(rank, name)) for name in names}
        weight = torch.tensor(1.0)
        for _ in range(counts_in - has - 1):
            weight = weight * torch.tensor(self.late_decay)
        self.sent[fragment, counts_in][rank] = moved, float(weight)
        self.has[rank][fragment] = counts_in

    def _has(self, fragment, number):
        """Makes the rounds up to this one, if all that count in them is there."""
        for each in range(1, number + 1):
            if (fragment, each) in self.bases:
                continue
            sent = self.sent[fragment, each]
            assert self.members[fragment, each], f"nobody is in round {each} of {fragment}"
            if sent.keys() != self.members[fragment, each]:
                return False
            self._step(fragment, [sent[rank] for rank in sorted(sent)])
            self.bases[fragment, each] = self._seen_of(fragment)
        return True

    def _step(self, fragment, sent):
        self.outer.zero_grad()
        for name in self.fragments[fragment]:
            moved, weights = [of[name] for of, _ in sent], [weight for _, weight in sent]
            weighs = self.late_decay < 1
            self.base[name].grad = weighted_mean(moved, weights) if weighs else mean(moved)
        self.outer.step()

    def _seen_of(self, fragment):
        return {name: self.seen(name) for name in self.fragments[fragment]}

    @torch.no_grad()
    def _merge_at(self, rank, fragment):
        for name in self.fragments[fragment]:
            local, base = trained_in(self.nets[rank])[name], self.seen_by(rank, name)
            kept = self.alpha * local.float() + (1 - self.alpha) * base.float()
            local.copy_(kept if self.alpha else base)
