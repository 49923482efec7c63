"""Write or check the index in patches/README.md. Exit codes: 0 current or written, 1 different.

python scripts/patch_index.py --check
python scripts/patch_index.py --write
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from samebits.patching import index
from samebits.patching.workspace import Workspace

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
action = parser.add_mutually_exclusive_group(required=True)
action.add_argument("--check", action="store_true")
action.add_argument("--write", action="store_true")
if parser.parse_args().write:
    index.write(Workspace.find())
elif not index.current(Workspace.find()):
    sys.exit("patches/README.md is out of date\n\nhint: python scripts/patch_index.py --write")
