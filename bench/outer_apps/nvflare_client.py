"""A learner of NVFlare: nvflare_client.py PARTS RANKS. Its model is one array."""

import sys
import time

import numpy as np
import nvflare.client as flare
from nvflare.app_common.np.constants import NPConstants
from shapes import check, step_of

ranks = int(sys.argv[2])
flare.init()
rank = int(flare.get_site_name().removeprefix("site-")) - 1
began = None
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    now = time.monotonic()
    array = model.params[NPConstants.NUMPY_KEY]
    if began is not None:
        if rank == 0:
            print("SECONDS", now - began, flush=True)
        check([array], model.current_round, ranks)
    began = time.monotonic()
    moved = {NPConstants.NUMPY_KEY: array + np.float32(step_of(rank))}
    flare.send(flare.FLModel(params=moved, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))
