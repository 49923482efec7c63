#!/usr/bin/env python3
"""Run upstream's own tests of what the patches touch: unmodified tree first, then patched tree.

    scripts/upstream_tests.py                 every upstream of tests/upstream/selection.yaml
    scripts/upstream_tests.py vllm verl       some of them

Each tree is written out from the repository of the built patched tree (its first commit is the
unmodified release), so nothing is left behind in it. vLLM runs on its `samebits` CPU platform with
stock arithmetic in both trees: the patches have to change nothing there.

Exit codes: 0 what passes unmodified passes patched, 1 a test passes unmodified only, 2 no patched
tree or an unknown upstream, 3 an upstream of which nothing passed unmodified.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import yaml

from samebits import patching
from samebits.errors import SamebitsError
from samebits.patching import git, trees
from samebits.patching.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]
SELECTION = ROOT / "tests" / "upstream" / "selection.yaml"
SECONDS = 3600  # far above what a run takes, so that a hang ends

# Variables of the caller that would reach into the tests.
PRIVATE = ("SAMEBITS_", "VLLM_", "TORCH", "PYTORCH_", "NUMBA_", "PYTEST_", "PYTHON")
ENVIRONMENT = {
    "SAMEBITS_ARITHMETIC": "stock",
    "VLLM_PLUGINS": "samebits",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}

Outcomes = dict[str, str]


def write_out(repository: Path, commit: str, folder: Path) -> None:
    """The files of a commit, in a folder of their own."""
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    git.run(repository, "archive", f"--output={archive}", commit)
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    archive.unlink()


def read_report(path: Path) -> Outcomes:
    """Test id -> passed, failed or skipped, from a JUnit file; empty where there is none."""
    if not path.exists():
        return {}
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        file = case.get("file") or case.get("name")  # a file that cannot be imported has no `file`
        bad = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        outcome = "failed" if bad else "skipped" if skipped else "passed"
        found[f"{file}::{case.get('name')}"] = outcome
    return found


def packages(wanted: list[str], folder: Path) -> Path:
    """`folder` with the packages that only upstream's test files import; installed once."""
    stamp = folder / ".installed"
    text = "\n".join(wanted)
    if not stamp.exists() or stamp.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", folder, *wanted], check=True, stdout=sys.stderr)
        stamp.write_text(text)
    return folder


def write_configs(configs: dict[str, str], tree: Path) -> None:
    """Default configurations of transformers, in folders named as the hub ids of upstream's tests,
    where vLLM looks before it asks a hub."""
    import transformers

    for name, kind in configs.items():
        getattr(transformers, kind)(
            architectures=[kind.removesuffix("Config") + "ForCausalLM"]
        ).save_pretrained(tree / name)


def run_tests(tree: Path, extra: list[Path], chosen: list[dict], log: Path) -> Outcomes:
    """Outcomes of the chosen upstream tests, run in `tree` by a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PRIVATE)}
    report = log.with_suffix(".xml")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["--continue-on-collection-errors", "-o", "junit_family=xunit1"]
    # Without these two pytest walks up to this repository's own configuration.
    command += [f"--rootdir={tree}", f"--config-file={tree / 'pyproject.toml'}"]
    for entry in chosen:
        file = entry["file"]
        command += [f"{file}::{name}" for name in entry.get("only", [])] or [file]
        command += [f"--deselect={file}::{name}" for name in entry.get("deselect", {})]
    path = os.pathsep.join(map(str, [tree, *extra]))
    with log.open("w") as out:
        subprocess.run(
            [*command, f"--junitxml={report}"],
            cwd=tree,
            env={**kept, **ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,  # the report says what happened
        )
    return read_report(report)


def lost(unmodified: Outcomes, patched: Outcomes) -> list[str]:
    """Tests that pass unmodified and do not pass patched, whatever they do instead."""
    return sorted(
        name
        for name, outcome in unmodified.items()
        if outcome == "passed" and patched.get(name) != "passed"
    )


def summary(outcomes: Outcomes) -> str:
    counts = Counter(outcomes.values())
    return (
        ", ".join(f"{counts[k]} {k}" for k in ("passed", "failed", "skipped") if counts[k]) or "-"
    )


def run_upstream(upstream: str, chosen: dict, repository: Path, scratch: Path) -> int:
    """Exit code of one upstream; prints a line for each file."""
    wanted = chosen.get("packages", [])
    extra = [packages(wanted, scratch.parent / f"upstream-tests-{upstream}")] if wanted else []
    results = {}
    for arm, commit in (("unmodified", trees.root_commit(repository)), ("patched", "HEAD")):
        tree = scratch / arm / upstream
        write_out(repository, commit, tree)
        write_configs(chosen.get("configs", {}), tree)
        print(f"{upstream}: running {arm}", file=sys.stderr, flush=True)
        results[arm] = run_tests(tree, extra, chosen["run"], scratch / f"{arm}.log")
    for entry in chosen["run"]:
        here = {
            arm: {name: outcome for name, outcome in found.items() if entry["file"] in name}
            for arm, found in results.items()
        }
        shown = "; ".join(f"{arm}: {summary(found)}" for arm, found in here.items())
        print(f"{upstream} {entry['file']}: {shown}")
    missing = lost(results["unmodified"], results["patched"])
    for name in missing:
        print(f"{upstream} passes unmodified only: {name}")
    passed = "passed" in results["unmodified"].values()
    if missing or not passed:
        log = scratch / f"{'patched' if missing else 'unmodified'}.log"
        print("\n".join(log.read_text().splitlines()[-60:]), file=sys.stderr)
    return 1 if missing else 0 if passed else 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("upstream", nargs="*", help="default: all that have tests to run")
    names = parser.parse_args().upstream
    selection = yaml.safe_load(SELECTION.read_text())
    if unknown := set(names) - selection.keys():
        parser.error(f"no upstream {', '.join(sorted(unknown))} in {SELECTION.relative_to(ROOT)}")
    names = names or [name for name, entry in selection.items() if entry["run"]]
    workspace = Workspace.find()
    codes = []
    for name in names:
        try:
            repository = patching.tree_path(name, selection[name]["model"], workspace)
        except SamebitsError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        with tempfile.TemporaryDirectory(dir=workspace.build, prefix=".upstream-tests-") as scratch:
            codes.append(run_upstream(name, selection[name], repository, Path(scratch)))
    return 1 if 1 in codes else max(codes, default=3)


if __name__ == "__main__":
    raise SystemExit(main())
