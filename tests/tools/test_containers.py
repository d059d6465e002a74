"""The Dockerfile and the Kubernetes manifest: no Docker and no cluster here, but all that they name is checked."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from libai_data.launch.exit_codes import STOPPED
from libai_data.launch.launcher import parse_args
from tests.deadline import run_to_end
from tests.distributed.processes import REPOSITORY

MANIFEST = REPOSITORY / "tools" / "kubernetes" / "training.yaml"
DOCKERFILE = REPOSITORY / "tools" / "docker" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


# podFailurePolicy is there for good since 1.31; earlier schemas asked for fields that clusters did not need.
@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifest_is_valid_by_the_published_schemas(version: str, manifest: dict[str, Any]) -> None:
    assert set(manifest) == {"Service", "Job"}
    for each in manifest.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_pods_find_pod_0_and_number_themselves(manifest: dict[str, Any]) -> None:
    job, service = manifest["Job"], manifest["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    (name,) = [each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "value" not in each]
    # The same in all pods of a Job, also in those that replace others.
    assert name == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert int(env["NODE"]) == spec["completions"] == spec["parallelism"]
    assert int(env["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert env["ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [port["containerPort"] for port in container["ports"]] == [int(env["PORT"])]
    assert spec["completionMode"] == "Indexed"


def test_what_was_stopped_is_started_again_and_a_wrong_command_line_is_not(manifest: dict[str, Any]) -> None:
    spec = manifest["Job"]["spec"]
    rules = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {STOPPED: "Ignore", 2: "FailJob"}
    grace = parse_args(["-m", "anything"]).stop_grace_seconds
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > grace


def test_the_command_of_a_pod_starts_the_launcher_with_all_that_it_needs(
    manifest: dict[str, Any], tmp_path: Path
) -> None:
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    words = shlex.split(container["args"][0])
    for word in words:
        if "=" not in word and "/" in word:
            assert (REPOSITORY / word).is_file(), word
    (tmp_path / "tools").mkdir()
    shutil.copy(REPOSITORY / "tools" / "train.sh", tmp_path / "tools")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "$@"\n')
    python.chmod(0o755)
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    ended = run_to_end(
        [*container["command"], *container["args"]],
        env={**env, "JOB_COMPLETION_INDEX": "1", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert ended.stdout == (
        "-m libai_data.launch --nnodes 2 --node_rank 1 --nproc_per_node 8 --master_addr libai-data-0.libai-data "
        "--master_port 12345 tools/train_net.py --config-file configs/vit_digits.py "
        "train.output_dir=/output/vit_digits\n"
    )


def instructions() -> list[list[str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def test_every_copied_path_exists_and_is_sent_to_the_build() -> None:
    sent = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    for name, rest in instructions():
        if name == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                assert (REPOSITORY / source).exists(), source
                assert source.split("/")[0] in sent, source
    for name in sent:
        assert (REPOSITORY / name).exists(), name


def test_the_packages_that_it_installs_are_extras_of_setup_py() -> None:
    (install,) = [rest for name, rest in instructions() if name == "RUN"]
    (extras,) = re.findall(r"\.\[([a-z,]+)\]", install)
    known = re.findall(r'^        "(\w+)": [A-Z]+,$', (REPOSITORY / "setup.py").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(known)
    (constraints,) = re.findall(r"--constraint (\S+)", install)
    assert (REPOSITORY / constraints).is_file()
    base = next(rest for name, rest in instructions() if name == "FROM")
    assert base.startswith("python:3.10-"), "OneFlow 0.9 has wheels up to Python 3.10"


def test_what_is_copied_is_enough_for_the_commands_that_the_image_runs(tmp_path: Path) -> None:
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                where = tmp_path / target if target != "./" else tmp_path / source
                if (REPOSITORY / source).is_dir():
                    shutil.copytree(REPOSITORY / source, where, dirs_exist_ok=True)
                else:
                    where.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(REPOSITORY / source, where)
    words = {name: json.loads(rest) for name, rest in instructions() if name in ("ENTRYPOINT", "CMD")}
    assert words["ENTRYPOINT"][0] == "python"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    commands = [
        [*words["ENTRYPOINT"][1:], *words["CMD"]],
        [*words["ENTRYPOINT"][1:], "launch", "tools/train_net.py", "--help"],
    ]
    for command in commands:
        ended = run_to_end([sys.executable, *command], 100, cwd=tmp_path, env=environment)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("usage: ")
