"""Compiled extensions of a wheel: pinned one by one, thinned to one chip, placed in trees."""

import hashlib
import struct
import zipfile
from pathlib import Path

import pytest
import yaml

from samebits.errors import Refused
from samebits.patching import compiled, git, thin, trees
from samebits.patching.workspace import Workspace

PTX, CODE = 1, 2


def entry(kind: int, capability: int, content: bytes) -> bytes:
    """One entry of a container: a header of 64 bytes, then the content."""
    content = content.ljust((len(content) + 7) // 8 * 8, b"\0")
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(content))
    struct.pack_into("<I", header, 28, capability)
    return bytes(header) + content


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", thin.MAGIC, 1, 16, len(body)) + body


def library(fatbin: bytes, before: bytes = b"machine code of the processor") -> bytes:
    """An ELF file of 64 bits with GPU code in its own section."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    before = before.ljust(64, b"\0")
    offset = 64 + len(before)
    table = offset + len(fatbin) + len(names)
    sections = [
        (0,) * 10,
        (1, 1, 2, offset, offset, len(fatbin), 0, 0, 8, 0),
        (12, 3, 0, 0, offset + len(fatbin), len(names), 0, 0, 1, 0),
    ]
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HH", header, 0x3C, len(sections), 2)
    packed = b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections)
    return bytes(header) + before + fatbin + names + packed


A80, A90, A120 = (entry(CODE, c, f"code of {c}".encode() * 9) for c in (80, 90, 120))
P75, P80, P100 = (entry(PTX, c, f"text of {c}".encode() * 9) for c in (75, 80, 100))


def test_code_of_the_chip_stays_byte_for_byte_and_all_else_is_zero():
    first, second = container(A80, A90, P80), container(A90, A120, A90)
    whole = library(first + bytes(8) + second)
    thinned = thin.thin(whole, 90)
    kept = container(A90).ljust(len(first), b"\0") + bytes(8)
    kept += container(A90, A90).ljust(len(second), b"\0")
    assert thinned == library(kept)
    assert len(thinned) == len(whole)
    assert thin.thin(thinned, 90) == thinned


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ((A80, P75, P80, P100), (P80,)),  # the newest that a driver compiles for the chip
        ((A120, P100, A80), (A80,)),  # nothing for the chip: the smallest
        ((), ()),
    ],
)
def test_a_container_without_code_of_the_chip(entries, kept):
    whole = container(*entries)
    assert thin.thin(library(whole), 90) == library(container(*kept).ljust(len(whole), b"\0"))


def test_a_library_without_gpu_code_stays_as_it_is():
    plain = library(b"").replace(b".nv_fatbin", b".something")
    assert thin.thin(plain, 90) == plain


@pytest.mark.parametrize(
    "content",
    [
        b"no library",
        library(b"text instead of code"),
        library(container(A90)[:-8]),
        library(container(entry(7, 90, b""))),
    ],
)
def test_a_layout_that_is_not_understood_is_an_error(content):
    with pytest.raises(ValueError):
        thin.thin(content, 90)


# --- pins and places ------------------------------------------------------------------------

WHOLE = library(container(A80, A90))
THIN = thin.thin(WHOLE, 90)
PATH = "toy/_kernels.abi3.so"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace with a pinned wheel, and a patched tree of one file."""
    wheel = tmp_path / "build/wheels/toy-1.0-cp38-abi3-linux_x86_64.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(PATH, WHOLE)
    pin = {
        "distribution": "toy",
        "version": "1.0",
        "filename": wheel.name,
        "sha256": sha256(wheel.read_bytes()),
        "size": str(wheel.stat().st_size),
        "host": {"torch": "2.*"},
        "groups": {"ext": {PATH: {"whole": sha256(WHOLE), "sm90": sha256(THIN)}}},
    }
    (tmp_path / "patches").mkdir()
    write_pin(tmp_path, pin)
    return Workspace(tmp_path)


def write_pin(root: Path, pin: dict) -> None:
    (root / "patches" / compiled.FILE).write_text(yaml.safe_dump({"toy": pin}))


@pytest.fixture
def tree(workspace) -> Path:
    draft = workspace.build / "toy" / "draft"
    (draft / "toy").mkdir(parents=True)
    (draft / "toy/__init__.py").write_text("")
    git.init(draft)
    return draft.rename(draft.with_name(git.commit_all(draft, "all")))


def test_an_extension_is_placed_whole_and_the_tree_stays_verified(workspace, tree):
    compiled.place(workspace, "toy", tree)
    assert (tree / PATH).read_bytes() == WHOLE
    trees.verify("toy", "small", tree)
    inode = (tree / PATH).stat().st_ino
    compiled.place(workspace, "toy", tree)
    assert (tree / PATH).stat().st_ino == inode
    compiled.place(workspace, "other", tree)  # has no wheel


def test_a_thinned_extension_is_accepted_and_another_is_an_edit(workspace, tree):
    pin = compiled.load(workspace.patches)["toy"]
    assert compiled.extract(workspace, pin, ["ext"], "sm90", tree) == [PATH]
    assert (tree / PATH).read_bytes() == THIN
    trees.verify("toy", "small", tree)
    (tree / PATH).write_bytes(THIN + b"\0")
    with pytest.raises(Refused, match="SB0114"):
        trees.verify("toy", "small", tree)


@pytest.mark.parametrize("key", ["whole", "sm90"])
def test_other_bytes_than_the_pinned_ones_are_refused(workspace, tree, key):
    pin = compiled.load(workspace.patches)["toy"]
    pin.groups["ext"][PATH][key] = sha256(b"")
    with pytest.raises(Refused, match="SB0127"):
        compiled.extract(workspace, pin, ["ext"], "sm90", tree)
    assert not (tree / PATH).exists()


def test_another_wheel_is_refused(workspace, tree):
    pin = compiled.load(workspace.patches)["toy"]
    path = workspace.build / "wheels" / pin.filename
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(Refused, match="SB0127"):
        compiled.place(workspace, "toy", tree)


@pytest.mark.parametrize("text", ["toy: 1", "toy: {size: 1}", "toy: [", "- a"])
def test_pins_of_another_form_are_refused(workspace, text):
    (workspace.patches / compiled.FILE).write_text(text)
    with pytest.raises(Refused, match="SB0126"):
        compiled.load(workspace.patches)


def test_the_real_pins_name_the_release_that_is_patched():
    workspace = Workspace(Path(__file__).parents[2])
    from samebits.patching import pins

    for name, wheel in compiled.load(workspace.patches).items():
        assert wheel.version == pins.get(workspace, name).version
        assert wheel.host["torch"] == "2.11.*+cu130"
        assert len(wheel.files) == sum(map(len, wheel.groups.values()))
