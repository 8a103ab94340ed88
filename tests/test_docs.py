"""README and the site: what they show is run, or it is said why not; what they list is all that there is."""

import ast
import difflib
import html.parser
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.run import get_args_parser

import unidist
import unidist.cli
from docs import tables
from tests import mutants
from tests.support import documents
from tests.support.errors import first_words
from tests.support.worlds import IN_FLOAT64, ROOT, environment, run_world, shown, with_torch
from unidist import settings
from unidist.horovod_names import PLAIN_CALLS
from unidist.launch.topology import LAUNCHERS
from unidist.migrate.rules.calls import OTHER_CALLS
from unidist.run import options

#: Programs that are parts of one, by their first lines: they are compiled.
FRAGMENTS = {
    "elastic.md: import torch": "the model and the data are the reader's; test_elastic.py runs such a program",
    "logging.md: mean_loss = unidist.allreduce_metric(loss.item())": "a part of a loop",
    "one-gpu-to-many.md: from contextlib import nullcontext": "a part of a loop; test_parity.py trains so",
    "logging.md: from torch.utils.tensorboard import SummaryWriter": "needs TensorBoard",
    "logging.md: import wandb": "needs an account of Weights & Biases",
    "spark.md: import horovod.spark": "test_spark.py runs it",
    "spark.md: import pyarrow.dataset": "test_spark.py runs it",
    "timeline.md: from torch.profiler import profile": "a part of a loop; test_tracing.py merges such files",
}
COMMANDS = documents.commands()
#: Commands that are not run here: the test that runs each, or "not run" and the reason.
NOT_HERE = {
    command: section.partition("]")[0]
    for section in re.split(r"^\[", (ROOT / "tests/commands.txt").read_text(), flags=re.MULTILINE)[1:]
    for command in section.partition("]")[2].split("\n")
    if command
}
HERE = sorted({command for _, command in COMMANDS} - NOT_HERE.keys())
PROGRAMS = {f"{block.page}: {block.text.splitlines()[0]}": block.text for block in documents.programs()}
TUTORIAL = ROOT / "docs/one-gpu-to-many.md"


# ------------------------------------------------------------------------------------ commands and programs
@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the commands of the pages run, one after another."""
    directory = tmp_path_factory.mktemp("desk")
    for name in ("examples", "templates"):
        (directory / name).symlink_to(ROOT / name)
    (directory / "train.py").write_text(PROGRAMS["README.md: import torch"])
    (directory / "src").mkdir()
    for name in ("digits.py", "digits_horovod.py"):
        shutil.copy(ROOT / "examples" / name, directory / "src")
    subprocess.run("git init -q . && git add src", shell=True, check=True, cwd=directory)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "before"]
    subprocess.run(commit, check=True, cwd=directory)
    return directory


def run(command: str, directory: Path, **variables: str) -> str:
    env = environment("python", {"PYTHONPATH": str(ROOT), **with_torch(), **variables})
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=directory, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("command", HERE)
def test_command(command: str, desk: Path) -> None:
    assert run(command, desk).strip()


@pytest.mark.unit
def test_every_command_is_run_or_it_is_said_why_not() -> None:
    assert not NOT_HERE.keys() - {command for _, command in COMMANDS}, "no page has these any more"
    for where in set(NOT_HERE.values()):
        file, _, test = where.partition("::")
        assert file.startswith("not run: ") or f"def {test}(" in (ROOT / "tests" / file).read_text(), where
    shown["the commands of README and docs"] = [
        f"{page}: {command}  [{NOT_HERE.get(command, 'run as it is')}]" for page, command in COMMANDS
    ]


@pytest.mark.unit
@pytest.mark.parametrize("command", sorted({command for _, command in COMMANDS}))
def test_the_options_exist(command: str) -> None:
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    elif words[:2] == ["unidist", "run"]:
        assert options.parse(words[2:]).command
    elif words[0] == "unidist":
        called = unidist.cli.main.get_command(None, words[1])  # type: ignore[arg-type]
        assert called is not None
        called.make_parser(called.context_class(called)).parse_args(words[2:])


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - FRAGMENTS.keys() - {"README.md: import torch"}))
def test_program(name: str, tmp_path: Path) -> None:
    """Complete programs, as they stand."""
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    output = run(f"python {'-m pytest' if name.startswith('testing.md') else ''} program.py 2>&1", tmp_path)
    expected = {
        "notebook.md": "[5.0, 5.0]",
        "resume.md": "done after step 12",
        "logging.md": "rank 0 printed once",
        "testing.md": "2 passed",
        "one-gpu-to-many.md": "(1797, 64)",
    }
    assert expected[name.split(":")[0]] in output


@pytest.mark.unit
def test_the_first_tests_of_each_directory() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rows = {
        place: re.findall("`([^`]+)`", tests) for place, tests in re.findall(r"^\| `(\S+)` \| (.*) \|$", page, re.M)
    }
    assert rows == mutants.FIRST
    named = [test for tests in rows.values() for test in tests] + re.findall(r'^    pytest "(.+)"$', page, re.M)
    for file, _, test in (each.partition("::") for each in named):
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), (file, test)
        assert (ROOT / file).is_file(), file


@pytest.mark.unit
def test_parts_of_programs_compile() -> None:
    for name in FRAGMENTS:
        ast.parse(PROGRAMS[name])


@pytest.mark.unit
def test_code_of_files_is_as_in_the_files() -> None:
    for block in documents.excerpts():
        texts = [(ROOT / file).read_text() for file in block.files]
        if block.language == "diff":
            lines = [text.splitlines(keepends=True) for text in texts]
            assert block.text == "".join(difflib.unified_diff(*lines, *block.files)), block.files
        else:
            assert any(block.text in textwrap.dedent(part) for part in _parts(texts[0])), block
    assert {block.page for block in documents.excerpts()} == {"from-horovod.md", "one-gpu-to-many.md"}


def _parts(text: str) -> list[str]:
    """The text, and what is indented more and more."""
    parts = [text]
    for depth in (4, 8):
        parts += re.findall(rf"(?:^(?: {{{depth}}}.*)?\n)+", text, re.MULTILINE)
    return parts


# ------------------------------------------------------------------------------------ the site
class Links(html.parser.HTMLParser):
    """The links of a page, and what they can lead to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.targets.add(given.get("id") or "")
        if tag == "a" and (link := given.get("href")) and "://" not in link:
            self.links.add(link)


