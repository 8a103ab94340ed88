"""The options of `unidist run`, host files and allocations; and that horovodrun reads a command line as it does."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.worlds import PYTHON
from unidist.errors import LaunchError
from unidist.launch.topology import detect
from unidist.launchers.table import missing
from unidist.run import options, output
from unidist.run.hosts import (
    HostSlots,
    Placement,
    _slurm_tasks,
    allocated_hosts,
    parse_hosts,
    place,
    rank_order,
    read_hostfile,
    shared_gpus,
    worker_variables,
)

unit = pytest.mark.unit


# ----------------------------------------------------------------------------------------- hosts
@unit
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:4,b:4", [("a", 4), ("b", 4)]),
        ("a", [("a", 1)]),
        (" a:2 , b ,", [("a", 2), ("b", 1)]),
        ("10.0.0.1:2,10.0.0.2:3", [("10.0.0.1", 2), ("10.0.0.2", 3)]),
        ("[fd00::1]:2,fd00::2", [("fd00::1", 2), ("fd00::2", 1)]),
        ("a:1,b:1,a:2", [("a", 3), ("b", 1)]),
        ("node-1.cluster.local:8", [("node-1.cluster.local", 8)]),
    ],
)
def test_hosts(text: str, expected: list[tuple[str, int]]) -> None:
    assert [(host.name, host.slots) for host in parse_hosts(text)] == expected


@unit
@pytest.mark.parametrize("text", ["a:0", "a:x", "a:-1", "a b:1", "a:1:2", "-oProxyCommand=x:1", "a;b:1"])
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(text.split(",")[0].split(":")[-1])):
        parse_hosts(text)


@unit
def test_host_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# the cluster\n\na slots=4\nb:2   # a comment\n c\nd slots = 3 max_slots=8\n[fd00::1]:2\nfd00::2 slots=2\n"
        "b slots=1\r\n"
    )
    expected = [("a", 4), ("b", 3), ("c", 1), ("d", 3), ("fd00::1", 2), ("fd00::2", 2)]
    assert [(host.name, host.slots) for host in read_hostfile(str(file))] == expected
    file.write_text("a slots=4\nb slots=many\n")
    with pytest.raises(LaunchError, match="hosts:2: 'many'"):
        read_hostfile(str(file))
    file.write_text("# nobody\n")
    with pytest.raises(LaunchError, match="names no host"):
        read_hostfile(str(file))
    with pytest.raises(LaunchError, match="No such file"):
        read_hostfile(str(tmp_path / "none"))


@unit
def test_ranks_fill_the_hosts_in_their_order() -> None:
    hosts = [HostSlots("a", 2), HostSlots("b", 4), HostSlots("c", 1)]
    assert place(hosts, 3) == [Placement("a", 0, 2), Placement("b", 2, 1)]
    assert place(hosts, 7) == [Placement("a", 0, 2), Placement("b", 2, 4), Placement("c", 6, 1)]
    with pytest.raises(LaunchError, match="8 ranks were asked for, and the hosts have 7 slots"):
        place(hosts, 8)


@unit
def test_allocations() -> None:
    assert allocated_hosts({}) == []
    assert allocated_hosts({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4"}) == [HostSlots("n1", 4)]
    # Where the numbers are not those of the nodes that are listed, each node takes the first one.
    for nodes, tasks in ((1, [1]), (2, [1, 1]), (3, [1, 3, 3]), (4, [1, 1, 1, 1])):
        assert _slurm_tasks({"SLURM_TASKS_PER_NODE": "1,3(x2)"}, nodes) == tasks
    lsf = {"LSB_MCPU_HOSTS": "n1 4 n2 2 "}
    assert allocated_hosts(lsf) == [HostSlots("n1", 4), HostSlots("n2", 2)]


# --------------------------------------------------------------------------------------- options
@unit
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-np x python", "invalid int value: 'x'"),
        ("-np 2 --nonsense python", "--nonsense|there is no command"),
        ("-np 2 -m pkg.train", "unrecognized arguments: -m. To start a module, write python -m MODULE"),
        ("-np 2 -H a:1 --hostfile f python", "not allowed with"),
        ("-np 2 --max-np 4 python", "--max-num-proc is an option of elastic training, which has --min-np or"),
        ("-np 2 --min-np 1 --mpi python", "--mpi is not for elastic training"),
        ("-np 2 --jsrun python", "--jsrun is not supported"),
        ("-np 2 --cycle-time-ms -1 python", "-1 is not a number from 0 up"),
        ("-np 2 --autotune-gaussian-process-noise 2 python", "2 is not a number from 0 to 1"),
        ("-np 2 --log-level LOUD python", "LOUD is none of"),
        ("-np 2 --config-file nothing.yaml python", "cannot be read"),
    ],
)
def test_what_is_refused(line: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        options.parse(line.split())


@unit
def test_options_without_effect_are_known() -> None:
    given = options.parse(
        ["-np", "2", "--autotune", "--cycle-time-ms", "2", "--num-nccl-streams", "2", "python", "train.py"]
    )
    assert options.without_effect(given) == ["--autotune", "--num-nccl-streams"]


CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 3.5
  hierarchical_allreduce: true
autotune: {enabled: true, warmup_samples: 5, log_file: trials.csv}
timeline: {filename: line.json, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {num_nccl_streams: 2, thread_affinity: 1, gloo_timeout_seconds: 90}
logging: {level: INFO, with_timestamp: false}
"""
#: Prints what Horovod's own parser makes of each command line.
HOROVOD = """
import json, sys, warnings
from horovod.runner import launch
from horovod.runner.common.util import config_parser
warnings.simplefilter("ignore")
for line in json.load(sys.stdin):
    sys.argv = ["horovodrun", *line]
    try:
        args = launch.parse_args()
    except SystemExit as error:
        print(json.dumps("refused"))
        continue
    found = {name: getattr(args, name) for name in %r}
    found["nics"] = sorted(args.nics or ())
    found["env"] = {k: str(v) for k, v in config_parser.set_env_from_args({}, args).items()}
    print(json.dumps(found))
"""
COMPARED = (
    "num_proc", "start_timeout", "output_filename", "verbose", "disable_cache", "ssh_port", "ssh_identity_file",
    "hosts", "hostfile", "use_gloo", "use_mpi", "mpi_args", "binding_args", "tcp_flag", "prefix_output_with_timestamp",
    "command", "min_num_proc", "max_num_proc", "slots", "elastic_timeout", "reset_limit", "cooldown_range",
    "host_discovery_script",
)  # fmt: skip


