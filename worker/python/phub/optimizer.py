"""A PyTorch optimizer whose steps the box makes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from phub import _device, _rules
from phub._box_state import BoxState
from phub._box_ways import BoxWays, check_auto, ways_for
from phub._buffers import Buffers, check_statistics
from phub._exchanged import take_waiting
from phub._form import check_delay, check_form, check_shards, check_without_box, take_slack
from phub._hooks import Hooks
from phub._memory import format_in_memory
from phub._model import Keys, check_format, is_sharded
from phub._options import Option
from phub._own_state import OwnState, Stateful
from phub._round import Round
from phub._same import Same
from phub._steps import Steps
from phub._tensors import filled, memory_of
from phub._values import Values
from phub._watch import Watch
from phub._ways import AUTO
from phub.errors import Error, InvalidError, RewoundError
from phub.worker import Worker


def _skips_rounds(options: Mapping[str, Option]) -> bool:
    return options.get("on_nonfinite") == "skip"


class DistributedOptimizer(Optimizer):
    """The box adds the gradients of all ranks and makes the optimizer's steps.

    `opt = phub.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 3e-4), model)`, then the
    usual loop. It shares `param_groups` with the optimizer that it was made of; schedulers are made
    of this one. A parameter's key is its name. All ranks begin with rank 0's parameters.
    Gradients stay each rank's own. After a RewoundError call `rejoin`; after another error make
    everything anew.
    """

    # A GradScaler then calls step() with `found_inf` set, however it was used. What it does to the
    # gradients does not change their version. phub.GradScaler does not set it.
    _step_supports_amp_scaling = True
    _buffers: Buffers | None = None  # from the first sync_buffers() on

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        overlap: Literal["backward", "forward", False] = "backward",
        accumulate: int = 1,
        server: bool = True,
        zero_copy: bool = False,
        delay: int = 0,
        max_norm: float = 0.0,
        formats: Mapping[str, str] | None = None,
        factors: Mapping[str, int] | Literal["auto"] | None = None,
        rows: Mapping[str, int] | None = None,
        lazy: Sequence[str] | str = (),
        schedule: Mapping[str, float] | None = None,
        **options: Option,
    ) -> None:
        """Joins the job. Returns when all ranks have joined.

        optimizer: exactly torch.optim's SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta or
            SparseAdam, Adafactor or Muon, or phub.Lion, phub.Lars, phub.Lamb, phub.Adafactor or
            phub.Muon, over parameters of the model, which are float32, bfloat16 or float16 on the
            CPU, or all on one GPU. Those that require no gradient, of any type, and those without
            elements are not exchanged. If it has state, the box takes rank 0's.
        model: after fully_shard() each process of a replica exchanges its shard with its peers in
            the other replicas: job="NAME-SHARD", rank and world_size of the replica.
        overlap: "backward": gradients are pushed as backward() computes them, and step() waits for
            the new parameters. "forward": whatever reads a parameter next waits for it, such as
            the next forward(), layer by layer. False: everything is in step(), and gradients may be
            changed before.
        accumulate: so many backward() for a step.
        server: False: the box averages the gradients, and step() calls the optimizer, of any kind
            but LBFGS, with the mean in `.grad`.
        zero_copy: the parameters are views of the memory that results come in, read-only until
            `close`; needs parameters of one format.
        delay: 1: step() waits for the parameters of the step before it, and this one's are on their
            way while the next forward() and backward() compute, with those. 0: none is late. Until
            step() gradients may be changed, as with overlap=False. `synchronize` takes the last.
            consistency="ssp" with slack=1 is another name of it.
        max_norm: the box clips the gradient of all parameters together to this norm, as
            clip_grad_norm_ does, after the mean; 0: it does not. `grad_norm` has what it was. Not
            with phub.Lamb, Adafactor and Muon.
        formats: of gradients on the wire, by patterns of parameters' names: see `Worker`. Others
            have gradient_dtype, by default the parameters' format, or float32 if they have several.
        factors: by patterns of names of nn.Linear's weights, how many samples a rank has in a step
            at most: factors are sent of these, and the box multiplies. They are float32,
            used once in a forward(), and have no `.grad`. With accumulate, the samples of all its
            backward() count. Or "auto": phub chooses the weights, in the second step and when
            batches or links have changed; these have no `.grad` in some steps.
        rows: of weights of nn.Embedding(sparse=True) only those rows of the gradient are sent that
            a step used. By patterns of their names, how many different ones a rank has in a step at
            most, for which the box has memory; without a pattern, all.
        lazy: patterns of names of such weights, or one. The optimizer's step changes the rows that
            a rank used, and leaves alone parameters and state of the others. Else their gradient is
            zero. With SparseAdam all are.
        schedule: of the learning rate, which the box computes round by round: {"lr_warmup": 100,
            "lr_cosine": 5000}. The groups' `lr` stays what it begins with. Instead of a scheduler,
            of which every change is a call of the box; training.md has PyTorch's names of them.
        options: of `Worker`. Unlike there, the default of reduction is "mean". With
            on_nonfinite="skip" all ranks leave out a step with a NaN or an infinity: `skipped`.
            With state_dtype="8bit" the box keeps the optimizer's state in a quarter of the memory.
        Raises InvalidError, which names the parameter or the group, and what to do.
        """
        delay, options = take_slack(delay, options)
        check_form(overlap, accumulate, server, zero_copy, options)
        check_delay(delay, overlap, server=server, zero_copy=zero_copy, options=options)
        check_shards(
            model,
            options,
            server=server,
            zero_copy=zero_copy,
            factors=factors,
            rows=rows or lazy,
            max_norm=max_norm,
            optimizer=optimizer,
        )
        if not server:
            check_without_box(optimizer, factors, rows or lazy, max_norm, schedule)
        if isinstance(factors, str) and factors == AUTO:
            check_auto(overlap, accumulate, delay, options)
        _rules.check_schedule(schedule or {})
        self._complete = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self._overlap, self._delay = overlap, delay
        self._made_for_state = False  # `state` has what a step left that was none of the job
        self._is_sharded = is_sharded(model.parameters())
        self._rule = _rules.name_of(optimizer) if server else "none"
        given: dict[str, Option] = {
            "reduction": "mean",
            "initial": "broadcast",
            **options,
            "optimizer": self._rule,
        }
        keys = Keys(
            model,
            self.param_groups,
            options,
            factors=factors or {},
            formats=formats or {},
            rows=rows or {},
            lazy=None if self._rule == "sparse-adam" else lazy,
            server=server,
            first_goes_first=overlap == "forward",
        )
        given = {**keys.formats(), **given}
        if zero_copy:
            check_format(keys.named, format_in_memory(str(given["parameter_dtype"])))
        fixed = _rules.fixed_values(self._rule, self.param_groups)
        fixed |= schedule or {}
        if max_norm:
            fixed["max_norm"] = max_norm
        is_gated = max_norm or _skips_rounds(options) or _rules.goes_by_keys(self._rule)
        self._model, self._options = model, options
        me: DistributedOptimizer = weakref.proxy(self)  # no cycle: all is freed with the optimizer
        self._steps = Steps(
            OwnState(model, optimizer),
            lambda: take_waiting(me._mine),
            lambda: me._values.sent,
            has_branches=bool(options.get("branches")),
        )
        # With a quorum there are no steps(), and a late rank has no part in a checkpoint.
        saver = self._steps.save if server and not options.get("quorum") else None
        self.worker = Worker(keys.keys, hyper=fixed, formats=formats, saver=saver, **given)
        self._mine = keys.exchanged(
            self.worker, is_mean=not server, zero_copy=zero_copy, delay=bool(delay)
        )
        keys.check_joined(self.worker)
        self._begin()
        self._watch, self._same = self._watch_for(keys.named), self._same_for(server)
        self._values = Values(
            self.worker, self._rule, optimizer, may_change=not options.get("quorum")
        )
        if self._steps.restored:
            self._forget_values()
        self._at_box = BoxState(self.worker, self._mine, self._rule, optimizer)
        if server:
            self._at_box.send_first()
            self.state = self._at_box.leave_others(optimizer.state)
        else:
            self.state = optimizer.state
        self.ways = self._ways_for(keys, str(given["parameter_dtype"]))
        self._round = Round(
            model,
            self._mine,
            keys.frozen,
            accumulate,
            values=self._values,
            at_box=self._at_box,
            same=self._same,
            watch=self._watch,
            notes_verdict=bool(delay and is_gated),
            ways=self.ways,
        )
        self._hooks = Hooks(
            model,
            self._mine,
            keys.layers,
            self._round.on_gradient if overlap and not delay else None,
            has_views=zero_copy,
            is_late=bool(delay),
        )
        self._complete = True

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """The ranks of the job when it began."""
        return self.worker.world_size

    @property
    def grad_norm(self) -> float | None:
        """The norm of the latest step's gradient, before it was clipped. None: it is not known.

        It is known after a step with max_norm, on_nonfinite="skip", or an optimizer whose steps go
        by whole parameters (Lars, Lamb, Adafactor, Muon); with overlap="forward", once a
        parameter's new value is there. With delay=1 it is that of the step before.
        """
        verdict = self._round.verdict()
        return None if verdict is None else verdict.norm

    @property
    def skipped(self) -> bool:
        """Whether the latest step was left out, on all ranks, because it is not finite.

        With delay=1 it is that before, until `synchronize`.
        """
        verdict = self._round.verdict()
        return verdict is not None and verdict.skipped

    def await_skipped(self) -> bool:
        """`skipped`, once it is known: a gated round has no result before it is."""
        take_waiting(self._mine if self._delay else self._mine[:1])
        return self.skipped

    def use_scale(self, scale: Callable[[], float]) -> None:
        """Gradients are multiplied by what it returns, and the box divides: for GradScaler."""
        self._refuse_sharded("a GradScaler", "bfloat16 needs none")
        if self._rule == "none" or self._options.get("on_nonfinite") != "skip":
            raise InvalidError(
                "phub.GradScaler needs a DistributedOptimizer with on_nonfinite='skip' and "
                "server=True: all ranks leave out the steps that overflow"
            )
        if self._delay:
            raise InvalidError(
                "a GradScaler and delay=1 do not go together: the scale of a step follows whether "
                "the one before it overflowed, which is not known yet. Use bfloat16"
            )
        if self._options.get("branches"):
            raise InvalidError(
                "a GradScaler and branches do not go together: the scale follows one training"
            )
        if self.worker.first_round > 1 and self._steps.restored is None:
            raise InvalidError(
                f"the job is in round {self.worker.first_round}, and this rank does not know the "
                "scale of the others: with a GradScaler a rank cannot join later, and a job that "
                "goes on from a checkpoint needs steps(n, scaler=scaler), which gives it back"
            )
        self._values.use_scale(scale)

    def close(self) -> None:
        """Leaves the job, and the model's hooks. The others go on without this rank.

        The worker's memory is given back, and the model is freed with its last reference. Raises
        InvalidError if there was a backward(), and never a step.
        """
        self._hooks.remove()
        with contextlib.suppress(Error):  # then they are as they are
            take_waiting(self._mine)
        for mine in self._mine:
            mine.look_away()  # views keep the worker's memory
        self._values.use_scale(None)
        for other in (self._buffers, self._same, self.ways):
            if other:
                other.close()
        self.worker.close()
        self._watch.close()

    def weight(self, value: float) -> None:
        """The weight of this rank's gradients, from this step on: its samples or tokens in a step.

        In a job with the option weights="yes": with reduction="mean" the gradient of a step is the
        sum of the ranks' gradients times their weights, divided by the sum of the weights. Where
        each rank's loss is a mean of its tokens, that is the mean of all tokens. Call it before the
        step's last backward(), which pushes; with accumulate, with the sum of all its backward().
        It is 1 at the beginning. Raises InvalidError: it is not finite, or below 2^-126, or the job
        has no weights; RuntimeError: gradients of this step have been pushed.
        """
        pushed = next((mine.name for mine in self._mine if mine.pushed), None)
        if pushed is not None:
            raise RuntimeError(
                f"weight() comes too late for this step: backward() has pushed the gradient of "
                f"'{pushed}'. Call it before that"
            )
        self.worker.weight(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward() only accumulates, and nothing is pushed."""
        before, self._round.syncs = self._round.syncs, False
        try:
            yield
        finally:
            self._round.syncs = before

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Pushes what backward() has not, and returns when the new parameters are there.

        closure: called once, at the beginning; step() returns what it returns.

        With overlap="forward" it returns at once; with delay=1 when the parameters of the step
        before are there. A parameter without a gradient counts as one with a gradient of zero.
        Raises RuntimeError, which names the parameter and what to do, if the gradients that were
        pushed are not those that are there now.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if "found_inf" in self.__dict__:
            raise RuntimeError(
                "the box has the scaled gradients, and torch's GradScaler does not tell it: use "
                "phub.GradScaler(optimizer), or phub.ddp, or bfloat16, which needs no scaling"
            )
        if self._rule == "none":
            if self._is_for_state():
                self._made_for_state = True
                self.optimizer.step()
                return loss
            if self._made_for_state:
                self.state.clear()
                self._made_for_state = False
        self._round.finish(self.steps_done + 1)
        if self._delay:
            self._round.take_at_next_step()
        elif self._overlap == "forward":
            self._round.take_later()
        else:
            self._round.take()
        if self._same:
            self._same.look()
        if self._rule == "none":
            self.optimizer.step()
        self._round.end()
        self._steps.end_step()
        return loss

    def _is_for_state(self) -> bool:
        """Whether PyTorch makes this step to have a state that it can read or load.

        `get_optimizer_state_dict` does, before the first step, with gradients and rates of 0. It is
        no step of the job, which other ranks may not make. The real first one begins without what
        it leaves, unless a state has been loaded since.
        """
        return (
            (self._made_for_state or not self.state)
            and all(not group.get("lr", 1) for group in self.param_groups)
            and self._round.is_empty()
        )

    def synchronize(self) -> None:
        """Waits for results that are under way.

        With server=False the means are in `.grad` afterwards, and may be clipped before step().
        With overlap="forward" the parameters are new; what reads them in Python waits by itself.
        With delay=1 they are those of the latest step, as after the last one they should be, and
        the next forward() has them. The model's state_dict() does it, too.
        """
        if self._rule == "none":
            self._round.finish(self.steps_done + 1)
            self._round.synchronize()
        take_waiting(self._mine)

    def sync_buffers(self) -> None:
        """Makes the model's buffers (BatchNorm's statistics) the same on all ranks.

        Those with a fraction become the mean, in float32; others are rank 0's. All ranks call it
        after the same step. The first call joins a job of its own, JOB-buffers, with all ranks.
        """
        self._refuse_sharded("sync_buffers()", "average them in the program's process group")
        self._buffers = self._buffers or Buffers(self._model, self.worker, self._options)
        self._buffers.sync()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: a job's keys cannot change."""
        if self.__dict__.get("_complete"):
            raise RuntimeError(
                "the keys of a job cannot change: add the group to the optimizer before, or make a "
                "new DistributedOptimizer of the optimizer with all groups, with another job's name"
            )
        super().add_param_group(param_group)

    # ---- Going on after the box's death.

    @property
    def steps_done(self) -> int:
        """How many steps the job has made."""
        return self._steps.done

    def steps(self, until: int, **kept: Stateful) -> Iterator[int]:
        """Counts the job's steps: from `steps_done` to `until`, which the job then has made.

        Call step() once in each. What a rank has for itself is saved before each step of which the
        box keeps a checkpoint, and is given back if the job goes on from there: the values of the
        parameter groups, the model's buffers, the random numbers of torch and random, and `kept`:
        schedulers, data loaders and others with state_dict() and load_state_dict(). In a job with
        branches each branch has all of this, but for the groups' values and what has the attribute
        `of_all_branches`, for itself. It ends when all ranks have made the steps. Jobs with a
        quorum have none.
        """
        if self._options.get("quorum"):
            raise InvalidError(
                "steps(): the ranks of a job with a quorum are at different steps. Train while "
                "worker.round(name) is below the last round, and close()"
            )
        return self._steps.count(until, kept)

    def rejoin(self) -> None:
        """After RewoundError: waits for a box that goes on with the job, from its checkpoint.

        The parameters are those of the checkpoint, and `steps_done` the steps that it has. Call
        steps() again.
        """
        self._refuse_sharded("rejoin()", "start all processes again")
        for mine in self._mine:
            mine.look_away()
        self._buffers = None  # that job is gone with the box
        if self.ways:
            self.ways.end(self._mine)  # and so is theirs
            self.ways = None
        while True:
            with contextlib.suppress(RewoundError):  # that box is gone as well
                self._go_on()
                break
        self._forget_values()
        self._round.forget()

    def _forget_values(self) -> None:
        """The job has gone on from a checkpoint."""
        if self._options.get("branches"):
            self._values.take_as_sent(self._steps.restored_values)
        else:
            self._values.forget()

    def _go_on(self) -> None:
        self.worker.rejoin()
        if self.worker.first_round == 1:
            job = self.worker.job
            self.close()
            raise InvalidError(
                f"the box of job '{job}' was gone before its first checkpoint: there is nothing to "
                "go on from. Make model and DistributedOptimizer anew"
            )
        for mine in self._mine:
            mine.look()
        self._begin()

    def _refuse_sharded(self, what: str, way_out: str) -> None:
        if self._is_sharded:
            raise InvalidError(
                f"{what} and a sharded model (fully_shard): each process of a replica has a job of "
                f"its own, and another does not know what happened in it; {way_out}"
            )

    # ---- State, in PyTorch's layout.

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own would be, with which it can be loaded. Between steps."""
        if self._rule == "none":
            return self.optimizer.state_dict()
        self._at_box.refuse_in_round("state_dict()")
        self.synchronize()
        self._at_box.send_loaded()
        self.state.update(self._at_box.fetch())
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Between steps, on all ranks; what rank 0 loads is what the box takes.

        The box takes it with the next push, and the model's parameters as they are then: load the
        model before or afterwards. Raises InvalidError if a group has another momentum of RMSprop,
        or other ns_steps of Muon, than when the rank joined.
        """
        if self._rule == "none":
            self.optimizer.load_state_dict(state_dict)
            self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
            self._made_for_state = False
            return
        self._at_box.refuse_in_round("load_state_dict()")
        self._values.check_fixed(state_dict["param_groups"])
        self.synchronize()
        super().load_state_dict(state_dict)
        self.optimizer.param_groups = self.param_groups
        self._at_box.load(self.state)
        self.state = self._at_box.leave_others(self.state)

    # ---- Making it.

    def _begin(self) -> None:
        """Takes the job's parameters, and gives it rank 0's where it begins."""
        check_statistics(self._model, self.world_size)
        if self._rule == "none" and self.worker.first_round > 1:
            raise InvalidError(
                f"the job is in round {self.worker.first_round}: with server=False the box has no "
                "model, so a rank cannot join later. Start all ranks again"
            )
        initial = {m.name: filled(m.value.detach().float().cpu().contiguous()) for m in self._mine}
        self.worker.broadcast({name: memory_of(tensor) for name, tensor in initial.items()})
        for mine in self._mine:
            if mine.zero_copy or not self.worker.initial_counts:
                mine.show()
            mine.note_written()
        _device.exchange_on(self._mine[0].tensor.device, self.worker)
        self._steps.begin(self.worker)

    def _ways_for(self, keys: Keys, result_format: str) -> BoxWays | None:
        others = sum(p.numel() for name, p in keys.named.items() if name not in keys.weights)
        me: DistributedOptimizer = weakref.proxy(self)
        return ways_for(
            keys.weights,
            others,
            self._mine,
            self._options,
            syncs=lambda: me._round.syncs,
            result_format=result_format,
        )

    def _watch_for(self, named: Mapping[str, nn.Parameter]) -> Watch:
        return Watch(
            self.worker.job,
            named,
            "step() of the DistributedOptimizer",
            "Call it in place of step() of the optimizer that it was made of, or of another one",
        )

    def _same_for(self, server: bool) -> Same | None:
        if server or self.world_size == 1:  # the box makes the same step for all
            return None
        same = Same(self._model, self.worker, self._options)
        same.compare_what_is_not_exchanged()
        return same