def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    """Links within the site, with their anchors; those to other sites are not followed."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run([*sphinx, "docs", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.name: Links(path.read_text()) for path in (tmp_path / "site").glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= pages.keys()
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if target.endswith(".html") or not target:
                assert anchor in pages[target or name].targets | {""}, f"{name}: {link}"
            else:
                assert (tmp_path / "site" / target).exists(), f"{name}: {link}"


@pytest.mark.unit
def test_every_public_call_is_in_the_reference() -> None:
    page = (ROOT / "docs/api.md").read_text()
    names = [*(name for name in unidist.__all__), "print", *(f"elastic.{name}" for name in unidist.elastic.__all__)]
    missing = [name for name in names if not re.search(rf":: unidist\.{re.escape(name)}$", page, re.MULTILINE)]
    assert not missing, f"docs/api.md has no word on {missing}"


@pytest.mark.unit
def test_pages_name_every_collective_and_what_is_migrated() -> None:
    calls = {name: getattr(unidist, name) for name in unidist.__all__}
    collectives = {name for name, call in calls.items() if call.__module__ == unidist.all_reduce.__module__}
    of_tensors = {name for name in collectives if "tensor" in inspect.signature(calls[name]).parameters}
    of_horovod = {*PLAIN_CALLS, *OTHER_CALLS}
    assert len(of_tensors) == 7 and "barrier" in collectives
    wanted = {
        "README.md": collectives, "docs/semantics.md": of_tensors, "docs/hangs.md": of_tensors,
        "docs/migrating.md": of_horovod, "docs/hvd-to-unidist.md": of_horovod,
    }  # fmt: skip
    for page, names in wanted.items():
        text = (ROOT / page).read_text()
        missing = {name for name in names if not re.search(rf"`[^`|]*\b{name}\b[^`|]*`", text)}
        assert not missing, f"{page} has no word on {sorted(missing)}"


@pytest.mark.unit
def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    assert all(f":prog: unidist {name}\n" in page or f"## unidist {name}\n" in page for name in unidist.cli.HELP)


@pytest.mark.unit
def test_the_tables_have_everything() -> None:
    variables = {value for value in vars(settings).values() if isinstance(value, str) and value.startswith("UNIDIST_")}
    assert all(f"| `{name}` |" in tables.environment() for name in variables)
    assert all(f"| `{row.name}` |" in tables.launchers() for row in LAUNCHERS)


@pytest.mark.unit
def test_every_error_is_on_the_troubleshooting_page() -> None:
    page = set(re.findall(r"^(?:### |- )`(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE))
    errors = first_words()
    missing = [f"{where}: `{words}`" for words, where in errors.items() if words not in page]
    assert not missing, "docs/troubleshooting.md needs these:\n" + "\n".join(missing)
    assert not page - errors.keys(), "no error begins so any more"


# ------------------------------------------------------------------------------------ tutorials
def test_what_goes_wrong_when_a_step_is_forgotten(tmp_path: Path) -> None:
    """The last table of the first tutorial."""
    result = run_world("torchrun", 2, ["tests/programs/forgotten.py", str(tmp_path)])
    assert result.returncode == 0, result.output
    found = dict(json.loads(line) for line in re.findall(r"FORGOTTEN (.*)", result.output))
    page = TUTORIAL.read_text()
    right = found["nothing"]
    (first, last) = right["lines"]
    assert (right["steps"], right["keys"], right["error"]) == (48, ["0.weight"], "")

    batch = found["batch size"]
    assert batch["steps"] == 24 and "24 instead of 48" in page
    assert f"({batch['lines'][1]['accuracy']:.2f} instead of {last['accuracy']:.2f})" in page
    assert found["shard"]["steps"] == 96 and "steps: 96" in page
    padded = found["pad"]["lines"][1]
    assert padded["loss"] == last["loss"] and f"{padded['accuracy']} instead of {last['accuracy']}" in page
    error = "MismatchError: parameter '0.weight' of rank 0 differs on rank 1"
    assert found["wrap"]["error"].startswith(error) and error in page
    own = found["total"]["lines"][1]
    assert own["loss"] == last["loss"] and f"{own['accuracy']:.2f} instead of {last['accuracy']:.2f}" in page
    assert found["mean"]["lines"][0]["loss"] != first["loss"]
    assert found["rank 0"]["lines"] == [first, first, last, last]
    assert found["unwrap"]["keys"] == ["module.0.weight"]


def test_the_program_for_many_trains_as_one_process(tmp_path: Path) -> None:
    """With the commands of the tutorial, in float64."""
    logs, weights = [], []
    for command in HERE:
        if "examples/many_gpus.py --out" in command:
            run(command.replace("examples/many_gpus.py", f"{ROOT / IN_FLOAT64} {ROOT}/examples/many_gpus.py"), tmp_path)
            out = tmp_path / command.split()[-1]
            logs.append((out / "log.jsonl").read_text())
            weights.append(torch.load(out / "best.pt"))
    alone, two = weights
    assert logs[0] == logs[1]  # the losses of all epochs, to four digits
    assert max(float((alone[name] - two[name]).abs().max()) for name in alone) < 1e-10


@pytest.mark.unit
def test_the_migrated_example_is_what_the_tool_writes(tmp_path: Path) -> None:
    script = tmp_path / "digits_horovod.py"
    shutil.copy(ROOT / "examples/digits_horovod.py", script)
    shutil.copy(ROOT / "examples/digits.py", tmp_path)
    command = [sys.executable, "-m", "unidist", "migrate", "--write", "--force", str(script)]
    subprocess.run(command, check=True, capture_output=True, env=environment("python", {"PYTHONPATH": str(ROOT)}))
    migrated = (ROOT / "examples/digits_migrated.py").read_text()
    assert script.read_text().split('"""', 2)[2] == migrated.split('"""', 2)[2]


# ------------------------------------------------------------------------------------ templates
def template(name: str) -> str:
    return (ROOT / "templates" / name).read_text()


@pytest.mark.unit
def test_scripts_are_bash() -> None:
    for path in (ROOT / "templates").glob("*.sbatch"):
        subprocess.run(["bash", "-n", path], check=True)


def test_the_batch_script_of_slurm(desk: Path, srun_env: dict[str, str]) -> None:
    """On a smaller allocation: options of sbatch have precedence over those in the script."""
    smaller = (
        "--parsable --nodes 1 --ntasks-per-node 2 --cpus-per-task 1 --gpus-per-node 0 --overcommit --output out.txt"
    )
    command = f"sbatch {smaller} templates/slurm.sbatch examples/digits.py --epochs 1 --save {desk}/slurm.pt"
    # sbatch --wait looks at longer and longer intervals.
    wait = "while squeue --noheader --jobs $job | grep -q .; do sleep 0.3; done"
    run(f"job=$({command}); {wait}; cat out.txt", desk, **srun_env)
    assert f"2 ranks on gloo: saved {desk}/slurm.pt" in (desk / "out.txt").read_text()


@pytest.mark.unit
def test_jobs_of_kubernetes() -> None:
    job = yaml.safe_load(template("pytorchjob.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    pods = sum(replica["replicas"] for replica in replicas.values())
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        line = container["args"][0].replace("$RANK", "0").replace("$MASTER_PORT", "29500")
        given = get_args_parser().parse_args(shlex.split(line)[2:])
        assert given.nnodes == str(pods)
        assert given.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for name in ("mpijob.yaml", "mpijob-horovod.yaml"):
        job = yaml.safe_load(template(name))
        assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
        replicas = job["spec"]["mpiReplicaSpecs"]
        assert replicas.keys() == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
        slots = replicas["Worker"]["replicas"] * job["spec"]["slotsPerWorker"]
        for replica in replicas.values():
            (container,) = replica["template"]["spec"]["containers"]
            command = container.get("command", [])
            assert not command or command[command.index("-np") + 1] == str(slots)


def pods_of(template: dict[str, Any], image: str) -> dict[str, Any]:
    """The pod of a template; its volumes are there, and its containers have one image."""
    pod: dict[str, Any] = template["spec"]
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        assert container["image"] == image
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
    return pod


@pytest.mark.unit
def test_jobs_of_kubeflow_trainer_and_jobset() -> None:
    """Against the models that Kubeflow makes of the definitions in the cluster."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    runtime, job = yaml.safe_load_all(template("trainjob.yaml"))
    jobset = yaml.safe_load(template("jobset.yaml"))
    for kind, given in (
        (models.TrainerV1alpha1ClusterTrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, job),
        (models.JobsetV1alpha2JobSet, jobset),
    ):
        assert kind.from_dict(given).to_dict() == given  # a field that it does not know is lost
    assert (runtime["apiVersion"], runtime["kind"]) == ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["command"][0] == "torchrun" and get_args_parser().parse_args(trainer["command"][1:])
    for spec in (runtime["spec"]["template"]["spec"], jobset["spec"]):
        (replicated,) = spec["replicatedJobs"]
        assert spec["failurePolicy"]["maxRestarts"] and replicated["template"]["spec"]["backoffLimit"] == 0
        pod = pods_of(replicated["template"]["spec"]["template"], "registry.example.com/train:1")
        assert [replicated["name"], pod["containers"][0]["name"]] == ["node", "node"]
        assert pod["restartPolicy"] == "Never"
    pods, container = replicated["template"]["spec"], pod["containers"][0]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert pods["completionMode"] == "Indexed" and pods["parallelism"] == pods["completions"]
    line = container["args"][0].replace("$JOB_COMPLETION_INDEX", "0")
    given = get_args_parser().parse_args(shlex.split(line)[2:])
    assert given.nnodes == str(pods["completions"])
    assert given.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    name = jobset["metadata"]["name"]
    assert given.master_addr == f"{name}-{replicated['name']}-0-0.{name}"


