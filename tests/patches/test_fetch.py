"""Fetching through pip's configuration: resume, truncation, refusal, a full disk."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from toy_project import Project

from samebits.patching import fetch


class Index(BaseHTTPRequestHandler):
    """A package index with one sdist. Class attributes set how it misbehaves."""

    content = b""
    ranges = True
    cut_after: int | None = None  # bytes sent of each answer, then the connection ends
    requests: list[str | None]

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self.path == "/simple/toy/":
            body = b'<html><body><a href="/files/toy-1.0.tar.gz">toy-1.0.tar.gz</a></body></html>'
            return self.answer(200, body, "text/html")
        if self.path != "/files/toy-1.0.tar.gz":
            return self.answer(404, b"", "text/plain")
        asked = self.headers.get("Range")
        self.requests.append(asked)
        if asked and self.ranges:
            start = int(re.match(r"bytes=(\d+)-", asked).group(1))
            if start >= len(self.content):
                return self.answer(416, b"", "text/plain")
            return self.answer(206, self.content[start:], "application/gzip", self.cut_after)
        return self.answer(200, self.content, "application/gzip", self.cut_after)

    def answer(self, status, body, kind, cut=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True


@pytest.fixture
def index(project: Project, monkeypatch):
    handler = type("Handler", (Index,), {"content": project.sdist.read_bytes(), "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    project.cached.unlink()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def part(project: Project):
    return project.cached.with_name(project.cached.name + ".part")


def test_download(project: Project, index, part):
    assert project.run("apply", "toy").code == 0
    assert project.cached.read_bytes() == index.content
    assert index.requests == [None]
    assert not part.exists()


def test_a_rotted_download_is_fetched_again(project: Project, index):
    project.cached.write_bytes(b"rotted")
    assert project.run("apply", "toy").code == 0
    assert project.cached.read_bytes() == index.content


def test_connection_that_keeps_ending_is_taken_up_again(project: Project, index):
    index.cut_after = len(index.content) // 3
    assert project.run("apply", "toy").code == 0
    assert project.cached.read_bytes() == index.content
    assert index.requests[0] is None
    assert len(index.requests) >= 3
    assert all(asked and asked.startswith("bytes=") for asked in index.requests[1:])


def test_interrupted_download_is_kept_and_continued(project: Project, index, part):
    index.cut_after = 10
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0106")
    assert done.error.hint == f"samebits patch --root {project.root} apply toy"
    assert not project.cached.exists()
    arrived = part.stat().st_size
    assert part.read_bytes() == index.content[:arrived]
    assert 0 < arrived < len(index.content)
    index.cut_after, index.requests = None, []
    assert project.run("apply", "toy").code == 0
    assert index.requests == [f"bytes={arrived}-"]
    assert project.cached.read_bytes() == index.content


def test_server_without_ranges_starts_over(project: Project, index, part):
    part.write_bytes(b"some other bytes")
    index.ranges = False
    assert project.run("apply", "toy").code == 0
    assert project.cached.read_bytes() == index.content


def test_wrong_content_is_not_used(project: Project, index, part):
    index.content = index.content[:-1] + bytes([index.content[-1] ^ 1])
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0105")
    assert not project.cached.exists()
    assert not part.exists()  # continuing it could only fail again


def test_shorter_content_is_not_used(project: Project, index):
    index.content = index.content[:-5]
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0106")
    assert not project.cached.exists()


def test_stale_longer_part_is_not_used(project: Project, index, part):
    part.write_bytes(index.content + b"more")
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0105")
    assert project.run("apply", "toy").code == 0


def test_index_without_the_release(project: Project, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", str(project.root / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0104")


def test_find_links_folder_without_index(project: Project, index, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project.root))
    assert project.run("apply", "toy").code == 0
    assert index.requests == []


def test_full_disk_while_downloading(project: Project, index, part):
    part.symlink_to("/dev/full")  # every write there is refused with ENOSPC
    done = project.run("apply", "toy")
    assert (done.code, done.error_id) == (2, "SB0107")
    assert not project.cached.exists()
    part.unlink()
    assert project.run("apply", "toy").code == 0


def test_full_disk_while_unpacking(project: Project, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "copyfile", full)
        project.cached.unlink()
        done = project.run("apply", "toy", "--from", project.sdist)
        assert (done.code, done.error_id) == (2, "SB0107")
        assert not list(project.cached.parent.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("tarfile.TarFile.extractall", full)
        done = project.run("apply", "toy", "--from", project.sdist)
        assert (done.code, done.error_id) == (2, "SB0107")
        assert not [p for p in (project.root / "build/toy").iterdir() if len(p.name) == 40]
    assert project.run("apply", "toy").code == 0


def test_pip_settings(monkeypatch, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://one.example/simple\nextra-index-url =\n"
        "    https://two.example/simple\n    https://three.example/simple\n"
        "[download]\ntrusted-host = two.example\n[install]\nindex-url = https://no.example/simple\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    settings = fetch.pip_settings()
    assert settings.index_url == "https://one.example/simple"
    assert settings.extra_index_urls[-2:] == [
        "https://two.example/simple",
        "https://three.example/simple",
    ]
    assert settings.trusted_hosts == ["two.example"]
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.example/simple")
    assert fetch.pip_settings().index_url == "https://env.example/simple"
