"""The files that start a cluster: KubeRay's manifests, the cluster launcher's configuration and the Dockerfile."""

from __future__ import annotations

import copy
import os
import re
import shlex
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.placement_plan import Node, actor_demands, place_actors
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.resolve import override, read_recipe, resolve

ROOT = Path(__file__).resolve().parent.parent
KUBERAY = ROOT / "cluster" / "deploy" / "kuberay"
LAUNCHER = ROOT / "cluster" / "deploy" / "vms" / "cluster.yaml"
DOCKERFILE = ROOT / "cluster" / "deploy" / "Dockerfile"
GIB = 2**30
ROLES = {"learner", "runner", "retriever"}
SELECTORS = [
    "learners.label_selector={ragr1: learner}",
    "env_runners.label_selector={ragr1: runner}",
    "retrieval.label_selector={ragr1: retriever}",
]


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERAY / name).read_text(encoding="utf-8"))
    return found


def published_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a published definition. A field that it does not have is an error, as for kubectl."""
    folder = os.environ.get("KUBERAY_CRDS")
    if not folder:
        pytest.skip("set KUBERAY_CRDS to the folder helm-chart/kuberay-operator/crds of a checkout of KubeRay")
    definition = yaml.load((Path(folder) / f"ray.io_{kind}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {}
    return closed(schema)


def closed(schema: Any) -> Any:
    """Refuse unknown fields in every object whose fields are listed."""
    if isinstance(schema, dict):
        changed = {key: closed(value) for key, value in schema.items()}
        if schema.get("type") == "object" and "properties" in schema:
            changed.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
        return changed
    return [closed(each) for each in schema] if isinstance(schema, list) else schema


def test_manifests_have_only_fields_that_kuberay_has() -> None:
    schema = yaml.safe_load((ROOT / "tests" / "kuberay_schema.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for name in ("raycluster.yaml", "rayjob.yaml"):
        jsonschema.validate(manifest(name), schema)
    wrong = manifest("raycluster.yaml")
    wrong["spec"]["workerGroupSpecs"][0]["maxReplica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(("name", "kind"), [("raycluster.yaml", "rayclusters"), ("rayjob.yaml", "rayjobs")])
def test_manifests_fit_the_published_definitions(name: str, kind: str) -> None:
    jsonschema.validate(manifest(name), published_schema(kind))


def cluster_spec() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("raycluster.yaml")["spec"]
    return spec


def groups() -> dict[str, dict[str, Any]]:
    return {group["groupName"]: group for group in cluster_spec()["workerGroupSpecs"]}


def pods() -> dict[str, dict[str, Any]]:
    found = {name: group["template"]["spec"] for name, group in groups().items()}
    return {"head": cluster_spec()["headGroupSpec"]["template"]["spec"], **found}


def test_a_job_has_the_same_cluster() -> None:
    assert manifest("rayjob.yaml")["spec"]["rayClusterSpec"] == cluster_spec()


def test_the_cluster_scales_by_the_second_autoscaler_and_wants_a_token() -> None:
    spec = cluster_spec()
    assert spec["rayVersion"] == version("ray")
    assert spec["enableInTreeAutoscaling"] and spec["autoscalerOptions"]["version"] == "v2"
    assert spec["authOptions"] == {"mode": "token"}
    assert {group["labels"]["ragr1"] for group in groups().values()} == ROLES
    for group in groups().values():
        assert group["minReplicas"] == 0 < group["maxReplicas"] and group["idleTimeoutSeconds"] > 0


def test_pods_have_limits_probes_storage_and_shared_memory() -> None:
    for name, pod in pods().items():
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"], name
        assert container["readinessProbe"]["httpGet"]["path"] == "/api/healthz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/api/healthz"
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"runs": "/runs", "shm": "/dev/shm"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == manifest("storage.yaml")["metadata"]["name"]
        shared = volumes["shm"]["emptyDir"]
        memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
        assert shared["medium"] == "Memory" and 0 < int(shared["sizeLimit"].removesuffix("Gi")) <= memory / 4
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        (secret,) = container["envFrom"]
        assert secret["secretRef"]["optional"], "a cluster without S3 has no such secret"


def nodes_of(node_types: dict[str, dict[str, Any]]) -> list[Node]:
    """Return the nodes of a cluster that has grown to its limits."""
    return [
        Node(f"{name}-{number}", of["resources"].get("CPU", 0), of["resources"].get("GPU", 0), of.get("labels", {}))
        for name, of in node_types.items()
        for number in range(max(1, of.get("max_workers", 0)))
    ]


def recipe_with_selectors(name: str) -> RunConfig:
    return resolve(override(read_recipe(name), SELECTORS))


def test_rays_own_autoscaler_reads_the_manifest_and_the_published_recipes_fit() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    resource = copy.deepcopy(manifest("raycluster.yaml"))
    resource["metadata"]["namespace"] = "default"
    derived = _derive_autoscaling_config_from_ray_cr(resource)
    validate_config(derived)
    types = derived["available_node_types"]
    assert types["learners"]["labels"] == {"ragr1": "learner"} and types["learners"]["max_workers"] == 1
    assert types["runners"]["idle_timeout_s"] == 120
    for recipe in ("search_r1_grpo_7b", "search_r1_7b", "ragr1_sq_7b", "ragr1_mq_7b"):
        found = place_actors(actor_demands(recipe_with_selectors(recipe), has_index=True), nodes_of(types))
        assert not found.missing, recipe
        assert not any(name.startswith("head") for row in found.rows for name in row.nodes)


def test_the_job_trains_a_recipe_with_these_labels() -> None:
    command = shlex.split(manifest("rayjob.yaml")["spec"]["entrypoint"])
    assert command[:2] == ["ragr1", "train"]
    assignments = [word for word in command[3:] if re.match(r"\w+\.\w+=", word)]
    config = resolve(override(read_recipe(command[2]), assignments))
    assert config.env_runners.label_selector == {"ragr1": "runner"}
    assert config.retrieval.label_selector == {"ragr1": "retriever"}
    assert config.learners.label_selector == {"ragr1": "learner"}
    assert "--auto-resume" in command, "the comment says that it goes on"
    volume = manifest("storage.yaml")["metadata"]["name"]
    mounted = {mount["mountPath"] for pod in pods().values() for mount in pod["containers"][0]["volumeMounts"]}
    for path in (command[command.index("--run-dir") + 1], config.environment.tasks, config.retrieval.index):
        assert any(path.startswith(f"{folder}/") for folder in mounted), f"{path} is not in the image, nor on {volume}"


def test_the_launcher_takes_its_configuration_and_the_published_recipes_fit() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = LAUNCHER.read_text(encoding="utf-8")
    config = prepare_config(yaml.safe_load(text))
    validate_config(config)
    types = config["available_node_types"]
    assert {of["labels"]["ragr1"] for of in types.values() if of.get("labels")} == ROLES
    assert config["max_workers"] == sum(of["max_workers"] for of in types.values())
    found = place_actors(actor_demands(recipe_with_selectors("search_r1_grpo_7b"), has_index=True), nodes_of(types))
    assert not found.missing
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**config, "max_worker": 1})
    assert "ray stop" not in "".join(config["head_start_ray_commands"] + config["worker_start_ray_commands"])


def test_the_image_has_the_packages_and_no_root() -> None:
    lines = re.sub(r"\\\n", " ", DOCKERFILE.read_text(encoding="utf-8")).splitlines()
    instructions = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    users = [rest for name, _, rest in instructions if name == "USER"]
    assert users == ["ray"]
    copied = {rest.split()[-2] for name, _, rest in instructions if name == "COPY"}
    assert {"ragr1_actors", "envs", "learners", "retrieval", "cluster"} <= copied
    assert any("[gpu]" in rest for name, _, rest in instructions if name == "RUN")
    (profile,) = [rest for name, _, rest in instructions if name == "RUN" and "/etc/profile.d/" in rest]
    assert profile.split("'")[1] == "export PATH=/opt/ragr1/bin:$PATH"  # of login shells, as the launcher's are
    extras = [each for each in requires("ragr1-actors") or () if "extra == 'gpu'" in each.replace('"', "'")]
    assert any(each.startswith("vllm") for each in extras)


@pytest.mark.parametrize("path", sorted([*KUBERAY.iterdir(), LAUNCHER, DOCKERFILE]), ids=lambda path: path.name)
def test_no_file_holds_a_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?i)(token|secret|password|key)\w*\s*[:=]\s*[\"']?[A-Za-z0-9+/]{16,}", text)
    assert "kind: Secret" not in text
