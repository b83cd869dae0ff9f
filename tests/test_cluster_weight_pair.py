"""The weight pair over shared memory, both sides in this process: what is sent arrives, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cluster_weight_group import LAYOUT, assert_are_made, made

from cluster.weights.weight_pair import PairListener, WeightPair
from cluster.weights.weight_stream import Invitation, Weights, join
from ragr1_actors.core.errors import TransferError

CPU = torch.device("cpu")


class Pair:
    """A sender and its receiver."""

    def __init__(self, bucket_bytes: int, timeout_s: float = 60.0) -> None:
        announced = Invitation("", 0, 2, LAYOUT, True, "ipc", bucket_bytes, timeout_s)
        listener = PairListener(announced, CPU)
        self.invitation = Invitation.from_json(listener.invitation.to_json())
        assert self.invitation == listener.invitation
        with ThreadPoolExecutor(1) as pool:
            sender = pool.submit(WeightPair.sender, listener)
            self.receiver = join(self.invitation, 1, CPU)
            self.sender = sender.result()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.mark.parametrize("bucket_bytes", [1_000, 49_200, 10_000_000])  # pieces; one parameter each; all in one
def test_the_receiver_gets_what_was_sent(bucket_bytes: int) -> None:
    pair = Pair(bucket_bytes)
    assert not Path(pair.invitation.address).parent.exists(), "whoever was invited has come: nothing can be left behind"
    with ThreadPoolExecutor(1) as pool:
        for seed in (1, 2, 3):
            receiving = pool.submit(list, pair.receiver.receive())
            pair.sender.send(made(seed))
            assert_are_made(dict(receiving.result(timeout=60)), seed)
    pair.close()


def test_no_bucket_is_filled_again_before_it_is_empty() -> None:
    pair = Pair(1_000)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(pair.sender.send, made(1))
        time.sleep(0.2)
        assert not sending.done(), "two buckets hold less than all of it"
        pair.receiver.begin()
        arrived: Weights = []
        while not pair.receiver.is_complete:
            arrived += pair.receiver.take()
            time.sleep(0.001)
        sending.result(timeout=60)
    expected = dict(made(1))
    for name, tensor in arrived:
        if name != "lm_head.weight":
            assert torch.equal(tensor, expected[name]), name
    pair.close()


def test_whoever_leaves_the_other_hears_of_it_at_once() -> None:
    left = []

    def all_of_it() -> Iterator[tuple[str, torch.Tensor]]:
        yield from made(1)
        left.append("went to the end")  # learner ranks gather together: none may leave

    started = time.monotonic()
    pair = Pair(1_000)
    pair.receiver.begin()
    pair.receiver.close()
    with pytest.raises(TransferError, match="a bucket of weights was lost"):
        pair.sender.send(all_of_it())
    assert left
    pair.close()
    pair = Pair(1_000)
    pair.sender.close()
    pair.receiver.begin()
    with pytest.raises(TransferError, match="a bucket of weights was lost: the other side is gone"):
        pair.receiver.take()
    pair.receiver.close()
    assert time.monotonic() - started < 50, "it took the deadline"


def test_a_receiver_that_hangs_is_waited_for_until_the_deadline() -> None:
    pair = Pair(1_000, timeout_s=3.0)  # in which they also have to meet
    with pytest.raises(TransferError, match="did not get through in 3 s"):
        pair.sender.send(made(1))
    pair.close()


def test_a_pair_that_does_not_come_about_says_so() -> None:
    listener = PairListener(Invitation("", 0, 2, LAYOUT, True, "ipc", 1_000, 0.2), CPU)
    with pytest.raises(TransferError, match=r"no weight pair: the runner did not join in 0\.2 s"):
        WeightPair.sender(listener)
    with pytest.raises(TransferError, match=r"no weight pair: .*No such file"):
        join(listener.invitation, 1, CPU)


def test_a_receiver_that_cannot_open_the_buckets_says_so_on_both_sides() -> None:
    listener = PairListener(Invitation("", 0, 2, LAYOUT, True, "ipc", 1_000), CPU)
    elsewhere = replace(listener.invitation, handles=((b"/nowhere/bucket".hex(), 1_000),))
    with ThreadPoolExecutor(1) as pool:
        sender = pool.submit(WeightPair.sender, listener)
        with pytest.raises(TransferError, match=r"no weight pair: .*/nowhere/bucket"):
            join(elsewhere, 1, CPU)
        with pytest.raises(TransferError, match="could not open the learner's buckets"):
            sender.result(timeout=60)
