"""Compile the CPU kernel for four kinds of x86-64 processor; everything else of the build is in pyproject.toml.

Without a C++ compiler, or on another system, the installation succeeds without the kernel: ``sdpa`` then serves CPUs.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("src/diff_transformer/ops/cpu")
FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-shared", "-s", "-w", "-fopenmp"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
V4 = ("-march=x86-64-v4",)
BF16 = (*V4, "-mavx512bf16", "-mavx512vnni")
LIBRARIES = {  # ops/cpu/library.py has the processor flags that each of them needs
    "v3": ("-march=x86-64-v3",),
    "v4": V4,
    "bf16": BF16,
    "amx": (*BF16, "-mamx-tile", "-mamx-bf16"),
}


def compiler() -> list[str] | None:
    """Command of ``$CXX``, or of the first installed of c++, g++ and clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((words for name in names if (words := shlex.split(name)) and shutil.which(words[0])), None)


def libraries() -> dict[str, tuple[str, ...]]:
    """Flags of each library to compile on this system."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        reason = f"it is written for Linux on x86-64, not for {sys.platform} on {platform.machine()}"
    elif compiler() is None:
        reason = "no C++ compiler is installed"
    else:
        return LIBRARIES
    if {"bdist_wheel", "editable_wheel"} & {*sys.argv}:  # pip also runs this file to read the metadata
        print(f"diff-transformer: the CPU kernel is not built: {reason}; backend='sdpa' serves", file=sys.stderr)
    return {}


class BuildLibraries(build_ext):
    """Compile plain shared libraries instead of Python modules, so that one wheel serves every Python version."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True
        self.force = True

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        command = [*(compiler() or ()), *FLAGS, *ext.extra_compile_args, *ext.sources, "-o", str(target)]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        if result.returncode:
            raise CompileError(f"{shlex.join(command)} failed: {result.stderr.strip()[-500:]}")

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"


class Wheel(bdist_wheel):
    """A wheel of any Python 3 on this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


if "editable_wheel" in sys.argv:  # libraries of an earlier installation lie in the source tree
    for library in FOLDER.glob("native_*.so"):
        library.unlink()
setup(
    ext_modules=[
        Extension(
            f"diff_transformer.ops.cpu.native_{name}",
            [str(FOLDER / "native.cpp")],
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            extra_compile_args=list(flags),
            optional=True,
        )
        for name, flags in libraries().items()
    ],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
)
