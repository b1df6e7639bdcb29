"""The wheel and the source distribution hold the packages alone; from the wheel, the pages do what they say."""

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import pages
from pages import ROOT, blocks, commands

pytest.importorskip("build")
pytest.importorskip("hatchling")
pytest.importorskip("hatch_fancy_pypi_readme")
pytestmark = pytest.mark.slow  # `make wheel` builds it

LOCK = (ROOT / "requirements-dev.txt").read_text()
(TORCH,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["torch"]
SELF_CONTAINED = [
    page
    for page in pages.pages()
    if any(not block.title for block in blocks(page, "python")) and not pages.given(page).names
]


def done(*command: object, folder: Path = ROOT) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the source distribution, and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


def package_files() -> set[str]:
    """What the repository has of both packages, but for what Python writes there."""
    found = [path for name in ("privgrad", "privgrad_lab") for path in (ROOT / "src" / name).rglob("*")]
    return {str(path.relative_to(ROOT / "src")) for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_the_wheel_is_the_package_and_nothing_else(built: tuple[Path, Path]):
    names = set(zipfile.ZipFile(built[0]).namelist())
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert inside == package_files()
    assert {"privgrad/py.typed", "privgrad_lab/report/page.html.j2"} <= inside
    assert any(name.startswith("privgrad_lab/papers/items/") and name.endswith(".toml") for name in inside)
    assert {name.rpartition(".")[2] for name in inside} <= {"py", "pyi", "typed", "j2", "toml"}, "no data"


def test_the_source_distribution_is_what_the_wheel_is_built_from(built: tuple[Path, Path]):
    with tarfile.open(built[1]) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    outside = names - {f"src/{name}" for name in package_files()}
    assert {name for name in names if name.startswith("src/")} == {f"src/{name}" for name in package_files()}
    assert outside == {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


def test_what_the_wheel_says_of_itself(built: tuple[Path, Path]):
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_string(archive.read(name).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert said["Version"] == project["version"]
    assert said.get_all("Provides-Extra") == sorted(project["optional-dependencies"])
    changes = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert next(line for line in changes if line.startswith("## ")).split()[1] == project["version"]


def test_its_long_description_is_the_readme_without_links_into_the_repository(built: tuple[Path, Path]):
    """Where it is shown, there is no repository beside it."""
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(name))
    assert said["Description-Content-Type"] == "text/markdown"
    payload = said.get_payload(decode=True)
    assert isinstance(payload, bytes)
    shown, readme = payload.decode(), (ROOT / "README.md").read_text()
    link = re.compile(r"!?\[([^\]]*)\]\(([^)]*)\)")
    relative = [found for found in link.finditer(readme) if not found[2].startswith(("https:", "http:"))]
    assert relative
    assert not [found[0] for found in link.finditer(shown) if not found[2].startswith(("https:", "http:"))]
    texts = [found[1] for found in relative if not found[0].startswith("!")]
    assert all((ROOT / text).exists() and f"`{text}`" in shown for text in texts), "a link's text is its path"
    lines = [line for line in readme.splitlines() if not link.search(line)]
    assert [line for line in lines if line not in shown] == []


@pytest.mark.timeout(3600)
def test_in_an_empty_environment_the_wheel_does_what_the_pages_say(built: tuple[Path, Path], tmp_path: Path):
    binaries = tmp_path / "environment" / "bin"
    venv.create(binaries.parent, with_pip=True)
    wheel = f"{built[0]}[experiments,tensorboard]"
    constraints = tmp_path / "constraints.txt"  # the locked versions, so that a new one breaks nothing here
    constraints.write_text("\n".join(re.findall(r"^[\w.-]+==[^\\\n]*", LOCK, re.MULTILINE)) + f"\n{TORCH}\n")
    done(binaries / "pip", "install", "--quiet", "--constraint", constraints, wheel)
    assert done(binaries / "privgrad", "--version", folder=tmp_path) == f"privgrad {built[0].name.split('-')[1]}\n"
    done(binaries / "python", "-c", "import privgrad; assert 'environment' in privgrad.__file__", folder=tmp_path)
    for page in SELF_CONTAINED:
        folder = tmp_path / page.replace("/", "-")
        folder.mkdir()
        optional = pages.given(page).optional  # packages that the wheel does not bring
        needed = [b for b in blocks(page, "python") if b.heading not in optional and not b.title]
        (folder / "page.py").write_text("\n".join(map(pages.smaller, needed)))
        done(binaries / "python", "page.py", folder=folder)
    for page in filter(commands, pages.pages()):
        folder = tmp_path / f"{page.replace('/', '-')}-commands"
        folder.mkdir()
        pages.run_commands(page, folder, binaries)
