"""Get a pinned sdist: from a local file, or through the user's own pip configuration.

The file is looked up with `unearth` under pip's settings and then read with a plain GET that
continues a `.part` file. It is used only after its size and sha256 agree with the pin.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits import files
from samebits.errors import Refused, shown
from samebits.patching.pins import Pin
from samebits.patching.workspace import Workspace

ATTEMPTS = 4


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_file(path: Path, pin: Pin, hint: str) -> None:
    """Refuse `path` unless its size and sha256 are the pin's."""
    size = path.stat().st_size
    if size != pin.size:
        kind = "truncated: " if size < pin.size else ""
        seen, required = f"{kind}{size} bytes", f"{pin.size} bytes"
    else:
        seen, required = f"sha256 {sha256(path)}", f"sha256 {pin.sha256}"
        if seen == required:
            return
    raise Refused(
        "SB0105",
        seen=f"{shown(path)}: {seen}",
        required=f"{pin.sdist}: {required}",
        hint=hint,
    )


def check_given(given: Path, pin: Pin) -> None:
    """Refuse a file that a user passed unless it is the pinned sdist."""
    hint = f"samebits patch apply {pin.name}"  # fetches the right one
    if not given.is_file():
        raise Refused("SB0105", seen=f"{given} is no file", required=pin.sdist, hint=hint)
    check_file(given, pin, hint)


def sdist(workspace: Workspace, pin: Pin, given: Path | None = None) -> Path:
    """The verified sdist in `build/sdist/`, copied from `given` or fetched where it is missing.

    A bad file there is moved aside first; nothing is deleted.
    """
    target = workspace.build / "sdist" / pin.sdist
    other = f"samebits patch apply {pin.name} --from FILE"
    with workspace.lock(f"sdist-{pin.name}"), workspace.writing():
        if given is not None:
            check_given(given, pin)
        if target.exists():
            try:
                check_file(target, pin, other)
            except Refused as refused:
                aside = shown(files.move_aside(target, "bad"))
                print(f"{refused.seen}: moved to {aside}", file=sys.stderr)
            else:
                return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        if given is not None:
            part.unlink(missing_ok=True)
            try:
                shutil.copyfile(given, part)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            part.replace(target)
            return target
        found = find(pin.distribution, pin.version, filename=pin.sdist)
        download(workspace, found, part, pin.size, f"samebits patch apply {pin.name}")
        try:
            check_file(part, pin, other)
        except Refused:
            part.unlink()  # whole, and wrong: continuing it can only fail again
            raise
        part.replace(target)
        return target


# --- looking up -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A file that an index offers, and the HTTP client (with the user's settings) to read it."""

    url: str
    filename: str
    sha256: str | None
    client: Any


@dataclass
class PipSettings:
    """The part of pip's configuration that says where packages come from."""

    index_url: str | None = None
    extra_index_urls: list[str] = field(default_factory=list)
    find_links: list[str] = field(default_factory=list)
    trusted_hosts: list[str] = field(default_factory=list)
    no_index: bool = False
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    timeout: float = 30.0


