"""Says where it is, and serves until its input ends: torchft_lighthouse.py RANKS [JOIN_MS]."""

import sys

from torchft.coordination import LighthouseServer

join_ms = int(sys.argv[2]) if len(sys.argv) > 2 else 60000
lighthouse = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=join_ms, quorum_tick_ms=100
)
print(lighthouse.address(), flush=True)
sys.stdin.read()
lighthouse.shutdown()
