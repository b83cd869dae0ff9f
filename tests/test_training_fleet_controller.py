"""Fleets of real runs that follow their load, and ``ragr1 scale`` from another shell."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from small_world import invoke, make_files, make_recipe, started, wait_for

from cluster.autoscaler import FleetState
from ragr1_actors.cli.chaos import give_order
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.planning.preflight import check_names
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.run_directory import (
    ScaleAnswer,
    ScaleOrder,
    create_run_directory,
    open_run_directory,
    read_order,
    withdraw_order,
    write_answer,
    write_order,
)
from ragr1_actors.runs.storage.store import RunStore, find_store
from ragr1_actors.runs.telemetry.metrics import DECISIONS, read_events, read_metrics
from ragr1_actors.training import fleet_controller
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.fleet_controller import Controlled, FleetController, FleetSizes, LearnerClock

TIMEOUT_S = 300.0
AUTOSCALING = "{max_replicas: 2, upscale_delay_s: 0, look_back_period_s: 2, target_ongoing_requests: 1, "
AUTOSCALING += "target_starvation: 0.01}"
"""In turns the learner always waits longer than this, so a second runner is wanted."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


def rl_rows(run_dir: Path) -> list[dict[str, Any]]:
    is_there = (run_dir / "metrics.jsonl").is_file()
    return [row for row in read_metrics(run_dir) if row["stage"] == "rl"] if is_there else []


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_run_adds_a_runner_for_a_learner_that_waits_and_says_why(files: Path, tmp_path: Path) -> None:
    recipe, run_dir = make_recipe(tmp_path / "recipe.yaml", files, num_iterations=40), tmp_path / "run"
    options = (f"env_runners.autoscaling={AUTOSCALING}", "env_runners.num_cpus_per_env_runner=0")
    with started(str(recipe), "--run-dir", str(run_dir), *options, cwd=tmp_path) as run:
        output, errors = run.communicate(timeout=600)
    assert run.returncode == 0, output + errors
    report = read_report(run_dir)
    first = report.decisions[0]
    assert (first.fleet, first.before, first.after) == ("runners", 1, 2)
    assert "occupy" in first.reason or "the learner waits" in first.reason
    assert report.decisions == read_events(run_dir)[0]
    assert (report.tasks.lost, report.tasks.doubled) == (0, 0)
    last = rl_rows(run_dir)[-1]
    assert last["env_runners/target"] == 2
    assert last["env_runners/running"] + last["env_runners/starting"] == 2
    assert last["env_runners/replica_s"] > 0
    assert "runners 1 -&gt; 2" in (run_dir / "report.html").read_text()
    texts = (path.read_bytes() for path in (run_dir / "tensorboard").rglob("events*"))
    assert any(DECISIONS.encode() in text and b"runners 1 -> 2" in text for text in texts)


NO_HANGS = "debugging.fault_tolerance={hang_timeout_s: 300}"  # a busy machine is none


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_live_run_takes_sizes_from_another_shell_and_loses_nothing(files: Path, tmp_path: Path) -> None:
    recipe, run_dir = make_recipe(tmp_path / "recipe.yaml", files, num_iterations=5000), tmp_path / "run"
    options = ("env_runners.num_cpus_per_env_runner=0", "checkpointing.keep_trajectories=false", NO_HANGS)

    def reaches(name: str, value: float, run: subprocess.Popen[str]) -> bool:
        return wait_for(lambda: any(row[name] == value for row in rl_rows(run_dir)[-3:]), TIMEOUT_S, run)

    with started(str(recipe), "--run-dir", str(run_dir), *options, cwd=tmp_path) as run:
        assert reaches("env_runners/running", 1, run), run.communicate()
        answer = invoke("scale", str(run_dir), "--runners", "2", "--retrievers", "2")
        assert answer == f"runners 1 -> 2, retrievers 1 -> 2; until ragr1 scale {run_dir} --auto\n"
        assert reaches("env_runners/running", 2, run)
        assert reaches("retrieval/retriever_running", 2, run)
        assert "retrieval.encoders.num_encoders" in invoke("scale", str(run_dir), "--encoders", "2")
        assert "no fleet of this run has settings for autoscaling" in invoke("scale", str(run_dir), "--auto")
        assert invoke("scale", str(run_dir), "--runners", "1", "--retrievers", "1").startswith("runners 2 -> 1")
        assert reaches("env_runners/running", 1, run)
        assert reaches("retrieval/retriever_running", 1, run)
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=300)
    last = rl_rows(run_dir)[-1]
    assert (last["tasks/lost"], last["tasks/doubled"], last["tasks/failed"]) == (0, 0, 0)
    assert last["env_runners/num_restarts"] == 0
    assert [(made.fleet, made.before, made.after) for made in read_events(run_dir)[0]] == [
        ("runners", 1, 2),
        ("retrievers", 1, 2),
        ("runners", 2, 1),
        ("retrievers", 2, 1),
    ]


def test_a_run_that_does_not_answer_gets_its_order_withdrawn(tmp_path: Path) -> None:
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    said = invoke("scale", str(tmp_path / "run"), "--runners", "2", "--timeout-s", "0.3")
    assert "no answer from the run in" in said
    assert "is withdrawn" in said
    assert read_order(find_store(tmp_path / "run")) is None


class Group:
    actors: ClassVar = ["an actor"]

    def __init__(self) -> None:
        self.size = 1

    def scale_to(self, size: int) -> None:
        self.size = size

    def state(self) -> FleetState:
        return FleetState(0.0, self.size)


