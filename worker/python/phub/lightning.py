"""Lightning with the box: `Trainer(accelerator="cpu", devices=4, strategy=Strategy())`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

# Two packages have a Trainer, and each takes only strategies of its own.
if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning.strategies import DDPStrategy  # type: ignore[import-not-found]
else:
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found]

from phub._alone import let_step_alone
from phub.errors import InvalidError
from phub.pytorch import DDPState, ddp_hook


class Strategy(DDPStrategy):  # type: ignore[misc]  # of any type where there is no Lightning
    """Lightning's DDPStrategy, whose gradients go through the box, on the CPU as on GPUs.

    All else (the first parameters, barriers, metrics) is Lightning's own, over its process group.
    """

    def __init__(self, *, ddp_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        """options: of `DDPState`, but rank and world_size. The default of on_loss is "fail".

        ddp_options: of DDPStrategy, such as find_unused_parameters or process_group_backend.
        """
        super().__init__(**(ddp_options or {}))
        self.phub: DDPState | None = None  # while fit() runs
        self._phub_options = {"on_loss": "fail", **options}

    def configure_ddp(self) -> None:
        """Wraps the model, and joins the job."""
        super().configure_ddp()
        ranks = int(self.world_size)
        # Lightning's own launcher sets RANK for none of its processes.
        os.environ.setdefault("PHUB_RANK", str(self.global_rank))
        launched = int(os.environ.setdefault("PHUB_WORLD_SIZE", str(ranks)))
        if launched != ranks:
            raise InvalidError(
                f"Lightning has a world of {ranks}, and {launched} ranks were started "
                f"(PHUB_WORLD_SIZE): Trainer(devices={launched}), or devices times num_nodes"
            )
        self.phub = DDPState(self.model.module, **self._phub_options)
        self.model.register_comm_hook(self.phub, ddp_hook)
        let_step_alone(self.phub.watch, self.model)

    def teardown(self) -> None:
        """Leaves the job."""
        super().teardown()
        state, self.phub = self.phub, None
        if state:
            state.close()
