"""Which Python has what the scripts with PyTorch need."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def python_with_torch(who):
    """That of tests/scripts/python_test, or this one. Ends the process with status 77 if neither has it."""
    for python in (ROOT / "build/python/bin/python", sys.executable):
        try:
            subprocess.run([python, "-c", "import torch, numpy; torch.optim.AdamW"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return str(python)
    print(f"{who}: no Python here has torch: run tests/scripts/python_test")
    sys.exit(77)
