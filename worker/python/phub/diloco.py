"""Replicas that train by themselves for some steps, and then exchange how far they have moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from phub import _device, _rules
from phub._buffers import Buffers
from phub._model import Present
from phub._options import Option
from phub._outer_course import Course, check_course
from phub._outer_form import (
    check_alone,
    check_buffers,
    check_counted,
    check_loaded,
    check_options,
    check_unchanged,
    check_without_quorum,
    compare_the_rest,
    exchanged_in,
    has_quorum,
    hyper_of,
    inner_optimizers,
    unwrapped,
)
from phub._outer_hooks import hooks_of
from phub._outer_island import Island
from phub._outer_keys import OuterKey, fragments_of, keys_of
from phub._outer_state import (
    LoadedOuter,
    OuterOwn,
    OuterSteps,
    check_inner,
    fetch_outer,
    load_inner,
)
from phub._own_state import Stateful
from phub._tensors import filled, memory_of
from phub._watch import Watch
from phub.errors import BadHandleError, InvalidError, RewoundError
from phub.worker import Worker, fails

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DiLoCo:
    """Each rank makes steps of its own; every `sync_every` of them the box averages their movement.

    DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1). `base` is what all ranks have in
    common. A rank pushes base - parameters; the mean over the ranks is the gradient with which the
    box makes a step of the outer optimizer, SGD with momentum, on the base; and the ranks go on
    from the new base. With fragments and a delay it is Streaming DiLoCo (arXiv 2501.18512).

        with phub.DiLoCo(model, inner, sync_every=100, lr=0.7, momentum=0.9) as outer:
            for batch in batches:
                loss_of(model, batch).backward()
                inner.step()
                inner.zero_grad()
            outer.synchronize()

    The inner optimizers are any of PyTorch's. Their hooks count steps and exchange, in the thread
    that calls inner.step(), which raises the errors; that thread makes all other calls, too.
    """

    _buffers: Buffers | None = None  # from the first sync_buffers() on
    _worker: Worker | None = None  # of the island's first process
    _error: Exception | None = None  # of a push, in an island; or after the end

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer | Sequence[Optimizer],
        *,
        sync_every: int = 100,
        fragments: int = 1,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        delay: int = 0,
        alpha: float = 0.0,
        proximal: float = 0.0,
        delta: str = "f32",
        formats: Mapping[str, str] | None = None,
        schedule: Mapping[str, float] | None = None,
        tokens: Callable[[], float] | None = None,
        process_group: ProcessGroup | None = None,
        **options: Option,
    ) -> None:
        """Joins the job. Returns when all ranks have joined, with rank 0's parameters in the model.

        model: parameters that require no gradient, and those that the inner optimizers do not have,
            are not exchanged. The others are float32, bfloat16 or float16, on the CPU or one GPU.
        inner: the optimizer of the model's parameters, or several, of which the last to step is the
            last one here: its steps are counted. Steps that a GradScaler leaves out do not count,
            unless the optimizer itself leaves them out (fused=True).
        sync_every: steps of a cycle, in which each parameter is exchanged once.
        fragments: into how many parts of about as many elements the model is cut. They are
            exchanged one after the other, spread evenly over a cycle.
        lr, momentum, nesterov: of the outer optimizer. lr=1 and momentum=0 is averaging.
        delay: so many steps after a fragment was sent its result comes into the model; until then
            nothing waits for it. Below sync_every.
        alpha: this part of the parameters stays when a result comes: alpha * parameters + (1 -
            alpha) * base. From 0 to below 1.
        proximal: adds proximal * (parameters - base) to each gradient before an inner step, as
            FedProx does (Li et al., arXiv 1812.06127, equation 2). Not with a delay, nor with a
            process_group.
        delta: the format of what is pushed, any of gradient_dtype: "f32", "bf16", "int8", "int4",
            "topk" … What few bits cannot hold stays at the rank, and is in its next push.
        formats: the same by patterns of parameters' names: see `Worker`.
        schedule: of lr, which the box computes round by round: see DistributedOptimizer.
        tokens: says how many tokens this rank has used in all: what it pushes counts as much as it
            has used since the push before. None: all ranks count alike. Who goes on restores its
            counter, too: give it to steps(), or save it beside the state_dict().
        process_group: the processes of this island, which train one replica in DDP: its first one
            is a rank of the job, and gives the others what it has.
        options: of `Worker`, such as job, box, quorum and on_loss. parameter_dtype is the format of
            results, by default "f32". With a quorum a rank takes part in a fragment's round or is
            late in it, whatever it does in others.
        Raises InvalidError, which names what cannot be, and what to do.
        """
        check_course(sync_every, fragments, delay, alpha, proximal)
        _rules.check_schedule(schedule or {})
        rule, hyper = hyper_of(lr, momentum, nesterov=nesterov, schedule=schedule or {})
        check_options(rule, fragments, delta, options)
        self._inner = inner_optimizers(inner)
        model = unwrapped(model, process_group)
        self._island = Island(process_group)
        self._island.check(options, proximal)
        self._alpha, self._proximal = float(alpha), float(proximal)
        self._model, self._options = model, options
        self._named, self._frozen = exchanged_in(model, self._inner, options)
        self._present = Present(model, "DiLoCo")
        given: dict[str, Option] = {
            "parameter_dtype": "f32",
            **options,
            "gradient_dtype": delta,
            "optimizer": rule,
            "reduction": "mean",
            "initial": "broadcast",
            **({"weights": "yes"} if tokens else {}),
        }
        keys = keys_of(self._named, formats or {}, given)
        self._fragments = fragments_of(keys, fragments, may_differ=has_quorum(options))
        self._keys = sorted(keys, key=lambda key: key.name)
        self._course = Course(sync_every, fragments, delay, tokens)
        own = OuterOwn(model, self._inner, self._named, self._course)
        self._steps = OuterSteps(own, self._course)
        self._results = str(given["parameter_dtype"])
        first_round = torch.ones(1, dtype=torch.int64, device=self._keys[0].device)

        def join() -> None:
            self._worker = Worker(
                {key.name: key.for_job() for key in self._keys},
                hyper=hyper,
                formats=formats,
                saver=None if has_quorum(options) else self._steps.save,  # it has no steps()
                **given,
            )
            self._begin()
            compare_the_rest(model, self._worker, options)
            first_round.fill_(self._worker.first_round)

        self._island.share(join, [*self._named.values(), first_round])
        self._course.begin(int(first_round))
        self._watch = Watch(
            self._worker.job if self._worker else str(options.get("job", "")),
            self._named,
            "step() of the inner optimizer that DiLoCo was made of",
            "Call it, and not that of a copy or of another optimizer",
        )
        self._watch.is_local = lambda: True
        self._hooks = hooks_of(self._inner, self._stepped, self._keys, self._proximal)

    # ---- What it is.

    @property
    def worker(self) -> Worker:
        """The rank's worker. Raises InvalidError where another process of the island has it."""
        if self._worker is None:
            raise InvalidError(
                "the first process of this island's process_group is the rank of the job: ask there"
            )
        return self._worker

    @property
    def rank(self) -> int:
        """Which rank this is, from 0; with a process_group, which island."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """The ranks of the job when it began."""
        return self.worker.world_size

    @property
    def steps_done(self) -> int:
        """Inner steps since the job began; of a rank that joined later, rounds * sync_every.

        The others have made as many only if none called synchronize() or load_state_dict().
        """
        return self._course.steps

    def base(self) -> dict[str, torch.Tensor]:
        """A copy of what all ranks have in common, by parameters' names. Waits for results.

        Shapes are those of the parameters, types those of results (float32, unless parameter_dtype
        is bf16 or f16). With a process_group its first process has it.
        """
        self.worker  # noqa: B018  # or it is elsewhere
        self._take(self._keys)
        pairs = (pair for key in self._keys for pair in key.parts_of(key.base).items())
        return {name: part.clone() for name, part in pairs}

    # ---- Steps.

    def synchronize(self) -> None:
        """Exchanges all that the model has moved, at once: then the model is the base.

        Results that are under way come into the model first, as after `delay` steps, with alpha.
        All ranks call it after the same step: then they have the same parameters, as for an
        evaluation, or at the end. It is a round of the job, and a step of the outer optimizer, of
        all fragments; but with one fragment and no step since it was sent it only takes the result.
        """
        self._steps.check_outside("synchronize()")
        rounds = int(self._course.has_moved)

        def exchange() -> None:
            self._take(self._keys)
            if rounds:
                for key in [key for f in self._course.under_way for key in self._fragments[f]]:
                    key.merge(self._alpha)
                for fragment in range(len(self._fragments)):
                    self._push(fragment)
                self._take(self._keys)
            for key in self._keys:
                key.merge(0.0)

        self._island.share(exchange, [*self._named.values()])
        self._course.synchronized(rounds=rounds)

    def sync_buffers(self) -> None:
        """Makes the model's buffers the same: see DistributedOptimizer.sync_buffers.

        All ranks call it after as many steps. In an island all get what its first process has.
        """
        check_buffers(buffers := [b for b in self._model.buffers() if b.numel()])

        def exchange() -> None:
            self._buffers = self._buffers or Buffers(self._model, self.worker, self._options)
            self._buffers.sync()

        self._island.share(exchange, buffers)

    def steps(self, until: int, **kept: Stateful) -> Iterator[int]:
        """Counts inner steps from `steps_done` to `until`: see DistributedOptimizer.steps.

        Where a cycle ends, and the box keeps a checkpoint, it has this rank's parameters, the state
        of the inner optimizers, the model's buffers, random numbers and `kept`, at most 64 MiB in
        all. A job that goes on from there has the bits of one that did not stop.
        Raises InvalidError with a quorum, with a process_group, and with fragments if `until` is
        not the end of a cycle.
        """
        check_counted(until, self._course, self._options, is_alone=self._island.is_alone)
        return self._steps.count(until, kept)

    def rejoin(self) -> None:
        """After RewoundError: waits for a box that goes on with the job, from its checkpoint.

        The model is the checkpoint's base, and `steps_done` that of its round. Call steps() again,
        which gives back what this rank had. With a quorum there are no steps(): train on from the
        base. What this rank had sent counted, or is lost, as is what it had moved since.
        """
        check_alone("rejoin()", is_alone=self._island.is_alone)
        while True:
            try:
                for key in self._keys:
                    key.detach()
                self._buffers = None  # that job is gone with the box
                self.worker.rejoin()
                break
            except RewoundError:  # that box is gone as well
                continue
        if self.worker.first_round == 1:
            job = self.worker.job
            self._leave(abandon=False)
            raise InvalidError(
                f"the box of job '{job}' was gone before its first checkpoint: there is nothing to "
                "go on from. Make model, optimizer and DiLoCo anew"
            )
        self._begin()

    # ---- The end.

    def close(self) -> None:
        """Merges what is under way, and leaves the job: the others go on without this rank."""
        if not self._hooks:
            return
        try:
            self._merge([*self._course.under_way])
        finally:
            self._leave(abandon=False)
        if self._worker:
            self._course.warn_if_alone()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """With an exception it does not leave: to the others a rank that fails is lost."""
        if fails(kind, error):
            self._leave(abandon=True)
        else:
            self.close()

    # ---- State, for files of the program.

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizers' states, the base, where the cycle is, and on rank 0 the momentum.

        At the end of a cycle; with one fragment after any step. Waits for results under way, and
        changes nothing. Save the model's state_dict() of each rank beside it. What a coded `delta`
        has left at the rank is not in it. Raises InvalidError with a quorum.
        """
        self._course.check_even("state_dict()")
        check_without_quorum("state_dict()", self._options)
        state: dict[str, Any] = {"inner": [each.state_dict() for each in self._inner]}
        if self._worker:
            self._take(self._keys)
            state["outer"] = fetch_outer(self._worker, self._keys)
        return {**state, "course": self._course.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state_dict(): all ranks call it, after the same step, such as none.

        Load the model's own state before or afterwards: what differs from the base has moved.
        Raises InvalidError if it is of another model, cycle or outer optimizer, with a quorum, or
        with results of few bits.
        """
        self._course.check_even("load_state_dict()")
        check_loaded(self._results, self._options)
        self._course.check_same(state["course"])
        check_inner(self._inner, state["inner"])
        loaded: list[LoadedOuter] = []  # of the first process

        def check() -> None:
            loaded.append(LoadedOuter(self.worker, self._keys, state.get("outer")))

        def send() -> None:
            self._take(self._keys)
            loaded[0].send()

        nothing = [torch.zeros(1, device=self._keys[0].device)]
        self._island.share(check, nothing)
        load_inner(self._inner, state["inner"])
        self._course.load(state["course"])
        self._island.share(send, nothing)

    # ---- Inside.

    def _begin(self) -> None:
        """Takes the job's parameters, and gives it rank 0's where it begins."""
        worker = self.worker
        initial = {key.name: filled(key.values()) for key in self._keys}
        worker.broadcast({name: memory_of(tensor) for name, tensor in initial.items()})
        for key in self._keys:
            key.attach(worker)
            key.merge(0.0)
        _device.exchange_on(next(iter(self._named.values())).device, worker)
        self._course.begin(worker.first_round)
        self._steps.begin(worker)

    def _stepped(self) -> None:
        """The inner optimizer has made a step."""
        self._watch.end()
        due, ending = self._course.advance()
        self._merge(due)
        for fragment in ending:
            self._present.check(self._model)
            check_unchanged(self._named, self._frozen)
            self._send(fragment)
            self._course.sent(fragment)
        if ending and not self._course.delay:
            self._merge(ending)
        self._steps.end_step()

    def _send(self, fragment: int) -> None:
        """In an island the others hear of an error when they ask for the result."""
        if self._worker is None or self._error:
            return
        try:
            self._push(fragment)
        except Exception as error:  # of tokens(), too
            if self._island.is_alone:
                raise
            self._error = error

    def _push(self, fragment: int) -> None:
        weight = self._course.weight_of(fragment)
        if weight is not None:
            self.worker.weight(weight)
        for key in self._fragments[fragment]:
            key.push()

    def _take(self, keys: Sequence[OuterKey]) -> None:
        if self._error:
            raise self._error
        for key in keys:
            key.take()

    def _merge(self, fragments: Sequence[int]) -> None:
        """Takes the results of these fragments into the model."""
        if not fragments:
            return
        keys = [key for fragment in fragments for key in self._fragments[fragment]]

        def merge() -> None:
            for key in keys:  # while the others come, and what came is in the caches
                self._take([key])
                key.merge(self._alpha)

        self._island.share(merge, [p for key in keys for p in key.members.values()])
        for fragment in fragments:
            self._course.merged(fragment)

    def _leave(self, *, abandon: bool) -> None:
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        for key in self._keys:
            key.detach()
        self._error = BadHandleError("the DiLoCo has left its job: make a new one")
        if self._buffers:
            self._buffers.close()
        if self._worker:
            (self._worker.abandon if abandon else self._worker.close)()
        (self._watch.end if abandon else self._watch.close)()
