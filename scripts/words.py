#!/usr/bin/env python3
"""Check that tracked files speak of this repository alone and stay plain ASCII.

    scripts/words.py            every tracked file
    scripts/words.py FILE...    these

Found: characters outside ASCII, absolute paths of one machine, addresses of package indexes, hosts
that are not on the list below, and words about who or what wrote a line rather than what it does.
Licence texts are upstream's and are not looked at.

Exit codes: 0 nothing found, 1 something found, 2 a named file cannot be read.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOSTS = (
    *("github.com", "www.apache.org", "in-toto.io", "json-schema.org", "www.w3.org"),
    *("example.org", "example.com", "127.0.0.1"),
)
# Written so that this file does not find itself.
RULES = {
    "a character outside ASCII": re.compile(r"[^\x00-\x7f]"),
    "an absolute path of one machine": re.compile(
        r"(?<![\w.$}\])*-])/(?:work|home|root|Users|tmp|opt|mnt)/\w"
    ),
    "a package index": re.compile(r"pypi[.]org|python[h]osted|mirrors?[.][a-z]+[.]"),
    "a word about authorship": re.compile(
        r"\b(?:this|previous|next|last|another) (?:sessio[n]|conversatio[n]|promp[t])\b"
        r"|\bsub-?agen[t]s?\b|\bas an A[I]\b|\bissue [#]?\d"
        r"|\b(?:claud[e]|chatgp[t]|copilo[t]|openai code[x])\b",
        re.IGNORECASE,
    ),
}
_HOST = re.compile(r"https?://([\w-]+(?:\.[\w-]+)+)")


def found(text: str) -> list[tuple[int, str]]:
    """(line number, what was found) of one file."""
    hits = []
    for number, line in enumerate(text.splitlines(), 1):
        hits += [(number, rule) for rule, pattern in RULES.items() if pattern.search(line)]
        for host in _HOST.findall(line):
            if host not in HOSTS and not host.endswith(".example"):
                hits.append((number, f"host {host}"))
    return hits


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and Path(name).name != "LICENSE"]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    status = 0
    for path in parser.parse_args().files or tracked():
        try:
            text = path.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for number, what in found(text):
            print(f"{shown}:{number}: {what}")
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
