"""The command line of ``unidist run``: horovodrun's options, and three of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from unidist import settings
from unidist.errors import LaunchError
from unidist.run.elastic import Limits

#: Values of HOROVOD_LOG_LEVEL.
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
#: Options that only elastic training has: it is elastic with one of the first two.
_ELASTIC = ("host_discovery_script", "min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range")


def _from_0(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if value < 0:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
        return value

    return convert


def _timeout(text: str) -> float:
    value = float(text)
    if not 3 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 3 to 86400: heartbeats are 1 s apart")
    return value


def _noise(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value


def _level(text: str) -> str:
    if text not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(LOG_LEVELS)}")
    return text


class Setting(NamedTuple):
    """An option that sets one of Horovod's variables."""

    flag: str
    #: Converts its value; None for an option without one, which ``--no-...`` turns off.
    type: Callable[[str], Any] | None
    variable: str
    #: Section and key of the file of ``--config-file``.
    section: str
    key: str
    help: str
    #: Whether ``unidist.hvd`` reads the variable, too.
    drop_in: bool = False

    @property
    def name(self) -> str:
        """The attribute of the parsed options."""
        return self.flag.lstrip("-").replace("-", "_")


_whole, _real = _from_0(int), _from_0(float)
SETTINGS = (
    Setting(
        "--fusion-threshold-mb", _whole, "HOROVOD_FUSION_THRESHOLD", "params", "fusion_threshold_mb",
        "MiB of tensors that one allreduce takes together", drop_in=True,
    ),
    Setting(
        "--cycle-time-ms", _real, "HOROVOD_CYCLE_TIME", "params", "cycle_time_ms",
        "milliseconds between the messages of a rank to the coordinator", drop_in=True,
    ),
    Setting("--cache-capacity", _whole, "HOROVOD_CACHE_CAPACITY", "params", "cache_capacity", "names in the cache"),
    Setting(
        "--hierarchical-allreduce", None, "HOROVOD_HIERARCHICAL_ALLREDUCE", "params", "hierarchical_allreduce",
        "allreduce within hosts first",
    ),
    Setting(
        "--hierarchical-allgather", None, "HOROVOD_HIERARCHICAL_ALLGATHER", "params", "hierarchical_allgather",
        "allgather within hosts first",
    ),
    Setting(
        "--torus-allreduce", None, "HOROVOD_TORUS_ALLREDUCE", "params", "torus_allreduce", "allreduce in a 2D torus"
    ),
    Setting("--autotune", None, "HOROVOD_AUTOTUNE", "autotune", "enabled", "let Horovod tune its parameters"),
    Setting("--autotune-log-file", str, "HOROVOD_AUTOTUNE_LOG", "autotune", "log_file", "file of the trials"),
    Setting(
        "--autotune-warmup-samples", _whole, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune", "warmup_samples",
        "samples that do not count",
    ),
    Setting(
        "--autotune-steps-per-sample", _whole, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune", "steps_per_sample",
        "steps of a sample",
    ),
    Setting(
        "--autotune-bayes-opt-max-samples", _whole, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune",
        "bayes_opt_max_samples", "samples of an optimization",
    ),
    Setting(
        "--autotune-gaussian-process-noise", _noise, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune",
        "gaussian_process_noise", "regularization, from 0 to 1",
    ),
    Setting(
        "--timeline-filename", str, "HOROVOD_TIMELINE", "timeline", "filename", "file of the operations' timeline",
        drop_in=True,
    ),
    Setting(
        "--timeline-mark-cycles", None, "HOROVOD_TIMELINE_MARK_CYCLES", "timeline", "mark_cycles",
        "mark cycles in the timeline", drop_in=True,
    ),
    Setting(
        "--stall-check-warning-time-seconds", _whole, "HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_check",
        "warning_time_seconds", "seconds until a warning names the ranks that others wait for", drop_in=True,
    ),
    Setting(
        "--stall-check-shutdown-time-seconds", _whole, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_check",
        "shutdown_time_seconds", "seconds until all ranks shut down then; 0: never", drop_in=True,
    ),
    Setting(
        "--mpi-threads-disable", None, "HOROVOD_MPI_THREADS_DISABLE", "library_options", "mpi_threads_disable",
        "no threads in MPI",
    ),
    Setting(
        "--num-nccl-streams", _whole, "HOROVOD_NUM_NCCL_STREAMS", "library_options", "num_nccl_streams", "NCCL streams"
    ),
    Setting(
        "--thread-affinity", _whole, "HOROVOD_THREAD_AFFINITY", "library_options", "thread_affinity",
        "core of Horovod's thread",
    ),
    Setting(
        "--gloo-timeout-seconds", _whole, "HOROVOD_GLOO_TIMEOUT_SECONDS", "library_options", "gloo_timeout_seconds",
        "seconds that ranks wait for each other at the start", drop_in=True,
    ),
    Setting("--log-level", _level, "HOROVOD_LOG_LEVEL", "logging", "level", "least level that Horovod logs"),
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.endswith(" -m"):
            message += ". To start a module, write python -m MODULE."
        raise LaunchError(f"{message}\n{self.format_usage()}See: {self.prog} --help")


class _Interfaces(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        namespace.nics = {*(namespace.nics or ()), *values.split(",")}


def parser(prog: str = "unidist run") -> argparse.ArgumentParser:
    """Return Horovod's options, which argparse abbreviates as horovodrun does."""
    result = _Parser(
        prog=prog,
        usage=f"{prog} -np N [-H HOST:SLOTS,...] [options] COMMAND [ARGUMENT ...]",
        description="Start a command in N processes on this and other hosts, as horovodrun does, without Horovod.",
    )
    add = result.add_argument
    add("-np", "--num-proc", type=int, help="number of ranks; default: all slots of the hosts")
    add("-v", "--version", action="store_true", help="print the version")
    add("-cb", "--check-build", action="store_true", help="print which backends can be used here")
    add("--hvd", action="store_true", help="give scripts that import horovod the drop-in, unidist.hvd")
    add("--dry-run", action="store_true", help="print what would be started on which host")
    add("--start-timeout", type=_from_0(int), help="seconds for all hosts to answer (default: 30)")
    add(
        "--grace-period", type=_from_0(float), default=30.0, metavar="SECONDS",
        help="seconds that the ranks have to end after SIGTERM or Ctrl-C (default: 30)",
    )  # fmt: skip
    add(
        "--heartbeat-timeout", type=_timeout, metavar="SECONDS",
        help="seconds without a message of a host after which it is lost (default: 30; of an elastic job, 5)",
    )  # fmt: skip
    add("--network-interfaces", action=_Interfaces, dest="nics", help="network interfaces to use, by commas")
    add("--network-interface", action=_Interfaces, dest="nics", help="the same, one at a time")
    add("--output-filename", metavar="DIR", help="also write each rank's output to DIR/rank.RANK/stdout and stderr")
    add("--verbose", action="store_true", help="print what is started where")
    add("--config-file", help="YAML file of options, as horovodrun reads it")
    add("--disable-cache", action="store_true", help="accepted: nothing is cached")
    add("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    group = result.add_argument_group("hosts").add_mutually_exclusive_group()
    group.add_argument("-H", "--hosts", help="hosts and their slots: a:4,b:4; default: the allocation, or this host")
    group.add_argument("-hostfile", "--hostfile", help="file with a host in each line: a slots=4")
    group.add_argument("--host-discovery-script", help="prints the hosts, a:4 in each line; makes the job elastic")
    ssh = result.add_argument_group("ssh")
    ssh.add_argument(
        "--rsh", metavar="COMMAND", help="starts a shell command on a host: COMMAND HOST 'LINE' (default: ssh)"
    )
    ssh.add_argument("-p", "--ssh-port", type=int, help="port of the hosts' ssh servers")
    ssh.add_argument("-i", "--ssh-identity-file", help="private key")
    controller = result.add_argument_group("controller").add_mutually_exclusive_group()
    controller.add_argument("--gloo", action="store_true", dest="use_gloo", help="accepted: the default")
    controller.add_argument("--mpi", action="store_true", dest="use_mpi", help="start the ranks by Open MPI's mpirun")
    controller.add_argument("--jsrun", action="store_true", dest="use_jsrun", help=argparse.SUPPRESS)
    mpi = result.add_argument_group("with --mpi")
    mpi.add_argument("--mpi-args", help="more arguments of mpirun, in one string")
    mpi.add_argument("--binding-args", help="mpirun's binding; default: --bind-to none --map-by slot")
    mpi.add_argument("--tcp", action="store_true", dest="tcp_flag", help="no InfiniBand (NCCL_IB_DISABLE=1)")
    elastic = result.add_argument_group("elastic training")
    elastic.add_argument(
        "--min-np", "--min-num-proc", type=int, dest="min_num_proc",
        help="training goes on with so many workers; makes the job elastic; default: -np",
    )  # fmt: skip
    elastic.add_argument(
        "--max-np",
        "--max-num-proc",
        type=int,
        dest="max_num_proc",
        help="no more workers than this; default: all slots",
    )
    elastic.add_argument(
        "--slots-per-host", type=int, dest="slots", help="slots of hosts that the script prints without (default: 1)"
    )
    elastic.add_argument(
        "--elastic-timeout", type=int,
        help="seconds to wait for the workers that are needed (default: HOROVOD_ELASTIC_TIMEOUT, else 600)",
    )  # fmt: skip
    elastic.add_argument("--reset-limit", type=int, help="how often the workers may change (default: any number)")
    elastic.add_argument(
        "--blacklist-cooldown-range", type=int, nargs=2, dest="cooldown_range", metavar=("MIN", "MAX"),
        help="seconds that a host stays blacklisted, doubled each time (default: for ever)",
    )  # fmt: skip
    tuning = result.add_argument_group("options of Horovod and unidist.hvd, which become HOROVOD_* variables")
    for setting in SETTINGS:
        if setting.type is None:
            tuning.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=setting.help)
        else:
            tuning.add_argument(setting.flag, type=setting.type, help=setting.help)
    stall = tuning.add_mutually_exclusive_group()
    stall.add_argument("--stall-check", action="store_false", dest="no_stall_check", default=None, help="the default")
    stall.add_argument(
        "--no-stall-check", action="store_true", dest="no_stall_check", default=None,
        help="no warnings of ranks that others wait for",
    )  # fmt: skip
    stamps = result.add_argument_group("logging").add_mutually_exclusive_group()
    stamps.add_argument("--log-with-timestamp", action="store_true", default=None, help="Horovod logs with the time")
    stamps.add_argument(
        "--log-without-timestamp", action="store_false", dest="log_with_timestamp", default=None,
        help="Horovod logs without it",
    )  # fmt: skip
    stamps.add_argument("--log-hide-timestamp", action="store_false", dest="log_with_timestamp", help=argparse.SUPPRESS)
    stamps.add_argument(
        "--no-log-hide-timestamp", action="store_true", dest="log_with_timestamp", help=argparse.SUPPRESS
    )
    stamps.add_argument(
        "-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true", help="put the time before each line"
    )
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return Horovod's options of a command line, with those of its ``--config-file``.

    Raises:
        LaunchError: an option is unknown, has no value or a wrong one, or belongs to others that are missing.
    """
    options = parser().parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.config_file:
        _read_config(options)
    given = [name for name in _ELASTIC if getattr(options, name) is not None]
    if given and not is_elastic(options):
        raise LaunchError(
            f"--{given[0].replace('_', '-')} is an option of elastic training, which has --min-np or "
            "--host-discovery-script, too."
        )
    if is_elastic(options) and options.use_mpi:
        raise LaunchError("--mpi is not for elastic training: MPI ends a job when a process of it dies. Leave it out.")
    if options.use_jsrun:
        raise LaunchError("--jsrun is not supported: leave it out, or start the script by jsrun itself.")
    return options


def is_elastic(options: argparse.Namespace) -> bool:
    """Return whether the number of workers may change."""
    return options.host_discovery_script is not None or options.min_num_proc is not None


def elastic_limits(options: argparse.Namespace, env: Mapping[str, str]) -> Limits:
    """Return the limits of an elastic job.

    Raises:
        LaunchError: they contradict each other, or have no sense.
    """
    least = options.num_proc if options.min_num_proc is None else options.min_num_proc
    if least is None or least < 1:
        raise LaunchError(
            f"--min-np {least} is not a number of workers from 1 up: the least with which training goes on."
        )
    at_start = options.num_proc or least
    if options.max_num_proc is not None and options.max_num_proc < max(least, at_start):
        raise LaunchError(f"--max-np {options.max_num_proc} is below --min-np or -np, {max(least, at_start)}.")
    cooldown = options.cooldown_range
    if cooldown is not None and not 1 <= cooldown[0] <= cooldown[1] <= 3600:
        raise LaunchError(f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]}: from 1 to 3600 seconds, MIN first.")
    if options.reset_limit is not None and options.reset_limit < 0:
        raise LaunchError(f"--reset-limit {options.reset_limit} is not a number from 0 up.")
    timeout = options.elastic_timeout or settings.horovod_number(env, "HOROVOD_ELASTIC_TIMEOUT", 0) or 600
    return Limits(
        min_np=least,
        max_np=options.max_num_proc,
        num_proc=at_start,
        reset_limit=options.reset_limit,
        timeout=timeout,
        grace=settings.grace(env),
        cooldown=None if cooldown is None else (cooldown[0], cooldown[1]),
    )


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the options set, as horovodrun sets them."""
    found: dict[str, str] = {}
    for setting in SETTINGS:
        value = getattr(options, setting.name)
        needs = {"autotune": options.autotune, "timeline": options.timeline_filename}.get(setting.section, True)
        if value is None or not needs:
            continue
        if setting.variable == "HOROVOD_FUSION_THRESHOLD":
            value *= 2**20
        found[setting.variable] = str(int(value) if isinstance(value, bool) else value)
    flags = {"HOROVOD_STALL_CHECK_DISABLE": options.no_stall_check}
    if options.log_with_timestamp is not None:
        flags["HOROVOD_LOG_HIDE_TIME"] = not options.log_with_timestamp
    found.update({name: str(int(value)) for name, value in flags.items() if value is not None})
    if options.tcp_flag:
        found["NCCL_IB_DISABLE"] = "1"
    return found


def without_effect(options: argparse.Namespace) -> list[str]:
    """Return the options that were given and tune Horovod itself alone."""
    given = [setting for setting in SETTINGS if getattr(options, setting.name) is not None]
    return [setting.flag for setting in given if not setting.drop_in]


# ---------------------------------------------------------------------------------------------
def _read_config(options: argparse.Namespace) -> None:
    """Options of a YAML file, where the command line has none."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise LaunchError("--config-file needs PyYAML: pip install pyyaml") from error
    path = options.config_file
    try:
        with open(path) as file:
            config = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"--config-file {path} cannot be read: {error}") from error
    if not isinstance(config, Mapping) or not all(isinstance(config.get(s.section, {}), Mapping) for s in SETTINGS):
        raise LaunchError(f"--config-file {path} is not a file of sections such as 'params:', as horovodrun reads it.")
    controller = str(config.get("controller") or "gloo").lower()
    if controller not in ("gloo", "mpi"):
        raise LaunchError(f"--config-file {path}: controller {controller!r} is neither gloo nor mpi.")
    if "controller" in config and not options.use_gloo and not options.use_mpi:
        options.use_gloo, options.use_mpi = controller == "gloo", controller == "mpi"
    for setting in SETTINGS:
        value = config.get(setting.section, {}).get(setting.key)
        if value is None or getattr(options, setting.name) is not None:
            continue
        try:
            setattr(options, setting.name, bool(value) if setting.type is None else setting.type(str(value)))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise LaunchError(f"--config-file {path}: {setting.section}: {setting.key}: {value!r}: {error}") from error
    if options.no_stall_check is None and "enabled" in config.get("stall_check", {}):
        options.no_stall_check = not config["stall_check"]["enabled"]
    if options.log_with_timestamp is None and "with_timestamp" in config.get("logging", {}):
        options.log_with_timestamp = bool(config["logging"]["with_timestamp"])
