#!/usr/bin/env python3
"""Write a case's `prompts.jsonl` from reasoning-gym.

    pip install reasoning-gym==0.1.25      # wants a C compiler; a virtual environment of its own
    python scripts/make_prompts.py cases/smollm2-135m/prompts.jsonl

The first line says how the rest was made, so that the same version writes the same bytes. `--check`
writes nothing. Exit codes: 0 written or unchanged, 1 `--check` found a difference, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SEED = 20240601
SIZE = 48  # of each task
# Small sums with short answers: a 135M model solves some of them, so rewards differ.
TASKS = {
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
    },
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
INSTRUCTION = "Answer with the number only."


def lines() -> list[str]:
    import reasoning_gym

    header = {
        "generator": f"reasoning-gym {version('reasoning-gym')}",
        "seed": SEED,
        "size": SIZE,
        "tasks": TASKS,
        "instruction": INSTRUCTION,
    }
    out = [json.dumps(header)]
    seen = set()
    for task, options in TASKS.items():
        for item in reasoning_gym.create_dataset(task, seed=SEED, size=SIZE, **options):
            question = f"{item['question']} {INSTRUCTION}"
            if question not in seen:
                seen.add(question)
                out.append(
                    json.dumps({"task": task, "question": question, "answer": item["answer"]})
                )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    try:
        text = "\n".join(lines()) + "\n"
    except (ImportError, PackageNotFoundError) as problem:
        print(f"{problem}\n\nhint: pip install reasoning-gym==0.1.25", file=sys.stderr)
        return 2
    if options.check:
        same = options.file.is_file() and options.file.read_text() == text
        print("unchanged" if same else f"{options.file} differs from what reasoning-gym gives")
        return 0 if same else 1
    options.file.write_text(text)
    print(f"{options.file}: {text.count(chr(10)) - 1} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
