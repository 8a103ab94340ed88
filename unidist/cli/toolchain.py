"""What a build of Horovod finds on this machine: the target, and what is missing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from unidist.launchers.process import output_of

# What Horovod imports to be built and to run; pip knows `yaml` as pyyaml.
MODULES = ("setuptools", "wheel", "cffi", "cloudpickle", "packaging", "psutil", "yaml")
MPI_NAMES = {"Open MPI": "openmpi", "MVAPICH2": "mvapich", "MPICH": "mpich", "Intel(R) MPI Library": "intelmpi"}
CXX17 = "#include <optional>\nint main() { if constexpr (true) return std::optional<int>(0).value(); }\n"
MPI_H = "#include <mpi.h>\nint main() { return MPI_Init(nullptr, nullptr); }\n"
# If they are set in a shell, or by a `make` around this, these make the build another than the key says.
BUILD_SWITCHES = re.compile("HOROVOD_(WITH|GPU|CPU|SKIP|DEBUG|LOCAL_VERSION|ALLOW)|CMAKE_GENERATOR|MAKE")


@dataclass(frozen=True)
class Target:
    """What a wheel is built for."""

    torch: str
    mpi: str = ""
    cuda: str = ""
    nccl: bool = False
    #: The standard that torch's headers need.
    cxx: str = "17"

    def key(self) -> str:
        """Name of the wheel's directory in the cache. It changes with the corrections of Horovod's source."""
        python = f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
        system = re.sub(r"[-.]", "_", sysconfig.get_platform())
        gpu = self.cuda and f"{'nccl' if self.nccl else 'cuda'}{self.cuda}"
        return "-".join(filter(None, (f"torch{self.torch}", python, system, "gloo", self.mpi, gpu, "r2")))

    def env(self, env: Mapping[str, str], jobs: int) -> dict[str, str]:
        """Return the environment of the build."""
        wanted = {
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
            "MAKEFLAGS": f"-j{jobs}",
            # Gloo's CMakeLists.txt asks for an older CMake than CMake 4 can imitate.
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        }
        if self.nccl:
            wanted["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        return {name: env[name] for name in env if not BUILD_SWITCHES.match(name)} | wanted


def find_target(mpi: str) -> Target:
    """Return what is installed here. A torch for CPUs is built for as such, whatever CUDA the machine has."""
    import torch

    cxx = cxx_standard(Path(torch.__file__).parent)
    if not torch.version.cuda:
        return Target(torch.__version__, mpi, cxx=cxx)
    from torch.utils.cpp_extension import CUDA_HOME  # Horovod's CMake files ask the same

    if not CUDA_HOME or not has_toolkit(Path(CUDA_HOME)):
        return Target(torch.__version__, mpi, cxx=cxx)
    return Target(torch.__version__, mpi, torch.version.cuda, has_nccl(os.environ, CUDA_HOME), cxx)


def cxx_standard(torch: Path) -> str:
    """Return the C++ standard that the headers of a PyTorch ask for."""
    header = torch / "include/torch/csrc/api/include/torch/all.h"
    asked = re.search(r"C\+\+(\d+) or later", header.read_text()) if header.exists() else None
    return asked[1] if asked else "17"


def has_toolkit(cuda_home: Path) -> bool:
    """Return whether CUDA's compiler and its headers are installed."""
    headers = [cuda_home / "include", *cuda_home.glob("targets/*/include")]
    return (cuda_home / "bin/nvcc").exists() and any((directory / "cuda_runtime.h").exists() for directory in headers)


def has_nccl(env: Mapping[str, str], cuda_home: str) -> bool:
    """Return whether NCCL's header is where Horovod's CMake files look for it."""
    homes = [env.get("HOROVOD_NCCL_HOME"), cuda_home, "/usr", "/usr/local"]
    directories = [env.get("HOROVOD_NCCL_INCLUDE"), *(f"{home}/include" for home in homes if home)]
    return any(Path(directory, "nccl.h").exists() for directory in directories if directory)


def find_mpi() -> str:
    """Name and version of the MPI that mpicxx compiles for, or an empty string without mpicxx."""
    if not shutil.which("mpicxx"):
        return ""
    # The first is Open MPI's, the second everybody else's; `--version` would be the compiler's.
    text = output_of("mpicxx", "--showme:version") + output_of("mpicxx", "-v")
    found = re.search(rf"({'|'.join(map(re.escape, MPI_NAMES))})\D*(\d[\w.]*)", text)
    return MPI_NAMES[found[1]] + found[2].rstrip(".") if found else "mpi"


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line in which a program that failed says why."""
    return (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]


def compiles(compiler: Sequence[str], source: str, suffix: str = ".cc") -> bool:
    """Return whether the compiler can make a program of the source."""
    with tempfile.TemporaryDirectory() as directory, suppress(OSError):
        path = Path(directory, f"try{suffix}")
        path.write_text(source)
        command = [*compiler, str(path), "-o", f"{directory}/try"]
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


def compiler_of(variable: str, *names: str) -> list[str]:
    """Return the compiler that CMake will use: the variable's, else the first of the names that is found."""
    found = [name for name in names if shutil.which(name)]
    return shlex.split(os.environ.get(variable, "")) or found[:1] or [names[0]]


def remedy(linux: str, mac: str) -> str:
    return mac if platform.system() == "Darwin" else f"apt-get install {linux}"


def is_installed(name: str) -> bool:
    """Return whether there is a module of this name."""
    # Before Python 3.12, a search for pip through all finders makes setuptools' finder give up its distutils, and then
    # the import of setuptools fails.
    return (PathFinder.find_spec(name) if name == "pip" else find_spec(name)) is not None


def missing_modules() -> Iterator[str]:
    """Yield the Python packages that are missing, each line with its remedy."""
    if not is_installed("torch"):
        yield "PyTorch is not installed: pip install torch"
    if not is_installed("pip"):
        yield "pip is not installed: python -m ensurepip"
    if missing := [name for name in MODULES if not is_installed(name)]:
        yield f"Python modules {', '.join(missing)} are missing: pip install 'unidist-torch[horovod]'"


def missing_tools(mpi: str, standard: str = "17") -> Iterator[str]:
    """Yield the tools and headers that are missing, each line with its remedy."""
    cxx, cc = compiler_of("CXX", "c++", "g++", "clang++"), compiler_of("CC", "cc", "gcc", "clang")
    if not compiles([*cxx, f"-std=c++{standard}"], CXX17):
        yield f"{shlex.join(cxx)} does not compile C++{standard}: {remedy('g++', 'xcode-select --install')}, or set CXX"
    if not compiles(cc, "int main(void) { return 0; }\n", ".c"):
        yield f"{shlex.join(cc)} does not compile C: {remedy('gcc', 'xcode-select --install')}, or set CC"
    cmake = output_of(os.environ.get("HOROVOD_CMAKE", "cmake"), "--version")
    version = re.search(r"version (\d+)\.(\d+)", cmake)
    if not version or (int(version[1]), int(version[2])) < (3, 13):
        found = f"{version[0]} found" if version else "none found"
        yield f"cmake 3.13 or newer is needed, {found}: {remedy('cmake', 'brew install cmake')}, or pip install cmake"
    if not (shutil.which("make") or shutil.which("gmake")):
        yield f"make is not found: {remedy('make', 'xcode-select --install')}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield f"Python.h is not found: {remedy('python3-dev', 'install Python from python.org')}"
    if mpi and not compiles(["mpicxx"], MPI_H):
        install = remedy("libopenmpi-dev", "brew install open-mpi")
        yield f"mpicxx is found but its headers are missing: {install}, or --without-mpi"
