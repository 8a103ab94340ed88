"""``unidist build-horovod``: Horovod from its source, for the torch that is installed here."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePath
from subprocess import PIPE, STDOUT
from typing import TextIO

import click

from unidist import settings
from unidist.cli.toolchain import Target, find_mpi, find_target, last_line, missing_modules, missing_tools, remedy

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONTROLLERS_CODE = """
import horovod.torch as hvd
built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
print(", ".join(name for name in built if built[name]))
"""


def stop_if(problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise click.ClickException("\n  ".join([f"Horovod {VERSION} cannot be built here:", *lines]))


def notes(target: Target) -> Iterator[str]:
    """Yield what the wheel will not have, though nothing is wrong."""
    if not shutil.which("mpicxx"):
        install = remedy("libopenmpi-dev openmpi-bin", "brew install open-mpi")
        yield f"Without MPI, with Gloo only; for MPI, have mpicxx on the PATH ({install}) and build again."
    if "+cu" in target.torch and not target.cuda:
        yield (
            "For CPU tensors only: CUDA's nvcc and headers are not found; install the CUDA toolkit or set CUDA_HOME, "
            "and build again."
        )
    if target.cuda and not target.nccl:
        yield "Without NCCL: nccl.h is not found; install NCCL's headers or set HOROVOD_NCCL_HOME, and build again."


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that is called with each line of the build, and shows its progress."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield print_tens()
        return
    with Progress(console=console) as bar:
        task = bar.add_task("fetch, configure", total=100)

        def show(line: str) -> None:
            if step := cmake_step(line):
                bar.update(task, completed=step[0], description=step[1])

        yield show


def print_tens() -> Callable[[str], None]:
    """Return a function for logs, which prints a line for every ten percent."""
    shown = -10

    def show(line: str) -> None:
        nonlocal shown
        step = cmake_step(line)
        if step and step[0] >= shown + 10:
            shown = step[0] // 10 * 10
            click.echo(f"{step[0]:3} % {step[1]}", err=True)

    return show


def cmake_step(line: str) -> tuple[int, str] | None:
    """Return percent and file of a line such as ``[ 45%] Building CXX object .../common.cc.o``."""
    found = re.search(r"\[ *(\d+)%\] (?:Building|Linking) .* (\S+)", line)
    return (int(found[1]), PurePath(found[2]).name.removesuffix(".o")) if found else None


def run_step(command: list[str], cwd: Path, env: dict[str, str], log: TextIO, show: Callable[[str], None]) -> None:
    """Run the command with its output in the log. When interrupted, end it and all that it started."""
    lines: list[str] = []
    # In a session of its own, one signal reaches every compiler.
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=PIPE,
        stderr=STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                log.write(line)
                lines.append(line)
                show(line)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()  # returns when the last compiler has ended
            raise
    if process.returncode:
        raise click.ClickException("\n".join([*relevant(lines), f"The build failed; the whole log: {log.name}"]))


def relevant(lines: Sequence[str], count: int = 20) -> list[str]:
    """Return the lines that say why: from the first error on, else the last ones."""
    errors = (at for at, line in enumerate(lines) if re.search(r"\berror: |CMake Error|No space left", line))
    start = next(errors, max(0, len(lines) - count))
    return [line.rstrip()[:200] for line in lines[start : start + count]]


def build(target: Target, directory: Path, jobs: int) -> Path:
    """Build the wheel in a temporary directory, then move it into the cache's."""
    log = directory / f"build-{platform.node()}-{os.getpid()}.log"  # a name of its own: another build may run
    click.echo(f"Building Horovod {VERSION} for {target.key()}; this takes minutes. Log: {log}", err=True)
    on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as with Ctrl-C, nothing is left behind
    try:
        with (
            tempfile.TemporaryDirectory(prefix="unidist-") as work,
            log.open("w", encoding="utf-8") as out,
            progress() as show,
        ):
            built = compile_wheel(Path(work), target, target.env(os.environ, jobs) | {"TMPDIR": work}, out, show)
            wheel = publish(built, directory)
    except KeyboardInterrupt:
        log.unlink()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_term)
    log.replace(directory / "build.log")
    return wheel


def compile_wheel(work: Path, target: Target, env: dict[str, str], log: TextIO, show: Callable[[str], None]) -> Path:
    pin = work / "pin.txt"
    pin.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    from_source = ["--no-deps", "--no-build-isolation"]
    run_step([*PIP, "download", *from_source, "--no-binary=:all:", f"-r{pin}"], work, env, log, show)
    source = unpack(work / f"horovod-{VERSION}.tar.gz", target)
    run_step([*PIP, "wheel", *from_source, "-v", "--wheel-dir=wheel", str(source)], work, env, log, show)
    return next(work.glob("wheel/*.whl"))