def pip_settings() -> PipSettings:
    """What `pip` of this interpreter uses: `[global]`, then `[download]`, then PIP_* variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    ).stdout
    values: dict[str, dict[str, str]] = {"global": {}, "download": {}, "env": {}}
    for line in listed.splitlines():
        if match := re.fullmatch(r"(global|download|:env:)\.([a-z-]+)=(.*)", line.strip()):
            section, key, value = match.groups()
            values[section.strip(":")][key.removeprefix("default-")] = ast.literal_eval(value)
    for name, value in os.environ.items():  # also where pip is not installed
        if name.startswith("PIP_") and value:
            key = name[4:].lower().replace("_", "-").removeprefix("default-")
            values["env"][key] = value
    merged = {**values["global"], **values["download"], **values["env"]}
    ca = (
        merged.get("cert")
        or os.environ.get("REQUESTS_CA_BUNDLE")
        or os.environ.get("CURL_CA_BUNDLE")
    )
    return PipSettings(
        index_url=merged.get("index-url"),
        extra_index_urls=merged.get("extra-index-url", "").split(),
        find_links=merged.get("find-links", "").split(),
        trusted_hosts=merged.get("trusted-host", "").split(),
        no_index=merged.get("no-index", "").lower() in ("1", "true", "yes", "on"),
        cert=ca,
        client_cert=merged.get("client-cert"),
        proxy=merged.get("proxy"),
        timeout=float(merged.get("timeout", 30)),
    )


def find(distribution: str, version: str, filename: str | None = None) -> Found:
    """Look up one file of a release: the sdist, or `filename`, which may name a wheel.

    Refuses where the index does not offer it.
    """
    import httpx2
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers import PyPIClient

    settings = pip_settings()
    wheel = filename is not None and filename.endswith(".whl")
    finder = PackageFinder(no_binary=[":all:"], ignore_compatibility=True)
    default = [source["url"] for source in finder.sources]  # the library's own default index
    indexes = (
        []
        if settings.no_index
        else [
            *([settings.index_url] if settings.index_url else default),
            *settings.extra_index_urls,
        ]
    )
    context = ssl.create_default_context(cafile=settings.cert) if settings.cert else True
    client: Any = PyPIClient(
        trusted_hosts=settings.trusted_hosts,
        verify=context,
        cert=settings.client_cert,
        timeout=settings.timeout,
        follow_redirects=True,
        proxy=settings.proxy,
    )
    client.auth = MultiDomainBasicAuth(index_urls=indexes)
    finder = PackageFinder(
        session=client,
        index_urls=indexes,
        find_links=[link for link in settings.find_links if "://" in link or Path(link).exists()],
        trusted_hosts=settings.trusted_hosts,
        no_binary=[] if wheel else [":all:"],
        only_binary=[":all:"] if wheel else [],
        ignore_compatibility=True,
    )
    if not indexes and not settings.find_links:
        finder.sources.clear()
    problem = "no such file of that release in any configured index"
    try:
        for package in finder.find_matches(f"{distribution}=={version}", allow_yanked=True):
            link = package.link
            if link.is_wheel != wheel or (filename and link.filename != filename):
                continue
            hashes = link.hashes or {}
            known = hashes.get("sha256")
            return Found(
                link.url_without_fragment,
                link.filename,
                known[0] if isinstance(known, list) else known,
                client,
            )
    except httpx2.HTTPError as error:
        problem = f"{type(error).__name__}: {error}"
    raise Refused(
        "SB0104",
        seen=f"{distribution} {version}: {problem}",
        required=filename or "the sdist of that release",
        hint="pip config list",
    )


# --- reading --------------------------------------------------------------------------------


def download(
    workspace: Workspace, found: Found, part: Path, size: int | None, command: str
) -> None:
    """Read `found` into `part`, continuing what an earlier run left there.

    A connection that ends early is taken up again a few times, then refused with what arrived
    kept on disk. Progress goes to stderr.
    """
    import httpx2
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    reason = "the connection ended early"
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(found.filename, total=size)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(0.2 * 2**attempt, 5))
            try:
                if _read(found, part, size, lambda n: progress.update(task, completed=n)):
                    return
                reason = "the connection ended early"
            except (httpx2.HTTPError, httpx2.StreamError) as error:
                reason = f"{type(error).__name__}: {error}"
                status = getattr(getattr(error, "response", None), "status_code", 0)
                if 400 <= status < 500:
                    break
    arrived = part.stat().st_size if part.exists() else 0
    raise Refused(
        "SB0106",
        seen=f"{arrived} of {size or 'unknown'} bytes; {reason}",
        required=f"all of {found.filename}",
        hint=command,
    )


def _read(found: Found, part: Path, size: int | None, advance) -> bool:
    """One GET; True when the file is whole."""
    have = part.stat().st_size if part.exists() else 0
    if size is not None and have >= size:
        return True
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with found.client.get_stream(found.url, headers=headers) as response:
        if response.status_code == 416:  # what is there is no prefix of what the server has
            part.unlink()
            return False
        response.raise_for_status()
        whole = size
        if whole is None and "Content-Length" in response.headers:
            whole = int(response.headers["Content-Length"]) + (
                have if response.status_code == 206 else 0
            )
        resumed = response.status_code == 206
        with part.open("ab" if resumed else "wb") as out:
            count = have if resumed else 0
            advance(count)
            for chunk in response.iter_raw():  # as it arrives: nothing is lost in a larger chunk
                out.write(chunk)
                count += len(chunk)
                advance(count)
            out.flush()
    return whole is None or count >= whole
