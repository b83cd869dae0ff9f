"""Watchdog: what is a hang of an actor, and what is not. The clock is the test's; the processes are real."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ray._private.state import state
from ray.experimental.internal_kv import _internal_kv_get

from cluster.supervision import watchdog
from cluster.supervision.fleet import MAX_DEATHS, Fleet, MemberState, Process, Pulse
from cluster.supervision.watchdog import LOOK_S, Finding, Watchdog, beating
from ragr1_actors.core.errors import FleetError

pytestmark = pytest.mark.ray

HANG_TIMEOUT_S = 20.0
WAIT_S = 600.0


class Loader:
    """Loads for as long as a file is there, and shows life meanwhile."""

    def __init__(self, hold: Path) -> None:
        with beating():
            while hold.exists():
                time.sleep(0.05)

    def pulse(self) -> int:
        return os.getpid()


class World:
    """A watchdog over one actor, on a clock that goes on by a second at each look."""

    def __init__(self, ray: ModuleType, hold: Path, num_cpus: float = 0.0, actor_class: type[Loader] = Loader) -> None:
        self.ray, self.now, self.found = ray, 100.0, list[Finding]()
        options = {"num_cpus": num_cpus, "max_restarts": -1, "max_task_retries": 0}
        self.actor: Any = ray.remote(actor_class).options(**options).remote(hold)
        self.watchdog = Watchdog[str](
            lambda actor: actor.pulse.remote(),
            lambda name, finding: self.found.append(finding),
            HANG_TIMEOUT_S,
            clock=lambda: self.now,
        )
        self.watchdog.watch("loader", self.actor)

    @property
    def hangs(self) -> list[float]:
        return [finding.silent_s for finding in self.found if finding.silent_s]

    def look(self, seconds: float = LOOK_S) -> None:
        self.now += seconds
        self.watchdog.look()

    def answers(self) -> list[int]:
        return [finding.answer for finding in self.found if finding.answer is not None]

    def until_answer(self, besides: tuple[int, ...] = ()) -> int:
        """Look until another process than ``besides`` has answered; the clock stands, so that nothing is a hang."""
        deadline = time.monotonic() + WAIT_S
        while not set(self.answers()) - set(besides):
            assert time.monotonic() < deadline
            self.watchdog.look()
            time.sleep(0.02)
        return next(pid for pid in self.answers() if pid not in besides)

    def until_beat(self) -> None:
        """Return once the actor has begun to load."""
        deadline = time.monotonic() + WAIT_S
        while self.beat() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def beat(self) -> bytes | None:
        found: bytes | None = _internal_kv_get(watchdog._key(self.actor._actor_id.hex()), namespace=watchdog._NAMESPACE)
        return found


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    return tmp_path / "loading"


@pytest.fixture
def world(ray_local: ModuleType, hold: Path) -> Iterator[World]:
    world = World(ray_local, hold)
    yield world
    ray_local.kill(world.actor)


def test_an_actor_that_is_stopped_is_ended_and_comes_back(world: World) -> None:
    pid = world.until_answer()
    os.kill(pid, signal.SIGSTOP)
    while not world.hangs:
        world.look()
    assert world.hangs == [HANG_TIMEOUT_S + 1]
    assert world.until_answer((pid,)) != pid
    assert len(world.hangs) == 1


def test_an_actor_that_goes_on_in_time_is_left_alone(world: World) -> None:
    pid = world.until_answer()
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        for _ in range(round(HANG_TIMEOUT_S) - 1):
            world.look()
        os.kill(pid, signal.SIGCONT)
        world.found.clear()
        world.until_answer()
    assert not world.hangs
    assert set(world.answers()) == {pid}


def test_an_actor_that_is_stopped_while_it_loads_is_ended_and_loads_again(ray_local: ModuleType, hold: Path) -> None:
    hold.touch()
    world = World(ray_local, hold)
    world.until_beat()
    pid = state.actor_table(world.actor._actor_id.hex())["Pid"]
    os.kill(pid, signal.SIGSTOP)
    while not world.hangs:
        world.look()
    hold.unlink()
    assert world.until_answer((pid,)) != pid
    assert len(world.hangs) == 1
    ray_local.kill(world.actor)


def test_an_actor_that_loads_for_long_is_left_alone(ray_local: ModuleType, hold: Path) -> None:
    hold.touch()
    world = World(ray_local, hold)
    beats = set()
    deadline = time.monotonic() + WAIT_S
    while len(beats) < 3:
        assert time.monotonic() < deadline
        if (beat := world.beat()) not in beats | {None}:
            beats.add(beat)
            for _ in range(round(HANG_TIMEOUT_S) - 1):
                world.look()
        time.sleep(0.02)
    hold.unlink()
    world.until_answer()
    assert not world.hangs
    ray_local.kill(world.actor)


class OnceBeating(Loader):
    """Beats while it loads, but not in its second life, in which it may as well wait for room."""

    def __init__(self, hold: Path) -> None:
        if hold.exists() and not hold.read_text():
            hold.write_text("begun")
            super().__init__(hold)
        while hold.exists():
            time.sleep(0.05)


def test_the_beats_of_a_process_that_died_blame_no_other(ray_local: ModuleType, hold: Path) -> None:
    hold.touch()
    world = World(ray_local, hold, actor_class=OnceBeating)
    world.until_beat()
    world.look()
    first = state.actor_table(world.actor._actor_id.hex())["Pid"]
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while state.actor_table(world.actor._actor_id.hex())["Pid"] in (0, first):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for _ in range(3 * round(HANG_TIMEOUT_S)):
        world.look()
    hold.unlink()
    assert world.until_answer() != first
    assert not world.hangs
    ray_local.kill(world.actor)


def test_an_actor_without_room_may_wait(ray_local: ModuleType, hold: Path) -> None:
    world = World(ray_local, hold, num_cpus=1_000)
    for _ in range(10 * round(HANG_TIMEOUT_S)):
        world.look()
    assert world.found == []
    ray_local.kill(world.actor)


def test_a_driver_that_stood_still_blames_no_actor(world: World) -> None:
    pid = world.until_answer()
    os.kill(pid, signal.SIGSTOP)
    world.look()
    world.look(10 * HANG_TIMEOUT_S)
    world.look()
    assert not world.hangs
    os.kill(pid, signal.SIGCONT)


def test_a_death_is_told_once_and_an_old_beat_is_no_life(ray_local: ModuleType, hold: Path) -> None:
    hold.touch()
    world = World(ray_local, hold)
    world.until_beat()
    hold.unlink()
    pid = world.until_answer()
    os.kill(pid, signal.SIGKILL)
    world.look()  # asks
    world.until_answer((pid,))
    assert [type(finding.error).__name__ for finding in world.found if finding.error] in (
        ["ActorUnavailableError"],
        ["ActorDiedError"],
    )
    assert world.beat() is None, "what has loaded beats no more"
    ray_local.kill(world.actor)


def test_an_actor_that_is_forgotten_is_not_ended(world: World) -> None:
    pid = world.until_answer()
    world.watchdog.forget("loader")
    os.kill(pid, signal.SIGSTOP)
    for _ in range(3 * round(HANG_TIMEOUT_S)):
        world.look()
    os.kill(pid, signal.SIGCONT)
    assert world.ray.get(world.actor.pulse.remote()) == pid
    assert not world.hangs


class Fragile:
    """Dies while it loads, until its folder has a number of files; an unreadable folder is an error."""

    def __init__(self, folder: Path, num_deaths: int) -> None:
        if len(list(folder.iterdir())) < num_deaths:
            (folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def pulse(self) -> Pulse:
        return Pulse(Process.current())


def test_a_fleet_waits_until_its_actors_have_loaded(ray_local: ModuleType, tmp_path: Path) -> None:
    actor_class = ray_local.remote(max_restarts=-1, max_task_retries=0, num_cpus=0)(Fragile)
    actors = []
    for num_deaths in (0, 2):
        folder = tmp_path / str(num_deaths)
        folder.mkdir()
        actors.append(actor_class.remote(folder, num_deaths))
    while not list((tmp_path / "2").iterdir()):
        time.sleep(0.02)  # so that it is asked while it restarts
    fleet = fleet_of(actors)
    fleet.wait_until_up(WAIT_S)
    assert fleet.num(MemberState.READY) == 2
    fleet.stop()


def fleet_of(actors: list[Any]) -> Fleet[Pulse]:
    fleet = Fleet[Pulse]("loader", lambda index: [actors[index]], lambda actor: actor.pulse.remote(), 1_000.0)
    fleet.scale_to(len(actors))
    return fleet


def test_an_actor_that_never_loads_is_an_error(ray_local: ModuleType, tmp_path: Path) -> None:
    actor_class = ray_local.remote(max_restarts=-1, max_task_retries=0, num_cpus=0)(Fragile)
    actors = [actor_class.remote(tmp_path, 1_000), actor_class.remote(tmp_path / "none", 0)]
    for actor in actors:
        fleet = fleet_of([actor])
        with pytest.raises(FleetError, match=r"^loader 0 did not start: "):
            fleet.wait_until_up(WAIT_S)
        fleet.stop()
    assert len(list(tmp_path.iterdir())) >= MAX_DEATHS


def test_beating_does_nothing_outside_an_actor(ray_local: ModuleType) -> None:
    with beating():
        pass
