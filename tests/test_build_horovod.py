"""``unidist build-horovod`` without a compile: that is done for real by ``make test`` before the suite runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import click
import torch
from click.testing import CliRunner, Result

import unidist
from unidist.cli import build_horovod, main, toolchain
from unidist.cli.toolchain import Target

pytestmark = pytest.mark.unit
TARGET = Target("2.13.0+cpu", "openmpi4.1.4", cxx="20")
WHEEL = f"horovod-{build_horovod.VERSION}-cp311-cp311-linux_x86_64.whl"
# Plays pip: "downloads" a source, then "builds" a wheel that holds the CMakeLists.txt it was given.
PIP = """
import io, os, sys, tarfile, time, zipfile
name = "horovod-0.28.1"
TEXTS = {
    "setup.py": b"'RelWithDebInfo'",
    "cmake/Modules/FindPytorch.cmake": b"(torch.version.cuda is not None)",
    "horovod/common/gloo/gloo_context.cc": b"assert(global_context.IsEnabled());",
}
if sys.argv[1] == "download":
    with tarfile.open(name + ".tar.gz", "w:gz") as tar:
        for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt", *TEXTS):
            entry = tarfile.TarInfo(f"{name}/{path}")
            text = TEXTS.get(path, b"set(CMAKE_CXX_STANDARD 14)")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))
else:
    print("[ 50%] Building CXX object gloo/common.cc.o", flush=True)
    if "FAIL" in os.environ:
        sys.exit("common.cc:1: error: no member named 'gone'")
    if "HANG" in os.environ:
        open(os.environ["HANG"], "w").write(str(os.getpid()))
        time.sleep(600)
    os.mkdir("wheel")
    with zipfile.ZipFile(f"wheel/{name}-cp311-cp311-linux_x86_64.whl", "w") as wheel:
        for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt", *TEXTS):
            wheel.write(sys.argv[-1] + "/" + path, path)
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    script = tmp_path / "pip.py"
    script.write_text(PIP)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(build_horovod, "PIP", [sys.executable, str(script)])
    return build_horovod.PIP


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with name=shell script: the PATH then has these programs and no other."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    for name in ("CXX", "CC", "HOROVOD_CMAKE"):
        monkeypatch.delenv(name, raising=False)

    def add(**scripts: str) -> None:
        for name, script in scripts.items():
            (directory / name).write_text(f"#!/bin/sh\n{script}\n")
            (directory / name).chmod(0o755)

    return add


@pytest.fixture
def has_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "missing_modules", lambda: iter(()))


def call(*args: str) -> Result:
    return CliRunner().invoke(main, ["build-horovod", *args])


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True, text=True)


def test_help_imports_no_command_and_no_torch() -> None:
    for option, shown in (("--help", "build-horovod"), ("--version", f"unidist {unidist.__version__}")):
        done = python(
            f"import unidist.cli as c; c.main(['{option}'], prog_name='unidist', standalone_mode=False); "
            "assert not {'torch', 'rich.progress', 'unidist.cli.build_horovod'} & set(sys.modules)"
        )
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout
        as_module = subprocess.run([sys.executable, "-m", "unidist", option], capture_output=True, text=True)
        assert as_module.stdout == done.stdout


@pytest.mark.parametrize("name", ["click", "rich"])
def test_without_click_or_rich_the_extra_is_named(name: str) -> None:
    done = python(f"sys.modules[{name!r}] = None; import unidist.cli")
    assert done.returncode == 1
    assert done.stderr == f"unidist: {name} is not installed: pip install 'unidist-torch[cli]'\n"


def test_unknown_command() -> None:
    assert "No such command" in CliRunner().invoke(main, ["build-horovodd"]).output


@pytest.mark.usefixtures("has_modules")
def test_all_that_is_missing_is_named_at_once(tools: Callable[..., None], tmp_path: Path) -> None:
    result = call("--cache-dir", str(tmp_path / "cache"))
    assert result.exit_code == 1
    standard = toolchain.cxx_standard(Path(torch.__file__).parent)
    for words in (f"does not compile C++{standard}", "does not compile C:", "cmake 3.13", "make is not found"):
        assert words in result.output
    for package in ("g++", "gcc", "cmake", "make"):
        assert f"apt-get install {package}" in result.output or sys.platform == "darwin"
    assert not (tmp_path / "cache").exists()


