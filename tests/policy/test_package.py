"""The package's metadata and content: licence, supported Pythons, addresses."""

import hashlib
import re
import subprocess
import sys
import tarfile
from importlib.metadata import distribution

import pytest
from packaging.specifiers import SpecifierSet

from policy.source import ROOT, relative, tracked_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # the text as apache.org has it


def test_licence_is_the_apache_licence():
    """LICENSE is the published text, to the byte."""
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2


def test_installed_package_carries_the_licence():
    """The wheel names the licence and contains its text."""
    installed = distribution("tilewise")
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    (text,) = [file for file in installed.files or () if file.name == "LICENSE"]
    assert text.locate().read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_source_distribution_is_complete(tmp_path):
    """The sdist has LICENSE, README, sources and headers, and only tracked files; it builds."""
    build = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "native/CMakeLists.txt", "PKG-INFO"} <= names
    tracked = {relative(path) for path in tracked_files()}
    assert names - {"PKG-INFO"} <= tracked
    assert {name for name in tracked if name.startswith(("src/", "native/"))} <= names


def test_supported_pythons_agree():
    """Classifiers, requires-python and ruff's target version agree."""
    named = [re.search(r"Python :: 3\.(\d+)$", line) for line in PROJECT["classifiers"]]
    minors = [int(match[1]) for match in named if match]
    assert minors == list(range(minors[0], minors[-1] + 1))
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert all(f"3.{minor}" in allowed for minor in minors)
    assert f"3.{minors[0] - 1}" not in allowed
    assert f'target-version = "py3{minors[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_addresses_are_in_one_place():
    """All URLs are the project's, and only pyproject.toml has them."""
    home = PROJECT["urls"]["Homepage"]
    assert all(url.startswith(home) for url in PROJECT["urls"].values())
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= set(PROJECT["urls"])
    bad = [
        relative(path)
        for path in tracked_files()
        if path.name != "pyproject.toml" and home.encode() in path.read_bytes()
    ]
    assert not bad


def test_no_machine_path():
    """No tracked file has this folder, a home folder or a folder of one machine."""
    homes = rb"/(?:home|Users)/\w|/ro{2}t/|(?<![\w.])/(?:work|mnt|opt)/\w"
    pattern = re.compile(homes + b"|" + re.escape(str(ROOT).encode()))
    bad = {
        relative(path): match[0] for path in tracked_files() if (match := pattern.search(path.read_bytes()))
    }
    assert not bad