def unpack(archive: Path, target: Target) -> Path:
    """Unpack the source beside the archive, and correct it for this PyTorch."""
    with tarfile.open(archive) as tar:
        # Pythons that know the filter warn without it; 3.10.0 does not know it.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(archive.parent)
    source = archive.parent / archive.name.removesuffix(".tar.gz")
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        replace(source / path, "set(CMAKE_CXX_STANDARD 14)", f"set(CMAKE_CXX_STANDARD {target.cxx})")
    # Without debugging symbols: they take a fifth of the build's time and nine tenths of the wheel.
    replace(source / "setup.py", "'RelWithDebInfo'", "'Release'")
    if not target.cuda:  # a PyTorch with CUDA would have Horovod look for the CUDA toolkit
        replace(source / "cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "False")
    # Its process sets listen at the address of this host's name, whatever HOROVOD_GLOO_IFACE says.
    begin = "assert(global_context.IsEnabled());"
    context = source / "horovod/common/gloo/gloo_context.cc"
    replace(context, begin, f"{begin}\n  gloo_iface_ = global_context.gloo_iface_;")
    return source


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def publish(wheel: Path, directory: Path) -> Path:
    """Move the wheel into the directory in one step, so that nobody ever reads a part of it."""
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as staging:
        new = Path(shutil.copy(wheel, staging))
        # Written before the wheel, and beside those of earlier builds: two builds may run at once.
        with record(directory / wheel.name).open("a") as digests:
            digests.write(f"{sha256(new)}\n")
        return new.replace(directory / wheel.name)


def cached(directory: Path) -> Path | None:
    """Return the wheel in the directory, if a build put it there."""
    wheel = next(directory.glob(f"horovod-{VERSION}-*.whl"), None)
    if wheel is None:
        return None
    digests = record(wheel).read_text().split() if record(wheel).exists() else []
    if sha256(wheel) in digests:
        return wheel
    click.echo(f"{wheel} has no sha256 that {record(wheel).name} records: building it again.", err=True)
    return None


def record(wheel: Path) -> Path:
    """Return the file with the sha256 of every build of this wheel."""
    return wheel.with_name(f"{wheel.name}.sha256")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_private(cache: Path, directory: Path) -> None:
    """Create the directories from ``cache`` down to ``directory``, and check that nobody else can put a wheel there.

    Raises:
        ClickException: a directory belongs to another user (other than root), or others can write to it.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    for each in reversed([directory, *(above for above in directory.parents if above.is_relative_to(cache))]):
        each.mkdir(mode=0o755, exist_ok=True)
        found = each.stat()
        if found.st_uid not in (0, os.getuid()):
            problem, fix = f"{each} belongs to another user (uid {found.st_uid})", ""
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            problem, fix = (
                f"{each} can be written by others (mode {stat.S_IMODE(found.st_mode):o})",
                f"chmod -R go-w {cache}, or ",
            )
        else:
            continue
        raise click.ClickException(
            f"{problem}, who could replace the wheels that are installed from there: {fix}choose another directory "
            "with --cache-dir or UNIDIST_CACHE."
        )


def install(wheel: Path) -> str:
    """Install the wheel unless it is installed and works; returns the controllers that it was built with."""
    if is_installed(wheel):
        with suppress(click.ClickException):
            return controllers()
    done = subprocess.run(
        [*PIP, "install", "--no-deps", "--force-reinstall", str(wheel)], stdout=PIPE, stderr=STDOUT, text=True
    )
    if done.returncode:
        raise click.ClickException("\n".join([*relevant(done.stdout.splitlines()), f"pip did not install {wheel}"]))
    return controllers()


def is_installed(wheel: Path) -> bool:
    """Return whether the compiled library of the installed Horovod is the wheel's."""
    with zipfile.ZipFile(wheel) as content, suppress(metadata.PackageNotFoundError):
        record = content.read(f"horovod-{VERSION}.dist-info/RECORD").decode()
        installed = (metadata.distribution("horovod").read_text("RECORD") or "").splitlines()
        return all(line in installed for line in record.splitlines() if "mpi_lib" in line)
    return False


def controllers() -> str:
    """Import Horovod in a new process and ask it what was built in."""
    # In another directory: this one may have one called `horovod`.
    done = subprocess.run([sys.executable, "-c", CONTROLLERS_CODE], capture_output=True, text=True, cwd=sys.prefix)
    if done.returncode:
        raise click.ClickException(
            f"Horovod is installed but does not import: {last_line(done)}; try again with --force."
        )
    return done.stdout.strip()


@click.command()
@click.option("--install", "wanted", is_flag=True, help="Install the wheel into this Python, and import it.")
@click.option("--force", is_flag=True, help="Build even if the cache has the wheel.")
@click.option("--jobs", type=click.IntRange(min=1), default=min(os.cpu_count() or 1, 16), help="Parallel compilers.")
@click.option("--without-mpi", is_flag=True, help="Gloo only, even if mpicxx is found.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), help=f"Where wheels are kept. [default: ${settings.CACHE}]"
)
def command(wanted: bool, force: bool, jobs: int, without_mpi: bool, cache_dir: Path | None) -> None:
    """Build Horovod for the installed PyTorch.

    Horovod 0.28.1, the last release, does not compile against PyTorch 2.1 or newer as it is. This fetches its source
    from PyPI, corrects it, and builds it with Gloo, with MPI where mpicxx is found, and with NCCL where PyTorch, nvcc
    and NCCL's headers allow it. The wheel is kept and found again; the last line printed is its path.
    """
    try:
        wheel = get_wheel(force, jobs, "" if without_mpi else find_mpi(), (cache_dir or settings.cache_dir(os.environ)))
        click.echo(f"Horovod {VERSION} is installed with: {install(wheel)}" if wanted else wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise click.ClickException(str(error)) from error


def get_wheel(force: bool, jobs: int, mpi: str, cache: Path) -> Path:
    """Return the wheel for what is installed here, from the cache or newly built."""
    if platform.system() not in ("Linux", "Darwin"):
        raise click.ClickException(f"Horovod is for Linux and macOS, not for {platform.system()}.")
    problems = list(missing_modules())
    if problems:
        stop_if([*problems, *missing_tools(mpi)])
    target = find_target(mpi)
    cache = cache.absolute()
    directory = cache / "horovod" / target.key()
    if directory.exists():
        make_private(cache, directory)
    wheel = None if force else cached(directory)
    if wheel:
        click.echo(f"Found in the cache: {target.key()}", err=True)
        return wheel
    stop_if(missing_tools(mpi, target.cxx))
    for note in notes(target):
        click.echo(note, err=True)
    make_private(cache, directory)
    return build(target, directory, jobs)