@pytest.mark.unit
def test_jobs_of_kuberay() -> None:
    job = yaml.safe_load(template("rayjob.yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    known = {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"].keys() == known and cluster.keys() == {"headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() - cluster["headGroupSpec"].keys() == {"groupName", "replicas", "minReplicas", "maxReplicas"}
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pods_of(group["template"], "registry.example.com/train-ray:1")


@pytest.mark.unit
def test_the_workflows_make_what_there_is() -> None:
    files = map(yaml.safe_load, [path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")])
    commands = " ".join(step.get("run", "") for file in files for job in file["jobs"].values() for step in job["steps"])
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {target for line in targets for target in line.split()}
    assert {"lint", "unit", "docs", "test-torch"} <= set(re.findall(r"make ([\w-]+)", commands)) <= known


@pytest.mark.unit
def test_the_image_and_its_containers() -> None:
    lines = re.sub(r"\\\n", " ", template("Dockerfile")).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [step for step, _ in steps] == ["ARG", "FROM", "WORKDIR", "COPY", "RUN", "COPY", "ENTRYPOINT", "CMD"]
    assert ":latest" not in template("Dockerfile")
    for step, rest in steps:
        if step == "COPY":
            assert (ROOT / rest.split()[0]).exists(), rest
    entry, command = (json.loads(rest) for step, rest in steps if step in ("ENTRYPOINT", "CMD"))
    assert entry == ["torchrun"] and get_args_parser().parse_args(command)
    services = yaml.safe_load(template("compose.yaml"))["services"]
    for rank, service in enumerate(services.values()):
        build = service["build"]
        assert (ROOT / "templates" / build["context"] / build["dockerfile"]).exists()
        given = get_args_parser().parse_args(shlex.split(service["command"]))
        assert (given.node_rank, given.nnodes, given.master_addr) == (rank, str(len(services)), "node0")
        assert given.training_script == "train.py"
