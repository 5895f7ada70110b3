"""Hugging Face's Trainer with the box: `trainer.add_callback(Callback(trainer))`."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from typing import Any, Optional

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback  # type: ignore[import-not-found]

from phub._alone import let_step_alone
from phub.errors import InvalidError
from phub.pytorch import DDPState


class Callback(TrainerCallback):  # type: ignore[misc]  # of any type without transformers
    """Gradients go through the box. It is in the job while train() runs.

    All else is Trainer's own, over its process group.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        """options: of `DDPState`, but rank and world_size. The default of on_loss is "fail"."""
        self.phub: Optional[DDPState] = None
        self._trainer, self._options = trainer, {"on_loss": "fail", **options}
        self._ddp: Optional[DistributedDataParallel] = None  # train() may use it again

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Joins the job, and registers the hook."""
        ddp = getattr(self._trainer.model_wrapped, "_orig_mod", self._trainer.model_wrapped)
        if not isinstance(ddp, DistributedDataParallel):
            raise InvalidError(
                f"Trainer has a {type(ddp).__name__} and no DistributedDataParallel: start the "
                "ranks with phub run or torchrun, on CPUs with TrainingArguments(use_cpu=True), "
                "and without FSDP and DeepSpeed"
            )
        if self.phub:  # train() was begun anew
            self.phub.watch.end()
            self.phub.close()
        self.phub = DDPState(
            ddp.module, rank=args.process_index, world_size=args.world_size, **self._options
        )
        let_step_alone(self.phub.watch, ddp)
        if self._ddp is not ddp:
            ddp.register_comm_hook(self, _exchange)
            self._ddp = ddp

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leaves the job."""
        joined, self.phub = self.phub, None
        if joined:
            joined.close()


def _exchange(callback: Callback, bucket: GradBucket) -> Future[torch.Tensor]:
    if callback.phub is None:
        raise InvalidError(
            "the training of this Trainer is over, and its model's hook has no job any more"
        )
    return callback.phub.exchange(bucket)
