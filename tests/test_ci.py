"""The files of continuous integration: jobs and Makefile agree, the lock is whole, a release is what its tag says."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pages import ROOT
from tests.fuzz.readers import READERS

yaml = pytest.importorskip("yaml")

MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
PREPARES = {"data"}  # a job's first step; `make ci` takes the data that are here
# What a job may do besides: write, and call other programs than make.
MAY_WRITE = {
    ("release", "publish"): {"id-token", "attestations"},
    ("release", "announce"): {"contents"},
    ("docs", "publish"): {"contents"},
}
MAY_CALL = {"ci": {"apt-get"}, "release": {"gh"}, "docs": {"git"}}


def commands(workflow: dict[str, Any]) -> set[str]:
    """The commands of all jobs, one for each target of a matrix."""
    found = set[str]()
    for job in workflow["jobs"].values():
        targets = job.get("strategy", {}).get("matrix", {}).get("target", [""])
        for step in job.get("steps", []):
            found |= {step["run"].replace("${{ matrix.target }}", target) for target in targets if "run" in step}
    return found


def targets(workflow: dict[str, Any]) -> set[str]:
    """What the jobs make, without what prepares it."""
    return {command.split()[1] for command in commands(workflow) if command.startswith("make ")} - PREPARES


def rules(makefile: str) -> dict[str, set[str]]:
    """The targets of a Makefile with what they need."""
    found = re.findall(r"^([a-z][a-z-]*):(?!=)(.*)$", makefile, re.MULTILINE)
    return {target: set(needs.split()) for target, needs in found}


def test_make_ci_runs_what_the_jobs_run():
    assert targets(WORKFLOWS["ci"]) == rules(MAKEFILE)["ci"]


def test_a_target_that_only_one_of_them_runs_is_found():
    without = MAKEFILE.replace("\nci: lint docs ", "\nci: lint ")
    assert targets(WORKFLOWS["ci"]) - rules(without)["ci"] == {"docs"}
    one_more = WORKFLOWS["ci"] | {"jobs": WORKFLOWS["ci"]["jobs"] | {"more": {"steps": [{"run": "make fuzz"}]}}}
    assert targets(one_more) - rules(MAKEFILE)["ci"] == {"fuzz"}


def test_jobs_only_call_make_and_all_that_they_make_exists():
    assert WORKFLOWS.keys() == {"ci", "docs", "nightly", "release"}
    for name, workflow in WORKFLOWS.items():
        assert targets(workflow) <= rules(MAKEFILE).keys(), name
        assert {command.split()[0] for command in commands(workflow)} - {"make"} == MAY_CALL.get(name, set()), name


def test_help_names_every_target():
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    names = set(phony[1].replace("\\", "").split())
    assert names == rules(MAKEFILE).keys()
    assert set(re.findall(r'^\t@echo "make ([a-z-]+) ', MAKEFILE, re.MULTILINE)) == names - {"help", "clean"}


def test_the_jobs_run_every_supported_python_and_one_more_that_may_fail():
    supported = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"] if "Python :: 3." in one]
    assert PROJECT["project"]["requires-python"] == f">={supported[0]}"
    for system in ("linux", "macos"):
        matrix = WORKFLOWS["ci"]["jobs"][system]["strategy"]["matrix"]
        assert (matrix["python"], matrix["torch"]) == (supported, ["newest", "oldest"])
    job = WORKFLOWS["ci"]["jobs"]["linux"]
    (extra,) = job["strategy"]["matrix"]["include"]
    assert extra == {"python": "3.14", "torch": "newest", "experimental": True}
    assert job["continue-on-error"] == "${{ matrix.experimental == true }}"


@pytest.mark.parametrize("torch", ["newest", "oldest"])
def test_torch_is_the_one_that_is_named(torch: str):
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", "test", f"TORCH={torch}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (bound,) = (one for one in map(Requirement, PROJECT["project"]["dependencies"]) if one.name == "torch")
    (oldest,) = (one.version for one in bound.specifier)
    folder, wanted = {"newest": (".venv", "--group torch"), "oldest": (".venv-oldest", f"'torch=={oldest}'")}[torch]
    assert f"{folder}/bin/python -m pip install --quiet {wanted}\n" in made
    assert f"{folder}/bin/python -m pytest" in made
    assert made.count("torch") == 1


def test_every_fuzzer_runs_each_night():
    loop = re.search(r"for reader in ([a-z ]+);", MAKEFILE)
    assert loop is not None
    assert loop[1].split() == sorted(READERS)


def test_actions_are_named_by_their_hash_and_jobs_may_only_read():
    """A tag can be moved to other code. Only a release may write, and not in the job that runs packages' code.

    The pages may be written, because nothing is built from them.
    """
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for line in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line
    writing = {
        (name, label): set(job["permissions"])
        for name, workflow in WORKFLOWS.items()
        for label, job in workflow["jobs"].items()
        if "permissions" in job
    }
    assert writing == MAY_WRITE
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    jobs = WORKFLOWS["release"]["jobs"]
    assert targets({"jobs": {label: jobs[label] for label in ("publish", "announce")}}) == set()
    assert jobs["publish"]["needs"] == ["ci", "build"]


def test_dependabot_renews_packages_and_actions():
    settings = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())
    assert {one["package-ecosystem"] for one in settings["updates"]} == {"github-actions", "pip"}
    assert all(one["directory"] == "/" for one in settings["updates"])


def locked(text: str) -> dict[str, list[str]]:
    """The packages of a lock with their versions; an error for one without a hash."""
    found = dict[str, list[str]]()
    for entry in re.findall(r"^\S.*(?:\n +\S.*)*", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE), re.MULTILINE):
        name, _, rest = entry.partition("==")
        assert " --hash=sha256:" in entry, name
        found.setdefault(name, []).append(rest.split()[0])
    return found


def test_the_lock_has_every_package_for_development_with_its_hash():
    held = locked((ROOT / "requirements-dev.txt").read_text())
    options, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    grouped = [one for group in ("dev", "test", "trl") for one in groups[group] if isinstance(one, str)]
    named = [*PROJECT["project"]["dependencies"], *grouped]
    named += [one for extra in ("docs", "experiments", "tensorboard") for one in options[extra]]
    for needed in map(Requirement, named):
        if needed.name != "torch":
            assert any(needed.specifier.contains(one) for one in held.get(needed.name, [])), f"`make lock`: {needed}"
    of_torch = {name for name in held if re.match(r"(torch|triton|nvidia-.*|cuda-.*)$", name)}
    assert of_torch == set(), "they belong to the build of torch, which is installed by itself"


def test_a_package_without_a_hash_is_found():
    with pytest.raises(AssertionError, match="numpy"):
        locked("# text\nattrs==1.0 \\\n    --hash=sha256:0\n    # via x\nnumpy==2.0\n    # via y\n")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"pyproject.toml": 'version = "1.2.4"\n'}, "pyproject.toml has 1.2.4, and the tag is v1.2.3"),
        ({"CHANGELOG.md": "# Changelog\n\n## 1.2.3 (unreleased)\n"}, "CHANGELOG.md has 1.2.3 (unreleased), and"),
        ({"CITATION.cff": "title: privgrad\n"}, "CITATION.cff has no version, and the tag is v1.2.3"),
    ],
)
def test_a_tag_is_the_version_of_all_files(changed: dict[str, str], problem: str, tmp_path: Path):
    right = {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 1.2.3\n",
        "CHANGELOG.md": "# Changelog\n\n## 1.2.3\n\n## 1.2.2\n",
    }
    for name, text in (right | changed).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/check_tag.py", tmp_path / "scripts")
    done = subprocess.run([sys.executable, script, "v1.2.3"], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not problem), done.stderr
    assert problem in done.stderr