def test_missing_modules_come_with_the_missing_tools(
    tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"torch", "pip", "cffi", "yaml"}
    find = toolchain.is_installed
    monkeypatch.setattr(toolchain, "is_installed", lambda name: name not in gone and find(name))
    output = call().output
    assert "pip install torch" in output
    assert "python -m ensurepip" in output
    assert "cffi, yaml are missing: pip install 'unidist-torch[horovod]'" in output
    assert "cmake" in output


def test_setuptools_can_be_imported_after_the_search_for_modules() -> None:
    """A CUDA build of PyTorch needs it to say where CUDA is."""
    done = python("from unidist.cli import toolchain; list(toolchain.missing_modules()); import setuptools")
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_does_not_compile_is_missing(
    tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tools(broken="exit 1")
    monkeypatch.setenv("CXX", "broken -O2")
    assert any("broken -O2 does not compile C++17" in line for line in toolchain.missing_tools(""))


def test_an_old_cmake_is_named_with_its_version(tools: Callable[..., None]) -> None:
    tools(cmake="echo cmake version 3.10.2")
    assert any("version 3.10 found" in line for line in toolchain.missing_tools(""))


def test_mpicxx_without_headers(tools: Callable[..., None]) -> None:
    tools(mpicxx='test "$1" = --showme:version && echo "mpicxx: Open MPI 4.1.4 (Language: C++)"')
    assert toolchain.find_mpi() == "openmpi4.1.4"
    assert any("headers are missing" in line for line in toolchain.missing_tools("openmpi4.1.4"))
    assert not any("headers are missing" in line for line in toolchain.missing_tools(""))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpicxx: Open MPI 5.0.3rc1 (Language: C++)", "openmpi5.0.3rc1"),
        ("mpicxx for MPICH version 4.0.2", "mpich4.0.2"),
        ("mpicxx for MVAPICH2 version 2.3.7", "mvapich2.3.7"),
        ("mpigxx for the Intel(R) MPI Library 2021.9 for Linux*", "intelmpi2021.9"),
        ("g++ (Debian 12.2.0) 12.2.0", "mpi"),
    ],
)
def test_mpi_is_told_by_name_and_version(tools: Callable[..., None], text: str, name: str) -> None:
    tools(mpicxx=f'echo "{text}"')
    assert toolchain.find_mpi() == name


def test_no_mpicxx_means_gloo_alone_and_a_hint(tools: Callable[..., None]) -> None:
    assert toolchain.find_mpi() == ""
    assert "with Gloo only" in "".join(build_horovod.notes(Target("2.13.0")))


def test_the_standard_is_the_one_that_torch_asks_for(tmp_path: Path) -> None:
    header = tmp_path / "include/torch/csrc/api/include/torch/all.h"
    assert toolchain.cxx_standard(tmp_path) == "17"
    header.parent.mkdir(parents=True)
    header.write_text(
        "#if __cplusplus < 202002L\n#error C++20 or later compatible compiler is required to use PyTorch.\n"
    )
    assert toolchain.cxx_standard(tmp_path) == "20"


def test_nvcc_alone_is_no_cuda_toolkit(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert not toolchain.has_toolkit(tmp_path)
    (tmp_path / "targets/sbsa-linux/include").mkdir(parents=True)
    (tmp_path / "targets/sbsa-linux/include/cuda_runtime.h").touch()
    assert toolchain.has_toolkit(tmp_path)
    assert "For CPU tensors only" in "".join(build_horovod.notes(Target("2.15.0+cu132", "openmpi4.1.4")))


def test_nccl_header_is_looked_for_where_horovod_looks(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include/nccl.h").touch()
    assert toolchain.has_nccl({}, str(tmp_path))
    assert toolchain.has_nccl({"HOROVOD_NCCL_HOME": str(tmp_path)}, "/none")
    assert toolchain.has_nccl({"HOROVOD_NCCL_INCLUDE": str(tmp_path / "include")}, "/none")


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        (Target("2.13.0+cpu"), "gloo"),
        (TARGET, "gloo-openmpi4.1.4"),
        (Target("2.13.0+cu130", "", "13.0", True), "gloo-nccl13.0"),
        (Target("2.13.0+cu130", "mpich4.0.2", "13.0"), "gloo-mpich4.0.2-cuda13.0"),
    ],
)
def test_the_key_says_what_is_in_the_wheel(target: Target, flags: str) -> None:
    python, system = f"cp{sys.version_info.major}{sys.version_info.minor}", os.uname().sysname.lower()
    assert target.key().startswith(f"torch{target.torch}-{python}")
    assert target.key().endswith(f"-{flags}-r2")
    assert system in target.key() or system == "darwin"


