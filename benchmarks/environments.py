"""An environment for each other library: `python -m benchmarks.environments opacus jax-privacy` makes them in .peers/.

Nothing here is installed beside privgrad's own development environment, except into "steps": there privgrad and the
others take turns on the same step.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".peers"
TORCH = "torch==2.13.0"
FASTDP = "git+https://github.com/awslabs/fast-differential-privacy@3d5cc561aa337c72f79873ccc4fe8b900b5493b5"
REQUIREMENTS: dict[str, list[str]] = {
    "opacus": [TORCH, "opacus==1.6.0"],
    "jax-privacy": ["jax-privacy==2.0.0", "keras==3.15.1"],
    "dp-ebm": ["interpret-core==0.7.8", "scikit-learn==1.9.1"],
    "diffprivlib": ["diffprivlib==0.6.6", "scikit-learn==1.6.1"],
    "steps": [TORCH, "typer", "rich", "opacus==1.6.0", "opake==0.16.1", "jax-privacy==2.0.0", "-e", str(ROOT)],
}
# What need not install: it comes from a repository, and the benchmark lists it as missing.
OPTIONAL: dict[str, list[list[str]]] = {"steps": [["--no-deps", FASTDP], ["transformers"]]}


def python_of(name: str) -> Path:
    """The interpreter of an environment."""
    folder = FOLDER / name
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_made(name: str) -> bool:
    """Whether an environment is whole, and as this file says."""
    stamp = FOLDER / name / "installed"
    return stamp.exists() and stamp.read_text() == stamp_of(name)


def stamp_of(name: str) -> str:
    return "\n".join(REQUIREMENTS[name]) + "\n"


def make(name: str) -> None:
    """Make an environment, unless it is there.

    Raises:
        subprocess.CalledProcessError: a package does not install.
    """
    if is_made(name):
        return
    if not python_of(name).exists():
        venv.create(FOLDER / name, with_pip=True)
    unbound = {key: value for key, value in os.environ.items() if key not in ("PIP_CONSTRAINT", "PYTHONPATH")}
    install = [str(python_of(name)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, *REQUIREMENTS[name]], check=True, env=unbound)
    for extra in OPTIONAL.get(name, []):
        if subprocess.run([*install, *extra], env=unbound).returncode:
            typer.echo(f"environments: {extra[-1]} is not installed; the benchmark goes on without it", err=True)
    (FOLDER / name / "installed").write_text(stamp_of(name))


def main(
    name: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(REQUIREMENTS)}; default: all")] = None,
) -> None:
    for one in name or list(REQUIREMENTS):
        if one not in REQUIREMENTS:
            sys.exit(f"environments: {one} is none of {', '.join(REQUIREMENTS)}")
        make(one)


if __name__ == "__main__":
    typer.run(main)
