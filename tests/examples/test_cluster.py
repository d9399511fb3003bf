"""The scripts and manifests for clusters: valid, consistent in themselves, and right about what ends a run."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from diff_transformer.cli.app import configuration

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cluster"
# Fields that the manifest uses, of JobSet v1alpha2 (kubernetes-sigs/jobset) and of a Job.
COUNT, TEXT = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}


def closed(required, **fields) -> dict:
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


JOB = closed(
    ["template"], completionMode={"enum": ["Indexed", "NonIndexed"]}, parallelism=COUNT, completions=COUNT,
    backoffLimit=COUNT, template={"type": "object"},
)  # fmt: skip
SCHEMA = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed(["name"], name=TEXT),
    spec=closed(
        ["replicatedJobs"],
        failurePolicy=closed([], maxRestarts=COUNT),
        network=closed([], enableDNSHostnames={"type": "boolean"}),
        replicatedJobs={"type": "array", "items": closed(
            ["name", "template"], name=TEXT, replicas=COUNT, template=closed(["spec"], spec=JOB)
        )},
    ),
)  # fmt: skip
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$TOLD"
if [ "$END" = finished ]; then mkdir -p "$OUT/model"; touch "$OUT/config.json" "$OUT/model/config.json"; exit 0; fi
[ "$END" = failed ] && exit 7
mkdir -p "$OUT"; touch "$OUT/config.json"
trap 'exit 0' TERM
touch "$TOLD.ready"; while true; do sleep 0.05; done
"""


def kubernetes() -> tuple[str, dict[str, str]]:
    container = manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    return container["args"][0], {one["name"]: one["value"] for one in container["env"]}


def manifest() -> dict:
    return yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())


def skypilot() -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0",
             "SKYPILOT_NUM_GPUS_PER_NODE": "8"}  # fmt: skip
    return task["run"], task["envs"] | given


def slurm() -> tuple[str, dict[str, str]]:
    return (FOLDER / "slurm.sh").read_text(), {
        "CORPUS": "/data/corpus", "RECIPE": "scaling_1p4b", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
    }  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """``start(script, environment, end)`` -> the process, and the file with what ``torchrun`` was told."""
    tools, told = tmp_path / "env" / "bin", tmp_path / "told"
    tools.mkdir(parents=True)
    for name, text in {
        "torchrun": TORCHRUN,
        "scontrol": "#!/bin/bash\necho n1\necho n2\n",
        "srun": '#!/bin/bash\nshift\nexec "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def run(script: str, environment: dict[str, str], end: str):
        where = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "TOLD": str(told), "END": end}
        where |= environment | {"OUT": str(tmp_path / "run")}
        return subprocess.Popen(["bash", "-c", script], env=where, start_new_session=True), told

    return run


@pytest.mark.parametrize("platform", [kubernetes, skypilot, slurm])
def test_the_command_is_one_that_trains_and_resumes(platform, start):
    for resumed in (False, True):
        process, told = start(*platform(), "finished")
        assert process.wait(30) == 0
        launcher, _, command = told.read_text().partition("-m\ndiff_transformer\n")
        words = command.split()
        assert words[:3] == ["train", "--recipe", "scaling_1p4b"]
        assert words[3] == "--set"
        configuration(words[2], [words[4]])
        assert words[5] == "--out"
        assert words[7:] == ["--resume"] * resumed
        options = dict(zip(launcher.split()[::2], launcher.split()[1::2], strict=True))
        assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "8")


def test_the_jobset_is_valid_and_its_counts_agree():
    made = manifest()
    assert not list(Draft202012Validator(SCHEMA).iter_errors(made))
    assert list(Draft202012Validator(SCHEMA).iter_errors(json.loads(json.dumps(made).replace("replicas", "copies"))))
    (job,) = made["spec"]["replicatedJobs"]
    script, environment = kubernetes()
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    assert int(environment["NODES"]) == spec["parallelism"] == spec["completions"]
    assert f"{made['metadata']['name']}-{job['name']}-0-0.{made['metadata']['name']}:29500" in script
    assert f"--nproc-per-node {pod['containers'][0]['resources']['limits']['nvidia.com/gpu']} " in script
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


def test_a_stopped_pod_is_not_taken_for_a_finished_one(start):
    """A run that is told to stop saves and ends with 0. A pod that ends so would never be started again."""
    process, told = start(*kubernetes(), "stopped")
    while not told.with_name("told.ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert start(*kubernetes(), "failed")[0].wait(30) == 1
    assert start(*kubernetes(), "finished")[0].wait(30) == 0
