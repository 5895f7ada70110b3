"""The Manager of a learner of torchft."""

from datetime import timedelta

from torch.distributed import TCPStore
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo


def manager_of(model, rank, least, lighthouse):
    """With so many learners in a quorum, at least. It keeps the store that it needs."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=120)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        min_replica_size=least,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        use_async_quorum=False,
        init_sync=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"learner{rank}",
        hostname="127.0.0.1",
    )
    manager.kept = store  # as long as it
    return manager