def ours(line: list[str]) -> object:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given = options.parse(line)
    except LaunchError:
        return "refused"
    found = {name: getattr(given, name) for name in COMPARED}
    return {**found, "nics": sorted(given.nics or ()), "env": options.variables(given)}


def random_line(random: random.Random, config: Path) -> list[str]:
    """Options as people type them: abbreviated, with "=", in any order; then a command with options of its own."""
    flags: list[list[str]] = [[random.choice(["-np", "-n", "--num-proc", "--num-p"]), str(random.randint(1, 9))]]
    for setting in options.SETTINGS:
        if random.random() < 0.15:
            off = setting.type is None and random.random() < 0.4
            flag = setting.flag.replace("--", "--no-", 1) if off else setting.flag
            value = {str: "file.json", None: ""}.get(
                setting.type, "INFO" if "level" in flag else str(random.choice([0, 1]))
            )
            flags.append([flag, *([value] if value else [])])
    more = [
        ["-H", "a:1,b:2"], ["--hosts", "a:4"], ["--hostfile", "f"], ["-hostfile", "f"], ["--gloo"], ["--mpi"],
        ["--verbose"], ["--verb"], ["--start-timeout", "60"], ["--start", "5"], ["--network-interface", "eth0"],
        ["--network-interfaces", "eth0,eth1"], ["-p", "2222"], ["-i", "key"], ["--tcp"], ["--disable-cache"],
        ["--output-filename", "logs"], ["-prefix-timestamp"], ["--no-stall-check"], ["--stall-check"],
        ["--log-with-timestamp"], ["--log-hide-timestamp"], ["--mpi-args=--map-by ppr:6:node"],
        ["--elastic-timeout", "9"], ["--binding-args=-bind-to core"], ["--bogus"],
        ["--config-file", str(config)], ["--start-timeout", "soon"],
    ]  # fmt: skip
    flags += random.sample(more, random.randint(0, 4))
    if random.random() < 0.3 and ["--mpi"] not in flags:
        given = [["--max-np", "4"], ["--max-num-proc", "4"], ["--slots", "3"], ["--slots-per-host", "2"]]
        given += [["--reset-limit", "3"], ["--reset", "1"], ["--blacklist-cooldown-range", "10", "20"]]
        flags += [[random.choice(["--min-np", "--min-num-proc"]), "2"], *random.sample(given, random.randint(0, 3))]
        flags += [["--host-discovery-script", "./hosts.sh"]] * (random.random() < 0.5)
    random.shuffle(flags)
    for flag in flags:
        if len(flag) == 2 and flag[0].startswith("--") and random.random() < 0.3:
            flag[:] = [f"{flag[0]}={flag[1]}"]
    command = random.choice(
        [["python", "train.py"], ["python", "-m", "x", "--verbose", "-H", "y"], ["K=1", "python", "-c", "1"]]
    )
    return [word for flag in flags for word in flag] + command


