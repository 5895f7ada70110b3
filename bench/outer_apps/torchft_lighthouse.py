"""Says where it is, and serves until its input ends: torchft_lighthouse.py RANKS."""

import sys

from torchft.coordination import LighthouseServer

lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=60000)
print(lighthouse.address(), flush=True)
sys.stdin.read()
lighthouse.shutdown()