def controller_over(store: RunStore) -> FleetController:
    """The controller of one process of a run, whose fleets are not there."""
    made = FleetController.__new__(FleetController)
    made._store, made._refusals, made._order_id, made._ordered_at = store, {}, "", 0.0
    made._learner_actors = lambda: ["rank 0"]
    fleets: Any = [Controlled(name, f"{name}/", Group(), 1, None) for name in ("runners", "retrievers")]  # type: ignore[type-var]
    FleetSizes.__init__(made, fleets, LearnerClock(), lambda: 0.0)
    return made


def test_a_resumed_run_takes_all_sizes_and_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    store, killed = find_store(tmp_path / "run"), list[str]()
    monkeypatch.setattr(fleet_controller, "kill", lambda actor, restarts: killed.append(actor))
    first, stop = controller_over(store), threading.Event()

    def look() -> None:
        while not stop.wait(0.01):
            first._take_order()

    looking = threading.Thread(target=look)
    looking.start()
    orders: list[dict[str, Any]] = [{"sizes": {"runners": 4}}, {"kill": "learners"}, {"sizes": {"retrievers": 2}}]
    for order in orders:
        assert not give_order(store, order, 30).is_refused
    stop.set()
    looking.join()
    resumed = controller_over(store)
    resumed._take_order()
    assert {name: one.num_replicas for name, one in resumed._fleets.items()} == {"runners": 4, "retrievers": 2}
    write_order(store, ScaleOrder(order_id="old", kill="learners"))  # of a shell that was closed before the answer came
    write_answer(store, ScaleAnswer(order_id="old", message="killed"))
    controller_over(store)._take_order()
    assert killed == ["rank 0"]


def test_the_order_of_another_person_is_kept(tmp_path: Path) -> None:
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    place = find_store(tmp_path / "run")
    write_order(place, ScaleOrder(order_id="theirs", sizes={"runners": 2}))
    withdraw_order(place, "mine")
    assert read_order(place) is not None
    withdraw_order(place, "theirs")
    withdraw_order(place, "theirs")
    assert read_order(place) is None


def test_sizes_are_bounded_and_uris_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="less than or equal to 10000"):
        ScaleOrder.model_validate({"order_id": "one", "sizes": {"runners": 10_001}})
    said = invoke("scale", "s3://[::1/run", "--auto")
    assert said.startswith("error: got a URI that cannot be read (Invalid IPv6 URL); expected one such as s3://"), said


def test_an_answer_to_another_order_is_none(tmp_path: Path) -> None:
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    write_answer(find_store(tmp_path / "run"), ScaleAnswer(order_id="another", message="runners 1 -> 2"))
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(invoke("scale", str(tmp_path / "run"), "--runners", "3")))
    asking.start()
    assert wait_for(lambda: read_order(find_store(tmp_path / "run")) is not None, 30)
    order = read_order(find_store(tmp_path / "run"))
    assert order is not None
    assert order.sizes == {"runners": 3}
    write_answer(find_store(tmp_path / "run"), ScaleAnswer(order_id=order.order_id, message="no", is_refused=True))
    asking.join(30)
    assert said == ["error: the run refused: no"]


@pytest.mark.parametrize("options", [(), ("--auto", "--runners", "2")])
def test_scale_wants_sizes_or_auto(tmp_path: Path, options: tuple[str, ...]) -> None:
    assert "got no size or --auto with one" in invoke("scale", str(tmp_path), *options)


def test_scale_wants_a_run_that_goes_on(tmp_path: Path) -> None:
    assert "holds no run" in invoke("scale", str(tmp_path), "--runners", "2")
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text("{}")
    assert "is finished" in invoke("scale", str(tmp_path / "run"), "--runners", "2")


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["env_runners.num_env_runners=0", "env_runners.autoscaling={max_replicas: 2}"], "num_env_runners: got 0"),
        (["env_runners.autoscaling={max_replicas: 4, min_replicas: 2}"], "num_env_runners: got 1 with"),
        (["retrieval.num_retrievers=3", "retrieval.autoscaling={max_replicas: 2}"], "num_retrievers: got 3 with"),
        (["retrieval.encoders.autoscaling={max_replicas: 2}"], "retrieval.encoders.num_encoders: got 0 with"),
        (["retrieval.autoscaling={max_replicas: 2, target_starvation: 0.1}"], "unknown key retrieval.autoscaling"),
        (
            ["env_runners.weight_transport=ipc", "env_runners.autoscaling={max_replicas: 2}"],
            "got ipc with env_runners.autoscaling",
        ),
        (
            ["retrieval.type=http", "retrieval.options={url: 'http://x'}", "retrieval.autoscaling={max_replicas: 2}"],
            "which has no actors to scale",
        ),
    ],
)
def test_a_fleet_that_cannot_be_scaled_is_refused_before_the_start(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(AlgorithmConfig().override(assignments).freeze())
    assert message in str(caught.value)


def test_fleets_that_share_gpus_are_not_colocated_if_the_runners_are_scaled(tmp_path: Path) -> None:
    from ragr1_actors.core.weight_transport import choose_transport

    gpus = ["env_runners.num_gpus_per_env_runner=0.5", "learners.num_gpus_per_learner=0.5"]
    fixed = AlgorithmConfig().override(gpus)
    assert choose_transport(fixed.freeze()) == "ipc"
    assert choose_transport(fixed.override(["env_runners.autoscaling={max_replicas: 2}"]).freeze()) == "object_store"
    create_run_directory(fixed.freeze(), tmp_path / "run")
    found = open_run_directory(tmp_path / "run").env_runners.autoscaling
    assert found is not None
    assert found.model_dump(exclude_defaults=True) == {"max_replicas": 2}
