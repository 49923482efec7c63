"""`scripts/words.py` sees what it is there for, and says nothing about ordinary lines."""

from __future__ import annotations

import subprocess
import sys

import pytest
from quoted import ROOT

# Put together here, so that this file holds none of them.
BAD = {
    "a character outside ASCII": "caf" + chr(233),
    "an absolute path of one machine": "cd " + "/" + "home/someone/project",
    "a package index": "https:" + "//files." + "python" + "hosted.org/packages/x",
    "a word about authorship": "found in this " + "session",
    "host": "see https://" + "internal.corp/page",
}
GOOD = """session = requests.Session()
path = folder / "work" / "tmp"
see https://github.com/vllm-project/vllm, the /proc/cpuinfo file and $(ROOT)/home/x
"""


def run(path):
    command = [sys.executable, ROOT / "scripts" / "words.py", path]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_line_is_found(rule, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"{GOOD}{BAD[rule]}\n")
    done = run(path)
    assert done.returncode == 1
    assert f"page.md:4: {rule}" in done.stdout


def test_ordinary_lines_pass(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(GOOD)
    done = run(path)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path):
    assert run(tmp_path / "absent.md").returncode == 2
