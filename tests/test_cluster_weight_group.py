"""The weight group over gloo, its ranks in threads of this process: what is sent arrives, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from cluster.weights.weight_group import WeightGroup, listen
from cluster.weights.weight_stream import Invitation, Weights, WeightSpec
from ragr1_actors.core.errors import TransferError

CPU = torch.device("cpu")
LAYOUT = (
    WeightSpec("model.layers.0.weight", (300, 41), "float32"),
    WeightSpec("model.embed_tokens.weight", (7,), "bfloat16"),  # what follows begins at an odd byte
    WeightSpec("model.scale", (), "float32"),
    WeightSpec("model.layers.1.weight", (11, 1000), "float32"),
    WeightSpec("model.norm.weight", (5,), "float32"),
)


def made(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for spec in LAYOUT:
        value = torch.randn(spec.shape[::-1], generator=generator).to(spec.torch_dtype)
        yield spec.name, value.T if value.dim() == 2 else value  # not contiguous


def assert_are_made(arrived: dict[str, torch.Tensor], seed: int) -> None:
    """Everything of ``made(seed)`` has arrived, in order, and what is tied under both names."""
    assert torch.equal(arrived.pop("lm_head.weight"), arrived["model.embed_tokens.weight"])
    expected = dict(made(seed))
    assert list(arrived) == list(expected)
    for name, tensor in expected.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name


class Ranks:
    """A sender and two receivers."""

    def __init__(self, bucket_bytes: int, timeout_s: float = 60.0) -> None:
        store = listen("127.0.0.1")
        self.invitation = Invitation("127.0.0.1", store.port, 3, LAYOUT, True, "gloo", bucket_bytes, timeout_s)
        stores = [store, None, None]
        with ThreadPoolExecutor(3) as pool:
            self.sender, *self.receivers = pool.map(
                lambda rank: WeightGroup(self.invitation, rank, CPU, stores[rank]), range(3)
            )

    def close(self) -> None:
        for rank in (self.sender, *self.receivers):
            rank.close()


@pytest.mark.parametrize("bucket_bytes", [1_000, 49_200, 10_000_000])  # pieces; one parameter each; all in one
def test_every_receiver_gets_what_was_sent(bucket_bytes: int) -> None:
    ranks = Ranks(bucket_bytes)
    with ThreadPoolExecutor(2) as pool:
        for seed in (1, 2):
            receiving = [pool.submit(list, receiver.receive()) for receiver in ranks.receivers]
            ranks.sender.send(made(seed))
            for got in receiving:
                assert_are_made(dict(got.result(timeout=60)), seed)
    ranks.close()


def test_a_receiver_does_not_wait_while_it_has_something_else_to_do() -> None:
    ranks = Ranks(40_000)
    for receiver in ranks.receivers:
        receiver.begin()
    assert ranks.receivers[0].take() == []  # at once, with nothing sent
    sending = threading.Thread(target=ranks.sender.send, args=(made(1),))
    sending.start()
    taken: list[Weights] = []
    while not all(receiver.is_complete for receiver in ranks.receivers):
        taken.append(ranks.receivers[0].take())
        ranks.receivers[1].take()
        time.sleep(0.001)
    sending.join()
    assert [name for weights in taken for name, _ in weights if name != "lm_head.weight"] == [s.name for s in LAYOUT]
    assert len([weights for weights in taken if weights]) > 1
    ranks.close()


def test_a_receiver_that_leaves_is_an_error_for_all_and_not_a_wait() -> None:
    ranks = Ranks(1_000)
    gone, other = ranks.receivers
    gone.close()
    left = []

    def all_of_it() -> Iterator[tuple[str, torch.Tensor]]:
        yield from made(1)
        left.append("went to the end")  # learner ranks gather together: none may leave

    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(list, other.receive())
        with pytest.raises(TransferError, match="a bucket of weights"):
            ranks.sender.send(all_of_it())
        ranks.sender.close()
        with pytest.raises(TransferError, match="a bucket of weights"):
            receiving.result(timeout=60)
    assert left
    assert time.monotonic() - started < 50, "it took the deadline"
    other.close()


def test_a_receiver_that_hangs_is_waited_for_until_the_deadline() -> None:
    ranks = Ranks(1_000, timeout_s=5.0)  # in which they also have to meet
    with pytest.raises(TransferError, match="did not get through in 5 s"):
        ranks.sender.send(made(1))
    receiver = ranks.receivers[0]
    ranks.close()
    assert not receiver.is_complete


def test_a_group_that_does_not_come_about_says_so() -> None:
    store = listen("127.0.0.1")
    invitation = Invitation("127.0.0.1", store.port, 2, LAYOUT, True, timeout_s=1.0)
    with pytest.raises(TransferError, match="no weight group"):
        WeightGroup(invitation, 0, CPU, store)


def test_other_parameters_than_those_announced_are_not_sent() -> None:
    ranks = Ranks(10_000_000)
    with pytest.raises(TransferError, match=r"got the parameter .*other.*, expected .*layers.0"):
        ranks.sender.send([("other", torch.zeros(300, 41))])
    with pytest.raises(TransferError, match=r"got the parameter .*bfloat16.*, expected .*float32"):
        ranks.sender.send((name, tensor.bfloat16()) for name, tensor in made(1))
    with pytest.raises(TransferError, match=r"got no parameter model.norm.weight"):
        ranks.sender.send(list(made(1))[:-1])
    ranks.close()


def test_an_invitation_travels_as_json() -> None:
    invitation = Invitation("10.0.0.1", 2000, 5, LAYOUT, False, "nccl", 50_000, 3.0)
    assert Invitation.from_json(invitation.to_json()) == invitation
    assert invitation.bucket_sizes == [50_000, 300 * 41 * 4 + 14 + 4 + 11 * 1000 * 4 + 20 - 50_000]
    assert replace(invitation, layout=()).bucket_sizes == []
