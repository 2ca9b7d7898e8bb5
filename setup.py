"""Builds the kernels into the package. Where that fails the install goes on without them, and commands say so."""

import sys
from pathlib import Path
from platform import machine

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from export.kernels.build import HERE, MACOS_TARGET, NAME, TARGET, BuildError, build, compilers


def is_newer(made: Path, sources: list[Path]) -> bool:
    """Whether a file is there and newer than all of some others."""
    return made.exists() and made.stat().st_mtime > max(source.stat().st_mtime for source in sources)


class BuildWithKernels(build_py):
    """`build_py` that compiles the library beside its sources, or beside their copies."""

    def run(self) -> None:
        super().run()
        sources = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "build.py"]
        if self.editable_mode and is_newer(HERE / NAME, sources):
            return
        try:
            build(HERE if self.editable_mode else Path(self.build_lib) / "export" / "kernels")
        except BuildError as error:
            print(f"warning: the kernels were not built: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and every Python, if the library is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not list(Path(self.bdist_dir).rglob(NAME))
        python, abi, platform = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform
        if sys.platform == "darwin":  # a universal Python names both processors, and the library is for this one
            platform = f"macosx_{MACOS_TARGET.replace('.', '_')}_{machine()}"
        return "py3", "none", f"manylinux_2_28_{TARGET}" if TARGET else platform


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    setup_requires=[] if next(compilers(), None) else ["ziglang"],
)
