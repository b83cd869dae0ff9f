"""Fleet: the lives of members, by what a watchdog would find about fake actors; each kind of fleet tests real kills."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from cluster.supervision import fleet as fleet_module
from cluster.supervision.fleet import MAX_FAILED_LOADS, Fleet, Member, MemberId, MemberState, Process, Pulse
from cluster.supervision.watchdog import Finding
from ragr1_actors.core.errors import FleetError


class Actor:
    """Stands for a handle of Ray."""

    def __init__(self, name: str) -> None:
        self.name = name


class World:
    """A fleet whose actors do what the test says."""

    def __init__(self, killed: list[tuple[str, bool]], num_actors: int = 1, **options: Any) -> None:
        self.killed, self.num_changes, self.num_started = killed, 0, 0
        self.num_actors = num_actors
        self.fleet = Fleet[Pulse]("runner", self.start, lambda actor: None, 10.0, on_change=self.change, **options)

    def start(self, index: int) -> list[Actor]:
        self.num_started += 1
        return [Actor(f"{index}.{number}") for number in range(self.num_actors)]

    def change(self) -> None:
        self.num_changes += 1

    def scale_to(self, number: int) -> list[Member[Pulse]]:
        return self.fleet.scale_to(number)

    def member(self, index: int) -> Member[Pulse]:
        return next(member for member in self.fleet.members if member.index == index)

    def answers(self, index: int, pid: int = 1, number: int = 0, node_id: str = "node") -> None:
        self.fleet.note((self.member(index), number), Finding(answer=Pulse(Process(node_id, pid))))

    def fails(self, index: int, error: Any, number: int = 0) -> None:
        self.fleet.note((self.member(index), number), Finding(error=error))

    def hangs(self, index: int, number: int = 0) -> None:
        self.fleet.note((self.member(index), number), Finding(silent_s=11.0))

    def states(self) -> list[str]:
        return [member.state for member in self.fleet.members]


DEATH = ActorUnavailableError("its process ended", None)


def init_failed() -> ActorDiedError:
    error = ActorDiedError()
    error._actor_init_failed = True
    return error


def broken() -> RayTaskError:
    return RayTaskError("pulse", "EngineDeadError: the engine is dead", ValueError("dead"))


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """Names of the actors that were killed, with whether Ray starts them again; no thread looks at any actor."""
    found: list[tuple[str, bool]] = []
    monkeypatch.setattr(fleet_module.ray, "kill", lambda a, *, no_restart: found.append((a.name, not no_restart)))
    monkeypatch.setattr("cluster.supervision.watchdog.Watchdog.start", lambda self: self)
    return found


@pytest.fixture
def world(killed: list[tuple[str, bool]]) -> World:
    world = World(killed)
    world.scale_to(2)
    return world


def test_a_member_is_ready_once_it_answers_and_again_after_a_death(world: World) -> None:
    assert world.states() == ["starting", "starting"]
    world.answers(0)
    assert world.states() == ["ready", "starting"]
    world.fails(0, DEATH)
    assert world.member(0).id == MemberId(0, 2)
    assert (world.states(), world.fleet.num_restarts) == (["starting", "starting"], 1)
    world.fails(0, DEATH)  # it is the same death
    assert (world.member(0).life, world.fleet.num_restarts) == (2, 1)
    world.answers(0, pid=2)
    assert world.states() == ["ready", "starting"]
    assert world.num_changes == 3


def test_a_member_of_two_actors_is_ready_while_both_are_up(killed: list[tuple[str, bool]]) -> None:
    world = World(killed, num_actors=2)
    world.scale_to(1)
    world.answers(0, number=0)
    assert world.states() == ["starting"]
    assert [actor.name for actor in world.fleet.unplaced()] == ["0.1"]
    world.answers(0, number=1)
    assert (world.states(), world.fleet.unplaced()) == (["ready"], [])
    world.fails(0, DEATH, number=1)
    assert [actor.name for actor in world.fleet.unplaced()] == ["0.1"], "the other one is up"
    world.answers(0, pid=3, number=1)
    assert (world.states(), world.member(0).life) == (["ready"], 2)


def test_a_process_that_is_another_one_than_before_has_died_meanwhile(world: World) -> None:
    world.answers(0, pid=1)
    world.answers(0, pid=1)
    assert world.fleet.num_restarts == 0
    world.answers(0, pid=2)
    assert (world.member(0).id, world.fleet.num_restarts) == (MemberId(0, 2), 1)
    world.fleet.note_process(MemberId(0, 2), Process("node", 2))
    world.fleet.note_process(MemberId(0, 1), Process("node", 3))  # a call of the life before
    assert world.states()[0] == "ready"
    world.fleet.note_process(MemberId(0, 2), Process("node", 3))
    assert (world.states()[0], world.fleet.num_restarts) == ("starting", 2)


def test_a_call_that_fails_counts_for_the_life_in_which_it_was_made(world: World) -> None:
    world.answers(0)
    world.fleet.note_failure(MemberId(0, 1), DEATH)
    assert world.states()[0] == "starting"
    world.answers(0, pid=2)
    world.fleet.note_failure(MemberId(0, 1), DEATH)
    assert (world.states()[0], world.fleet.num_restarts) == ("ready", 1)


def test_the_owner_admits_a_member_in_each_life(killed: list[tuple[str, bool]]) -> None:
    world = World(killed, owner_admits=True)
    world.scale_to(1)
    world.fleet.admit(MemberId(0, 1))  # it is not up
    world.answers(0)
    assert (world.states(), world.fleet.serving) == (["starting"], [])
    world.fleet.admit(MemberId(0, 1))
    assert world.states() == ["ready"]
    world.fails(0, DEATH)
    world.answers(0, pid=2)
    world.fleet.admit(MemberId(0, 1))  # of the life before
    assert world.states() == ["starting"]
    world.fleet.admit(MemberId(0, 2))
    assert world.states() == ["ready"]


def test_a_member_that_cannot_start_is_lost(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.answers(1)
    world.fails(0, init_failed())
    assert world.states() == ["lost", "ready"]
    assert world.killed == [("0.0", False)]
    assert "runner 0 did not start" in caplog.text and "1 of 2 go on" in caplog.text
    assert "did not start again" not in caplog.text
    world.fails(0, DEATH)
    world.fleet.note_failure(MemberId(0, 1), DEATH)
    assert world.fleet.num_restarts == 0
    world.fails(1, DEATH)
    world.fails(1, init_failed())
    assert "runner 1 did not start again" in world.fleet.failure


def test_one_that_is_up_and_broken_is_ended_and_lost_after_the_third_load(world: World) -> None:
    world.answers(0)
    world.fails(0, broken())  # while it served: no failed load
    assert (world.states()[0], world.killed) == ("starting", [("0.0", True)])
    for _ in range(MAX_FAILED_LOADS - 1):
        world.fails(0, broken())
    assert world.states()[0] == "starting"
    world.fails(0, broken())
    assert world.states()[0] == "lost"
    assert world.killed[1:] == [("0.0", True)] * (MAX_FAILED_LOADS - 1) + [("0.0", False)]


def test_a_load_that_succeeds_forgets_those_that_failed(world: World) -> None:
    for pid in range(3 * MAX_FAILED_LOADS):
        world.fails(0, broken())
        world.answers(0, pid=pid)
        world.fails(0, DEATH)
    assert world.states()[0] == "starting"


@pytest.mark.parametrize("finishes_work", [True, False])
def test_hangs_in_a_row_are_limited(killed: list[tuple[str, bool]], finishes_work: bool) -> None:
    world = World(killed, max_hangs=3)
    world.scale_to(1)
    for pid in range(4):
        if world.member(0).is_lost:
            break
        world.answers(0, pid=pid)
        if finishes_work:
            world.member(0).num_hangs = 0
        world.hangs(0)
    assert world.states() == ["starting" if finishes_work else "lost"]
    assert world.fleet.num_hangs == world.fleet.num_restarts == (4 if finishes_work else 3)
    if not finishes_work:
        assert "raise debugging.fault_tolerance.hang_timeout_s" in world.fleet.failure


def test_without_a_limit_a_member_may_hang_for_ever(world: World) -> None:
    for pid in range(20):
        world.answers(0, pid=pid)
        world.hangs(0)
    assert world.states()[0] == "starting"


def test_those_that_are_lost_or_start_leave_before_those_with_the_least_load(killed: list[tuple[str, bool]]) -> None:
    world = World(killed)
    world.scale_to(5)
    for index in (0, 1, 2):
        world.answers(index)
    world.fails(3, init_failed())
    load = {0: 5.0, 1: 0.0, 2: 0.0, 3: 9.0, 4: 9.0}
    order = []
    for size in (4, 3, 2, 1):
        order += [member.index for member in world.fleet.scale_to(size, lambda member: load[member.index])]
    assert order == [3, 4, 2, 1]
    assert world.fleet.num(MemberState.DRAINING) == 3, "the lost one stays lost"
    assert world.killed == [("3.0", False)], "its owner ends what drains"
    world.fleet.end(world.member(4))
    assert [member.index for member in world.fleet.members] == [0, 1, 2, 3]
    assert world.killed[-1] == ("4.0", False)
    assert world.scale_to(2) == []
    assert [member.index for member in world.fleet.members] == [0, 1, 2, 3, 5], "an index is never used again"


def test_members_of_a_node_that_goes_away_are_replaced_by_the_next_scaling(world: World) -> None:
    world.answers(0, node_id="old")
    world.answers(1, node_id="new")
    assert world.fleet.drain_nodes({"old"}) == 1
    assert world.fleet.drain_nodes({"old"}) == 0
    assert world.states() == ["draining", "ready"]
    assert world.member(0).is_serving, "it goes on with what it has"
    world.scale_to(2)
    assert world.states() == ["draining", "ready", "starting"]


def test_in_a_gang_one_that_hangs_ends_all_and_all_start_in_their_next_life(killed: list[tuple[str, bool]]) -> None:
    world = World(killed, is_gang=True)
    world.scale_to(2)
    for index in (0, 1):
        world.answers(index)
    world.fails(1, DEATH)  # its owner, who waits for all, knows more
    assert (world.fleet.failure, killed) == ("", [])
    world.hangs(1)
    assert world.fleet.failure == "runner 1 hangs: it has not answered for 11 s"
    assert (world.states(), killed) == (["lost", "lost"], [("0.0", False), ("1.0", False)])
    world.fleet.fail("another reason")
    assert world.fleet.failure.startswith("runner 1 hangs"), "the first reason stays"
    world.fleet.restart()
    assert [member.id for member in world.fleet.members] == [MemberId(0, 2), MemberId(1, 2)]
    assert (world.fleet.failure, world.num_started, world.states()) == ("", 4, ["starting", "starting"])
    world.fleet.fail("it cannot go on")
    world.fleet.end_all()
    assert (world.fleet.failure, world.fleet.members) == ("", []), "none is left to restart"


def test_what_is_found_about_a_member_that_was_ended_changes_nothing(world: World) -> None:
    world.answers(0)
    ended = world.member(0)
    world.fleet.end(ended)
    world.fleet.note((ended, 0), Finding(error=DEATH))
    world.fleet.note((ended, 0), Finding(answer=Pulse(Process("node", 2))))
    world.fleet.note_failure(ended.id, DEATH)
    assert (world.fleet.num_restarts, len(world.fleet.members)) == (0, 1)


def test_a_wait_ends_once_all_are_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_num_deaths", lambda actor: 0)
    waits = threading.Thread(target=world.fleet.wait_until_up, args=(600.0,))
    waits.start()
    world.answers(0)
    assert waits.is_alive()
    world.answers(1)
    waits.join(600.0)
    assert not waits.is_alive()


def test_a_wait_for_one_that_does_not_start_is_one_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_num_deaths", lambda actor: 0)
    world.answers(1)
    with pytest.raises(FleetError, match=r"^1 of 2 runners did not start in -1 s$"):
        world.fleet.wait_until_up(-1.0)
    monkeypatch.setattr(fleet_module, "_num_deaths", lambda actor: fleet_module.MAX_DEATHS)
    with pytest.raises(FleetError, match=r"^runner 0 did not start: it died 3 times while it loaded$"):
        world.fleet.wait_until_up(600.0)
    world.fails(0, init_failed())
    with pytest.raises(FleetError, match=r"^runner 0 did not start: "):
        world.fleet.wait_until_up(600.0)


@pytest.mark.parametrize("verdict", ["it answers", "it is dead", "none"])
def test_a_verdict_is_waited_for_while_an_actor_is_unavailable(
    world: World, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 0.0, 0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def get(call: None, timeout: float) -> None:
        nonlocal asked
        asked += 1
        if verdict == "none" or asked < 4:
            raise ActorUnavailableError("its node does not answer", None)
        if verdict == "it is dead":
            raise ActorDiedError

    monkeypatch.setattr(fleet_module.time, "sleep", sleep)
    monkeypatch.setattr(fleet_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(fleet_module.ray, "get", get)
    world.fleet.wait_for_verdict(world.member(0))
    assert asked == 4 if verdict != "none" else now == fleet_module.VERDICT_TIMEOUT_S