def test_the_environment_of_the_build() -> None:
    shell = {"HOROVOD_WITHOUT_GLOO": "1", "MAKEFLAGS": "--jobserver", "HOROVOD_NCCL_HOME": "/nccl", "CXX": "clang++"}
    env = TARGET.env(shell, 3)
    assert "HOROVOD_WITHOUT_GLOO" not in env
    assert (env["HOROVOD_WITH_MPI"], env["MAKEFLAGS"], env["CXX"]) == ("1", "-j3", "clang++")
    assert env["HOROVOD_NCCL_HOME"] == "/nccl"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    env = Target("2.13.0", cuda="13.0", nccl=True).env(shell, 3)
    assert (env["HOROVOD_WITHOUT_MPI"], env["HOROVOD_GPU_OPERATIONS"]) == ("1", "NCCL")


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod.platform, "system", lambda: "Windows")
    result = call()
    assert (result.exit_code, result.output) == (1, "Error: Horovod is for Linux and macOS, not for Windows.\n")


@pytest.mark.usefixtures("has_modules")
def test_a_wheel_in_the_cache_needs_no_tools(tools: Callable[..., None], tmp_path: Path) -> None:
    wheel = cached_wheel(tmp_path)
    result = call("--cache-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{wheel}\n"
    assert "Found in the cache" in result.stderr
    assert call("--cache-dir", str(tmp_path), "--force").exit_code == 1  # builds, which needs the tools


def cached_wheel(cache: Path) -> Path:
    """What an earlier build for this Python and torch left in the cache."""
    directory = cache / "horovod" / toolchain.find_target("").key()
    build_horovod.make_private(cache, directory)
    (cache / WHEEL).write_bytes(b"a wheel")
    return build_horovod.publish(cache / WHEEL, directory)


@pytest.mark.usefixtures("has_modules")
def test_a_wheel_that_is_not_the_one_that_was_built_is_not_used(tools: Callable[..., None], tmp_path: Path) -> None:
    wheel = cached_wheel(tmp_path)
    wheel.write_bytes(b"another")
    result = call("--cache-dir", str(tmp_path))
    assert result.exit_code == 1 and "cmake 3.13" in result.output  # builds, which needs the tools
    assert f"{wheel} has no sha256 that {wheel.name}.sha256 records" in result.output


@pytest.mark.usefixtures("has_modules")
@pytest.mark.parametrize("level", ["", "horovod"])
def test_a_cache_that_others_can_write_is_refused(tools: Callable[..., None], tmp_path: Path, level: str) -> None:
    cached_wheel(tmp_path)
    (tmp_path / level).chmod(0o775)
    result = call("--cache-dir", str(tmp_path))
    assert result.exit_code == 1 and f"{tmp_path / level} can be written by others (mode 775)" in result.output
    assert "UNIDIST_CACHE" in result.output
    (tmp_path / level).chmod(0o755)
    assert call("--cache-dir", str(tmp_path)).exit_code == 0


@pytest.mark.usefixtures("has_modules")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_a_cache_of_another_user_is_refused(tools: Callable[..., None], tmp_path: Path) -> None:
    os.chown(cached_wheel(tmp_path).parent, 12345, -1)
    result = call("--cache-dir", str(tmp_path))
    assert result.exit_code == 1 and "belongs to another user (uid 12345)" in result.output


@pytest.mark.usefixtures("pip")
def test_the_build_raises_the_standard_and_publishes_one_wheel(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = build_horovod.build(TARGET, tmp_path / "cache", 1)
    with zipfile.ZipFile(wheel) as content:
        assert {content.read(name) for name in content.namelist()} == {
            b"set(CMAKE_CXX_STANDARD 20)",
            b"False",
            b"'Release'",
            b"assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;",
        }
    assert sorted(path.name for path in wheel.parent.iterdir()) == ["build.log", WHEEL, f"{WHEEL}.sha256"]
    assert " 50 % common.cc\n" in capfd.readouterr().err


@pytest.mark.usefixtures("pip")
def test_a_failed_build_says_why_and_where_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(click.ClickException) as caught:
        build_horovod.build(TARGET, tmp_path / "cache", 1)
    (log,) = (tmp_path / "cache").iterdir()
    assert "error: no member named 'gone'" in caught.value.message
    assert caught.value.message.endswith(f"the whole log: {log}")
    assert "[ 50%]" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_no_file(pip: list[str], tmp_path: Path, number: int) -> None:
    started, cache = tmp_path / "started", tmp_path / "cache"
    os.mkfifo(started)
    env = os.environ | {"HANG": str(started)}
    with subprocess.Popen(driver(pip, cache), env=env, stdout=-1, stderr=-1, text=True) as process:
        child = int(started.read_text())  # waits until the build is in the middle
        process.send_signal(number)
        process.communicate(timeout=240)
    assert process.returncode == 1
    assert list(cache.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_two_builds_at_once(pip: list[str], tmp_path: Path) -> None:
    both = [subprocess.Popen(driver(pip, tmp_path / "cache"), stdout=-1, stderr=-1, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["build.log", WHEEL, f"{WHEEL}.sha256"]


def driver(pip: list[str], cache: Path) -> list[str]:
    """A Python process that builds with this pip."""
    lines = [
        "import signal, sys, pathlib, click, unidist.cli.build_horovod as b",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a shell's background jobs ignore it
        f"b.PIP = {pip!r}",
        f"click.command()(lambda: b.build(b.Target('2.13.0'), pathlib.Path({str(cache)!r}), 1) and None)()",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def make_wheel(directory: Path, digest: str) -> Path:
    with zipfile.ZipFile(directory / WHEEL, "w") as wheel:
        record = f"horovod/torch/mpi_lib_v2.so,sha256={digest},9\nhorovod/__init__.py,sha256=x,1\n"
        wheel.writestr(f"horovod-{build_horovod.VERSION}.dist-info/RECORD", record)
    return directory / WHEEL


def test_the_same_wheel_is_known_by_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = SimpleNamespace(read_text=lambda name: "horovod/torch/mpi_lib_v2.so,sha256=abc,9\n")
    monkeypatch.setattr(build_horovod.metadata, "distribution", lambda name: installed)
    assert build_horovod.is_installed(make_wheel(tmp_path, "abc"))
    assert not build_horovod.is_installed(make_wheel(tmp_path, "def"))


def test_installed_and_working_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "is_installed", lambda wheel: True)
    monkeypatch.setattr(build_horovod, "controllers", lambda: "gloo")
    monkeypatch.setattr(build_horovod, "PIP", ["/none"])
    assert build_horovod.install(tmp_path / WHEEL) == "gloo"


def test_a_horovod_that_does_not_import_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_horovod, "CONTROLLERS_CODE", "raise ImportError('no libmpi')")
    with pytest.raises(click.ClickException, match="does not import: ImportError: no libmpi"):
        build_horovod.controllers()


def test_the_lines_that_are_shown() -> None:
    step = build_horovod.cmake_step
    assert step("  [ 45%] Building CXX object a/CMakeFiles/b.dir/__/common/common.cc.o") == (45, "common.cc")
    assert step("  [100%] Linking CXX shared library /x/mpi_lib_v2.so") == (100, "mpi_lib_v2.so")
    assert step("  [100%] Built target pytorch") is None
    lines = [f"line {number}" for number in range(50)]
    assert build_horovod.relevant(lines) == lines[30:]
    lines[7] = "x.cc:3: error: gone"
    assert build_horovod.relevant(lines) == lines[7:27]
