"""The hyperparameters of an optimizer's groups, and what the box has of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from phub import _rules
from phub.errors import InvalidError
from phub.worker import Worker

_SCALE = "grad_scale"  # by which gradients were multiplied, and the box divides
_IN_A_CALL = 256  # a request of the control port has 16 KiB


class Values:
    """Sends what a schedule has changed, before the first push of a round."""

    def __init__(
        self, worker: Worker, rule: str, optimizer: Optimizer, *, may_change: bool = True
    ) -> None:
        """The job has the values of the optimizer's groups, unless it begins now.

        may_change: whether all ranks change them in the same rounds.
        """
        self._worker = worker
        self._may_change = may_change
        self._rule = rule
        self._optimizer = optimizer
        self._groups_at_first = [dict(group) for group in optimizer.param_groups]
        self._scale: Callable[[], float] | None = None
        # Whoever joins later takes the values that the job has.
        self._sent = {} if worker.first_round == 1 else self._now()
        self._of_round: dict[str, float] | None = None  # of the round that has begun

    def use_scale(self, scale: Callable[[], float] | None) -> None:
        """Gradients are scaled by what it returns; None: they are not."""
        self._scale = scale

    def _send(self) -> dict[str, float]:
        """Sends the values that are new, for the next round. Returns all.

        All ranks send the same for a round, so a rank sends nothing before its first push of it: a
        scheduler may change the values until then.
        """
        values = self._now()
        changed = {name: value for name, value in values.items() if self._sent.get(name) != value}
        names = list(changed)
        if changed and self._sent and not self._may_change:
            name = names[0]
            raise InvalidError(
                f"{name} was changed from {self._sent.get(name)} to {changed[name]} in a job with "
                "a quorum, whose ranks are at different steps: the rate of all would follow each. "
                "Give DistributedOptimizer a schedule, which goes by the job's rounds"
            )
        for at in range(0, len(names), _IN_A_CALL):
            self._worker.set_hyper({n: changed[n] for n in names[at : at + _IN_A_CALL]})
        self._sent = values
        return values

    def forget(self) -> None:
        """The box may have others: all go out before the next push."""
        self._sent = {}
        self._of_round = None

    def take_as_sent(self, sent: dict[str, float] | None) -> None:
        """What the box has is of the branch that runs: of these only changes go out.

        sent: what had gone out; None: what there is now.
        """
        self._sent = self._now() if sent is None else sent
        self._of_round = None

    @property
    def sent(self) -> dict[str, float]:
        """What has gone out, as far as the groups have it."""
        return self._sent

    def begin_round(self) -> bool:
        """Before its first push. Later calls do nothing, and return False."""
        if self._of_round is not None:
            return False
        self.check_fixed(self._optimizer.param_groups)
        self._of_round = self._send()
        return True

    def check_fixed(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises InvalidError if a value that cannot change is another one in these groups."""
        _rules.check_fixed(self._rule, self._groups_at_first, groups)

    def end_round(self) -> None:
        """They may change again."""
        self._of_round = None

    def check_unchanged(self) -> None:
        """Raises RuntimeError if they are not those that the round began with."""
        before, now = self._of_round, self._now()
        if before is None or before == now:
            return
        name = next(name for name, value in before.items() if now.get(name) != value)
        field, _, group = name.partition("@")
        what, how = (
            (f"{field} of group {group}", "scheduler.step()")
            if group
            else ("the scale of the gradients", "scaler.update()")
        )
        raise RuntimeError(
            f"{what} was changed between backward() and step(), from {before[name]} to "
            f"{now.get(name)}: change it ({how}) after step(), or use overlap=False"
        )

    def _now(self) -> dict[str, float]:
        if self._rule == "none":
            return {}
        scale = {_SCALE: self._scale()} if self._scale else {}
        return scale | {
            f"{name}@{number}": value
            for number, group in enumerate(self._optimizer.param_groups)
            if any(p.requires_grad and p.numel() for p in group["params"])
            for name, value in _rules.values_of(self._rule, group).items()
        }
