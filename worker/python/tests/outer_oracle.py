"""DiLoCo in one process, written from its formulas: what each rank has after each step."""

import numpy as np
import torch
from coded import Sender
from exact import mean
from models import loss_of, make_net
from torch.optim import SGD, AdamW

# The keys of make_net() in so many fragments of about as many elements.
FRAGMENTS = {
    1: [["0.weight", "2.weight", "2.bias", "3.weight"]],
    2: [["0.weight"], ["2.weight", "2.bias", "3.weight"]],
    3: [["0.weight"], ["2.weight"], ["2.bias", "3.weight"]],
}


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def inner_of(net, kind):
    """The inner optimizer of a rank; of "both" there are two."""
    trained = [p for p in net.parameters() if p.requires_grad]
    if kind == "sgd":
        return [SGD(trained, 0.1, foreach=False)]
    if kind == "both":
        return [SGD(trained[:1], 0.1, momentum=0.9, foreach=False), AdamW(trained[1:], 1e-2)]
    return [AdamW(trained, 1e-2, foreach=False)]


def trained_in(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def tokens_of(rank, step):
    """How many a rank has used after so many steps: more than the others, and ever more."""
    return step * (step + 3 * rank + 1)


def weighted_mean(sent, weights):
    """Products and sums in float32, in rank order, times float(1 / the sum of the weights)."""
    total = sent[0] * weights[0]
    for each, weight in zip(sent[1:], weights[1:], strict=True):
        total += each * weight
    return total * torch.tensor(1 / sum(weights), dtype=torch.float32)


class Oracle:
    """All ranks of a DiLoCo, one after the other."""

    def __init__(
        self,
        world,
        *,
        sync_every,
        fragments=1,
        lr=0.7,
        momentum=0.9,
        nesterov=True,
        delay=0,
        alpha=0.0,
        proximal=0.0,
        delta="f32",
        kind="adamw",
        dtype=torch.float32,
        parameter_dtype="f32",
        has_tokens=False,
    ):
        self.nets = [make_net().to(dtype) for _ in range(world)]
        self.inner = [inner_of(net, kind) for net in self.nets]
        self.every, self.delay, self.alpha, self.proximal = sync_every, delay, alpha, proximal
        self.fragments, self.results = FRAGMENTS[fragments], DTYPES[parameter_dtype]
        self.base = {
            name: torch.nn.Parameter(p.detach().float().clone())
            for name, p in trained_in(self.nets[0]).items()
        }
        self.outer = SGD(
            self.base.values(),
            lr,
            momentum=momentum,
            nesterov=bool(nesterov and momentum),
            foreach=False,
        )
        self.senders = [{name: Sender(delta) for name in self.base} for _ in range(world)]
        self.due, self.step, self.has_moved = {}, 0, False
        self.has_tokens, self.counted, self.latest = has_tokens, {}, {}
        for net in self.nets:  # they begin with what the box sends
            for name, p in trained_in(net).items():
                p.data.copy_(self.seen(name))

    def advance(self):
        """A step of every rank. Returns their parameters."""
        for rank, net in enumerate(self.nets):
            self._inner_step(rank, net, self.step)
        self.step += 1
        self.has_moved = True
        for names in self.due.pop(self.step, []):
            self._merge(names)
        for number, names in enumerate(self.fragments):
            if (self.step - (number + 1) * self.every // len(self.fragments)) % self.every == 0:
                self._exchange(names)
                self.has_moved = len(self.fragments) > 1
                self.due.setdefault(self.step + self.delay, []).append(names)
        for names in self.due.pop(self.step, []):
            self._merge(names)
        return self.parameters()

    def parameters(self):
        return [
            {name: p.detach().clone() for name, p in trained_in(net).items()} for net in self.nets
        ]

    def settle(self):
        """Results that are under way come into the parameters."""
        for step in sorted(self.due):
            for names in self.due.pop(step):
                self._merge(names)
        return self.parameters()

    def synchronize(self):
        """All that has moved is exchanged at once. Returns the parameters, which are the base."""
        self.settle()
        if self.has_moved:
            for names in self.fragments:
                self._exchange(names)
        self.has_moved, alpha, self.alpha = False, self.alpha, 0
        for names in self.fragments:
            self._merge(names)
        self.alpha = alpha
        return self.parameters()

    def seen(self, name):
        """The base as ranks have it."""
        return self.base[name].detach().to(self.results, copy=True)

    def _inner_step(self, rank, net, step):
        for each in self.inner[rank]:
            each.zero_grad()
        loss_of(net, rank, step).backward()
        if self.proximal:
            for name, p in trained_in(net).items():
                p.grad += (p.detach() - self.seen(name)) * self.proximal
        for each in self.inner[rank]:
            each.step()

    def _exchange(self, names):
        self.outer.zero_grad()
        weights = self._weights(names[0])
        for name in names:
            base = self.seen(name)
            sent = [self._sent(rank, name, base) for rank in range(len(self.nets))]
            self.base[name].grad = weighted_mean(sent, weights) if weights else mean(sent)
        self.outer.step()

    def _weights(self, fragment):
        """The tokens of each rank since this fragment was sent; None: all count alike."""
        if not self.has_tokens:
            return None
        before = self.counted.get(fragment, 0)
        ranks = range(len(self.nets))
        if before == self.step:  # what alpha left counts as before
            return self.latest[fragment]
        self.counted[fragment] = self.step
        self.latest[fragment] = [
            tokens_of(rank, self.step) - tokens_of(rank, before) for rank in ranks
        ]
        return self.latest[fragment]

    def _sent(self, rank, name, base):
        local = trained_in(self.nets[rank])[name].detach()
        moved = base.to(local.dtype).float() - local.float()
        got = self.senders[rank][name].send(moved.flatten().numpy().astype(np.float32))
        return torch.from_numpy(np.ascontiguousarray(got)).view(local.shape)

    @torch.no_grad()
    def _merge(self, names):
        for net in self.nets:
            for name in names:
                local, base = trained_in(net)[name], self.seen(name)
                kept = self.alpha * local.float() + (1 - self.alpha) * base.float()
                local.copy_(kept if self.alpha else base)
