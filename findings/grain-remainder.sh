#!/usr/bin/env bash
# Eight records for three ranks with Grain's sampler, whose page says of the default that it gives
# what remains to the first ranks: three, three and two of them in an epoch.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install grain==0.2.18 numpy==2.4.6

seen=$("$python" -W ignore - 2>"$errors" <<'PYTHON'
from collections import Counter
from importlib.metadata import version

import grain

RECORDS = 8
RANKS = 3

print("grain", version("grain"))
for epochs in (1, 10):
    times = Counter()
    for rank in range(RANKS):
        shard = grain.sharding.ShardOptions(rank, RANKS)
        sampler = grain.samplers.IndexSampler(RECORDS, shard, True, epochs, seed=3)
        times.update(map(int, grain.DataLoader(data_source=range(RECORDS), sampler=sampler)))
    print(f"{epochs} epochs, times:", *(times[record] for record in range(RECORDS)))
PYTHON
)
verdict 'each record comes once per epoch' "$seen" \
  "grain 0.2.18
1 epochs, times: 0 1 1 0 1 1 1 1
10 epochs, times: 9 8 9 9 8 9 13 13"
