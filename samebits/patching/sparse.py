"""A patched tree without its repository: some top folders of it, and the listing of all of it.

`build/<upstream>/<tree-id>.files` has one line a file, `mode blob path`, for the whole tree. The
listing hashes to the tree id, so it needs no trust, and the files that are there are compared with
their blob ids. Needs no git: a bundle's host may have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

Listing = dict[str, tuple[str, str]]  # path -> mode, blob id


def listing_path(folder: Path) -> Path:
    """Where the listing of a tree's folder lies."""
    return folder.with_name(f"{folder.name}.files")


def write_listing(files: Listing) -> str:
    """Text of a listing."""
    return "".join(f"{mode} {blob} {path}\n" for path, (mode, blob) in sorted(files.items()))


def read_listing(text: str) -> Listing:
    """Inverse of `write_listing`; ValueError for a line of another form."""
    files = {}
    for line in text.splitlines():
        mode, blob, path = line.split(" ", 2)
        files[path] = (mode, blob)
    return files


def blob_id(content: bytes) -> str:
    """git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def tree_id(files: Listing) -> str:
    """git's tree id of a listing."""
    entries: list[tuple[str, str, str]] = []  # name for sorting, mode, id
    below: dict[str, Listing] = {}
    for path, (mode, blob) in files.items():
        name, slash, rest = path.partition("/")
        if slash:
            below.setdefault(name, {})[rest] = (mode, blob)
        else:
            entries.append((name, mode, blob))
    entries += [(f"{name}/", "40000", tree_id(inside)) for name, inside in below.items()]
    body = b"".join(
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(found)
        for name, mode, found in sorted(entries, key=lambda entry: entry[0].encode())
    )
    return hashlib.sha1(b"tree %d\0" % len(body) + body).hexdigest()


def kept(paths: Iterable[str]) -> list[str]:
    """The paths that a process which imports the tree needs: its package and the metadata.

    A release's metadata lies in `NAME.egg-info` and its package in the folder named by the first
    word of NAME; tests, documents, C++ sources and tools stay behind.
    """
    files = list(paths)
    metadata = {p.partition("/")[0] for p in files if ".egg-info/" in p}
    packages = {name.removesuffix(".egg-info").partition("_")[0] for name in metadata}
    return [p for p in files if p.partition("/")[0] in metadata | packages]


def problem(folder: Path, by_products: Iterable[str], also: Iterable[str] = ()) -> str | None:
    """Why `folder` is not the packages of the tree that it is named after; None where it is.

    by_products   patterns of files that running a tree leaves behind
    also          further paths that were verified by other means
    """
    try:
        files = read_listing(listing_path(folder).read_text())
    except (OSError, ValueError) as error:
        return f"no readable {listing_path(folder).name}: {error}"
    found = tree_id(files)
    if found != folder.name:
        return f"its listing is that of tree {found}"
    wanted = set(kept(files))
    patterns = tuple(by_products)
    present = {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if (path.is_symlink() or not path.is_dir()) and not _left(path, folder, patterns)
    } - set(also)
    wrong = sorted(wanted ^ present) or [
        path for path in sorted(wanted) if not _same(folder / path, files[path])
    ]
    if wrong:
        return ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return None


def _left(path: Path, folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a path matches the by-products of running: `folder/`, or a pattern of names."""
    parents = path.relative_to(folder).parts[:-1]
    return any(
        pattern.rstrip("/") in parents if pattern.endswith("/") else path.match(pattern)
        for pattern in patterns
    )


def _same(path: Path, entry: tuple[str, str]) -> bool:
    mode, blob = entry
    if path.is_symlink() or mode not in ("100644", "100755"):
        return False  # a package folder of the pinned upstreams has neither links nor submodules
    runs = bool(path.stat().st_mode & 0o100)
    return runs == (mode == "100755") and blob_id(path.read_bytes()) == blob
