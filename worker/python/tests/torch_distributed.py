"""PyTorch's own tests of torch.distributed, with backend "phub": tests/scripts/frameworks_test."""

import os
import tempfile
from pathlib import Path

import phub  # noqa: F401  # it makes the backend known

if "TEMP_DIR" not in os.environ:  # or this is one of the processes that a test starts
    folder = Path(tempfile.mkdtemp(prefix="phub-torch-"))
    for name in ("barrier", "init_dir"):
        (folder / name).mkdir()
    os.environ.update(
        BACKEND="phub",
        WORLD_SIZE="4",
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder / 'ranks'}",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="150",
    )

from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

# Or tests are left out that ask what a backend of this name can do.
for _feature in ("plugin", "ddp", "subgroup"):
    DistTestCases.backend_feature[_feature].add("phub")

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class TestPhub(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
