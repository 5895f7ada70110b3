"""A PyTorch optimizer whose steps the box makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from phub import _rules
from phub._exchanged import Exchanged, fetch_state, has_steps, send_state
from phub._options import MAX_DIMENSIONS, Key, Option
from phub.errors import InvalidError
from phub.pytorch import format_of_job, memory_of
from phub.worker import Worker

_VALUES_IN_A_CALL = 256  # a request of the control port has 16 KiB


class DistributedOptimizer(Optimizer):
    """The box adds the gradients of all ranks and makes the optimizer's steps.

    `opt = phub.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 3e-4), model)`, then the
    usual loop. It shares `param_groups` with the optimizer that it was made of; schedulers are made
    of this one. A parameter's key is its name. All ranks begin with rank 0's parameters.
    Gradients stay each rank's own. After an error make everything anew.
    """

    # A GradScaler then calls step() with `found_inf` set, however it was used. What it does to the
    # gradients does not change their version.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        overlap: Literal["backward", "forward", False] = "backward",
        accumulate: int = 1,
        server: bool = True,
        **options: Option,
    ) -> None:
        """Joins the job. Returns when all ranks have joined.

        optimizer: exactly torch.optim's SGD, Adam, AdamW, Adagrad or RMSprop, over parameters of
            the model, which are float32, bfloat16 or float16 on the CPU. Those that require no
            gradient are not exchanged. If it has state, rank 0's is what the box begins with.
        overlap: "backward": gradients are pushed as backward() computes them, and step() waits for
            the new parameters. "forward": the next forward() waits, module by module. False:
            everything is in step(), and gradients may be changed before.
        accumulate: so many backward() for a step.
        server: False: the box averages the gradients, and step() calls the optimizer, of any kind,
            with the mean in `.grad`.
        options: of `Worker`. Unlike there, the default of reduction is "mean".
        Raises InvalidError, which names the parameter or the group, and what to do.
        """
        if overlap not in ("backward", "forward", False) or accumulate < 1:
            raise InvalidError(
                f"overlap={overlap!r}, accumulate={accumulate}: overlap is 'backward', 'forward' "
                "or False, and accumulate at least 1"
            )
        if options.get("consistency", "bsp") != "bsp":
            raise InvalidError("a step is a round of all ranks: consistency must be bsp")
        if overlap == "forward" and not server:
            raise InvalidError('overlap="forward" is for steps of the box (server=True)')
        self._complete = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self._overlap = overlap
        self._accumulate = accumulate
        self._rule = _rules.name_of(optimizer) if server else "none"
        self._syncs = True
        self._round_values: dict[str, float] | None = None  # of the round that has begun
        self._synchronized = False
        given: dict[str, Option] = {
            "reduction": "mean",
            "initial": "broadcast",
            **options,
            "optimizer": self._rule,
        }
        named = self._named(model)
        given = {**_formats(named), **given}
        fixed = _rules.fixed_values(self._rule, self.param_groups)
        self.worker = Worker(self._keys(named), hyper=fixed, **given)
        self._mine = [
            Exchanged.of(self.worker, name, tensor, given) for name, tensor in named.items()
        ]
        self._broadcast()
        # Whoever joins later takes the values that the job has.
        self._sent = {} if self.worker.first_round == 1 else self._values()
        if server and self.worker.initial_counts and has_steps(self._mine, optimizer.state):
            self._send_values()
            send_state(self.worker, self._mine, optimizer.state)
        if server:
            self._keep_others(optimizer.state)
        else:
            self.state = optimizer.state
        self._hooks = list(self._hooks_on(model))
        self._complete = True

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return self.worker.rank

    @property
    def world_size(self) -> int:
        """The ranks of the job when it began."""
        return self.worker.world_size

    def close(self) -> None:
        """Leaves the job, and the model's hooks. The others go on without this rank."""
        for hook in self._hooks:
            hook.remove()
        self.worker.close()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward() only accumulates, and nothing is pushed."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Pushes what backward() has not, and returns when the new parameters are there.

        With overlap="forward" it returns at once. A parameter without a gradient counts as one with
        a gradient of zero. Raises RuntimeError, which names the parameter and what to do, if the
        gradients that were pushed are not those that are there now.
        """
        if closure is not None:
            raise RuntimeError(
                "DistributedOptimizer.step() takes no closure: a step has one exchange. Call the "
                "closure before, loss = closure(), and then step()"
            )
        if "found_inf" in self.__dict__:
            raise RuntimeError(
                "DistributedOptimizer works without GradScaler: the gradients that the box has are "
                "the scaled ones. Use bfloat16, which needs no scaling, or phub.ddp"
            )
        self._finish_round()
        for mine in self._mine:
            mine.waits = self._overlap == "forward"
            if not mine.waits and not self._synchronized:
                mine.take()
        if self._rule == "none":
            self.optimizer.step()
        for mine in self._mine:
            mine.end_step()
        self._round_values = None
        self._synchronized = False

    def synchronize(self) -> None:
        """Waits for results that are under way.

        With server=False the means are in `.grad` afterwards, and may be clipped before step().
        With overlap="forward" the parameters are new, as a use that is no forward() needs them.
        """
        if self._rule == "none" and not self._synchronized:
            self._finish_round()
            for mine in self._mine:
                mine.take()
            self._synchronized = True
        for mine in self._mine:
            if mine.waits:
                mine.take()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: a job's keys cannot change."""
        if self.__dict__.get("_complete"):
            raise RuntimeError(
                "the keys of a job cannot change: add the group to the optimizer before, or make a "
                "new DistributedOptimizer of the optimizer with all groups, with another job's name"
            )
        super().add_param_group(param_group)

    # ---- State, in PyTorch's layout.

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own would be, with which it can be loaded. Between steps."""
        if self._rule == "none":
            return self.optimizer.state_dict()
        self._refuse_in_round("state_dict()")
        self.synchronize()
        self._send_values()  # from then on the box knows that the job has begun
        self.state.update(self.optimizer.state)  # of parameters that are not exchanged
        self.state.update(fetch_state(self.worker, self._mine, self._rule))
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Between steps, on all ranks; what rank 0 loads is what the box takes.

        The box takes the model's parameters, too: load the model first.
        """
        if self._rule == "none":
            self.optimizer.load_state_dict(state_dict)
            self.param_groups = self.optimizer.param_groups
            return
        self._refuse_in_round("load_state_dict()")
        self.synchronize()
        super().load_state_dict(state_dict)
        self.optimizer.param_groups = self.param_groups
        if self.rank == 0:
            self._send_values()
            send_state(self.worker, self._mine, self.state)
        self._keep_others(self.state)
        for mine in self._mine:
            mine.written = mine.tensor._version

    def _keep_others(self, state: Mapping[Any, Any]) -> None:
        """Leaves to the optimizer the state of parameters that are not exchanged."""
        mine = {mine.tensor for mine in self._mine}
        others = {tensor: each for tensor, each in state.items() if tensor not in mine}
        self.state.clear()
        self.optimizer.state.clear()
        self.optimizer.state.update(others)

    def _refuse_in_round(self, what: str) -> None:
        for mine in self._mine:
            if mine.pushed:
                raise RuntimeError(
                    f"{what} between backward() and step(): the gradient of '{mine.name}' is under "
                    "way. Call it after step()"
                )

    # ---- Making it.

    def _named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer that require a gradient, in the model's order."""
        wanted = {id(p) for group in self.param_groups for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if id(p) in wanted}
        foreign = wanted - {id(p) for p in named.values()}
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if id(p) in foreign:
                    raise InvalidError(
                        f"group {number} of the optimizer has a parameter of shape "
                        f"{tuple(p.shape)} that is not the model's: give the model whose "
                        "parameters() the optimizer was made of"
                    )
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        return {name: p for name, p in named.items() if p.requires_grad}

    def _keys(self, named: Mapping[str, nn.Parameter]) -> dict[str, int | Key]:
        group_of = {id(p): n for n, group in enumerate(self.param_groups) for p in group["params"]}
        return {
            name: Key(
                p.numel(),
                priority=len(named) - number if self._overlap == "forward" else 0,
                shape=tuple(p.shape) if p.dim() <= MAX_DIMENSIONS else (),
                group=0 if self._rule == "none" else group_of[id(p)],
            )
            for number, (name, p) in enumerate(named.items())
        }

    def _broadcast(self) -> None:
        if self._rule == "none" and self.worker.first_round > 1:
            raise InvalidError(
                f"the job is in round {self.worker.first_round}: with server=False the box has no "
                "model, so a rank cannot join later. Start all ranks again"
            )
        initial = {m.name: m.tensor.detach().float().contiguous() for m in self._mine}
        self.worker.broadcast({name: memory_of(tensor) for name, tensor in initial.items()})
        for mine in self._mine:
            with torch.no_grad():
                if not self.worker.initial_counts:
                    mine.tensor.copy_(mine.result)
            mine.written = mine.tensor._version

    def _hooks_on(self, model: nn.Module) -> Iterator[RemovableHandle]:
        of = {id(mine.tensor): mine for mine in self._mine}
        if self._overlap:
            for mine in self._mine:
                yield mine.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, mine=mine: self._on_gradient(mine)
                )
        if self._overlap == "forward":
            for module in model.modules():
                own = [of[id(p)] for p in module.parameters(recurse=False) if id(p) in of]
                if own:
                    yield module.register_forward_pre_hook(lambda *_, own=own: self._take_all(own))
            yield model.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_: self.synchronize()
            )

    # ---- A round.

    def _on_gradient(self, mine: Exchanged) -> None:
        if not self._syncs:
            return
        mine.backwards += 1
        if mine.pushed:
            raise RuntimeError(
                f"the gradient of '{mine.name}' was pushed already: backward() came "
                f"{mine.backwards} times before step(). To accumulate, use "
                f"accumulate={mine.backwards}, or no_sync() around all backward() but the last"
            )
        if mine.backwards == self._accumulate:
            self._begin_round()
            mine.push()

    def _begin_round(self) -> None:
        """Before the first push of a round its hyperparameters go out, if they are new."""
        if self._round_values is None:
            self._round_values = self._send_values()

    def _send_values(self) -> dict[str, float]:
        values = self._values()
        changed = {name: value for name, value in values.items() if self._sent.get(name) != value}
        names = list(changed)
        for at in range(0, len(names), _VALUES_IN_A_CALL):
            self.worker.set_hyper({n: changed[n] for n in names[at : at + _VALUES_IN_A_CALL]})
        self._sent = values
        return values

    def _values(self) -> dict[str, float]:
        if self._rule == "none":
            return {}
        return {
            f"{name}@{number}": value
            for number, group in enumerate(self.param_groups)
            if any(p.requires_grad for p in group["params"])
            for name, value in _rules.values_of(self._rule, group).items()
        }

    def _finish_round(self) -> None:
        """Checks what was pushed, and pushes the rest."""
        if self._synchronized:
            return
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter '{name}' requires a gradient now, and the job has no key for it: "
                    "make a new DistributedOptimizer, with another job's name"
                )
        for mine in self._mine:
            if mine.pushed:
                mine.check_unchanged()
        before, now = self._round_values, self._values()
        if before is not None and before != now:
            name = next(name for name, value in before.items() if now.get(name) != value)
            field, group = name.split("@")
            raise RuntimeError(
                f"{field} of group {group} was changed between backward() and step(), from "
                f"{before[name]} to {now.get(name)}: change it (scheduler.step()) after step(), or "
                "use overlap=False"
            )
        self._begin_round()
        for mine in self._mine:
            if not mine.pushed:
                mine.push()

    def _take_all(self, parameters: list[Exchanged]) -> None:
        for mine in parameters:
            if mine.waits:
                mine.take()


def _formats(named: Mapping[str, nn.Parameter]) -> dict[str, Option]:
    kind = format_of_job(named)
    return {"gradient_dtype": kind, "parameter_dtype": kind}