def test_horovods_own_parser_reads_the_same(tmp_path: Path) -> None:
    if why := missing("horovodrun"):
        pytest.skip(why)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG)
    draw = random.Random(18)
    lines = [random_line(draw, config) for _ in range(400)]
    lines += [["-np=2", "python"]]
    result = subprocess.run(
        [PYTHON, "-c", HOROVOD % (COMPARED,)], input=json.dumps(lines), capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    theirs = [json.loads(text) for text in result.stdout.splitlines() if text.startswith(("{", '"'))]
    assert len(theirs) == len(lines)
    accepted = 0
    for line, expected in zip(lines, theirs):
        assert ours(line) == expected, line
        accepted += expected != "refused"
    assert accepted > 200, accepted


@unit
def test_a_progress_bar_stays_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    printed = output.Output(2)
    for text in ("\r", " 0 %\r", " 50 %\r", "100 %\n"):
        printed.write(0, "stderr", text)
    assert capfd.readouterr().err == "[0]<stderr>: 0 %\r[0]<stderr>: 50 %\r[0]<stderr>:100 %\n"
    printed.write(0, "stderr", " 1 %\r")
    printed.write(1, "stderr", "a warning\r\n\n")
    output.say("done")
    printed.write(1, "stdout", "2 %\r")
    printed.close()
    out, err = capfd.readouterr()
    assert err == "[0]<stderr>: 1 %\r\n[1]<stderr>:a warning\n[1]<stderr>:\nunidist run: done\n"
    assert out == "[1]<stdout>:2 %\r\n"
    assert printed.last_lines(0) == ["100 %"] and printed.last_lines(1) == ["a warning", ""]


@unit
def test_every_option_has_a_help() -> None:
    assert [action.option_strings for action in options.parser()._actions if not action.help] == []


def test_the_driver_starts_agents_before_it_imports_torch() -> None:
    code = "import sys, unidist.run.elastic_driver; assert 'torch' not in sys.modules"
    assert subprocess.run([PYTHON, "-c", code]).returncode == 0


# ------------------------------------------------------------------------------------ workers of Ray and Spark
@unit
def test_ranks_of_a_host_are_together() -> None:
    assert rank_order(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]


@unit
def test_variables_of_workers() -> None:
    found = worker_variables(["x", "x", "y"], [("2",), ("0",), ("1",)], ("10.0.0.1", 1234))
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["2,0", "2,0", "1"]
    launches = [detect({**each, "RAY_JOB_ID": "01"}) for each in found]
    assert [(each.rank, each.local_rank, each.local_size, each.node_rank) for each in launches] == [
        (0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1, 1),
    ]  # fmt: skip
    assert {(each.launcher.name, each.master_addr, each.master_port) for each in launches} == {
        ("ray", "10.0.0.1", 1234)
    }


@unit
@pytest.mark.parametrize(
    ("assigned", "visible"),
    [
        ([["3"], ["1"]], ["3", "1"]),
        ([["0", "1"], ["2", "3"]], ["0", "2", "1", "3"]),
        ([["0"], ["0"]], ["0"]),
        ([[], []], []),
    ],
)
def test_the_first_gpu_of_each_rank_is_at_its_local_rank(assigned: list[list[str]], visible: list[str]) -> None:
    assert shared_gpus(assigned) == visible
