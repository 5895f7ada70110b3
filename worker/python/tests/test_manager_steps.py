"""Steps of phub.Manager that a program does not make as it should, or makes with fewer tensors."""

import pytest
import torch
from conftest import of_ranks, refused
from exact import job

import phub
from phub import _given_state
from phub._federated import Plan
from phub.manager import Manager


def manager(name, **options):
    return Manager(job=job(name), init_sync=False, **options)


@of_ranks(2)
def test_what_comes_of_a_bucket_counts(rank):
    """Two small tensors are sent together; rank 1 gives one of them, and waits for none."""
    with manager("part") as made:
        for step in range(4):
            made.start_quorum()
            first, second = torch.full((3,), 2.0 + rank), torch.full((5,), 4.0)
            works = [made.allreduce(first)]
            if step != 2 or rank == 0:
                works.append(made.allreduce(second))
            assert made.should_commit()
            assert first.tolist() == [2.5] * 3
            if len(works) == 2:
                assert second.tolist() == [2.0 if step == 2 else 4.0] * 5
            assert all(work.wait() for work in works)  # its step has ended


@of_ranks(2)
def test_a_step_ends_once(rank):
    with manager("once") as made:
        refused("before start_quorum", made.should_commit)
        made.start_quorum()
        tensor = torch.ones(3)
        made.allreduce(tensor)
        assert made.should_commit()
        refused("should_commit.. before start_quorum", made.should_commit)
        refused("allreduce.. before start_quorum", made.allreduce, tensor)
        made.start_quorum()
        made.start_quorum()  # it has begun
        made.allreduce(tensor)
        assert made.should_commit()
        assert made.current_step() == 2


@of_ranks(2)
def test_a_step_that_was_not_ended_is_given_up(rank):
    """As after an exception in backward(): the rank gets the state of the other."""
    state = {"made": 0}
    with Manager(state.update, lambda: dict(state), job=job("given-up")) as made:
        for step in range(6):
            made.start_quorum()
            tensor = torch.full((1 << 20,), 1.0 + rank)
            work = made.allreduce(tensor)
            if step == 2 and rank == 1 and made.current_step() == 2:
                made.start_quorum()
                work = made.allreduce(tensor.fill_(2.0))
            work.wait()
            if made.should_commit():
                state["made"] += 1
        return state["made"] == made.current_step()


@of_ranks(2)
def test_who_has_left_may_come_again(rank):
    made = manager("again", max_ranks=2)
    for _ in range(2):
        made.start_quorum()
        tensor = torch.full((4,), float(rank))
        assert made.allreduce(tensor).wait()
        assert tensor.tolist() == [0.5] * 4
        assert made.should_commit()
    made.shutdown()
    refused("before start_quorum", made.allreduce, torch.ones(1))


@of_ranks(1)
def test_numbers_of_the_program(rank):
    for seconds in (float("inf"), float("nan"), -1, 0, 1e9):
        refused("timeout is", manager, "numbers", timeout=seconds)
    refused("min_replica_size", manager, "numbers", min_replica_size=-1)
    refused("min_replica_size", manager, "numbers", min_replica_size="2")
    refused("max_retries", manager, "numbers", max_retries=-1)
    made = manager("numbers")
    refused("step is", made.load_state_dict, {"step": 1 << 44, "batches_committed": 0})
    made.start_quorum()
    made.allreduce(torch.ones(4)).wait()
    made.should_commit()
    made.start_quorum()
    refused("elements of torch.bfloat16", made.allreduce, torch.ones(4, dtype=torch.bfloat16))
    made.shutdown()


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"\x80\x02.", bytes(64)])
def test_a_state_that_is_none(content):
    words = torch.frombuffer(bytearray(content) + bytes(4 - len(content) % 4), dtype=torch.float32)
    refused("what another rank gives", _given_state.unpacked, words)
    refused("what another rank gives", _given_state.unpacked, _given_state.packed({"user": 3}))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"job": "j", "ranks": 2, "shapes": {"a": 3}}', '{"shapes": {}}']
)
def test_a_plan_that_is_none(text):
    refused("no plan of a round", Plan.of_text, text, error=phub.InvalidError)
