import dataclasses
import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from samebits import bits
from samebits.errors import Refused
from samebits.weights import transport
from samebits.weights.transport import Manifest, receive, send

DIGEST = "c0ffee"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Private shared-memory and temporary folders."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(transport, "_SHARED_MEMORY", memory)
    monkeypatch.setattr(transport.tempfile, "gettempdir", lambda: str(temporary))
    return memory, temporary


def tensors():
    generator = torch.Generator().manual_seed(1)
    return {
        "a.weight": torch.randn(33, 17, generator=generator).bfloat16(),
        "b.bias": torch.randn(5, generator=generator),
        "c.scalar": torch.tensor(2.0),
        "d.empty": torch.empty(0, 4, dtype=torch.bfloat16),
    }


def refused(error_id, manifest, **changes):
    arguments = {"contract_digest": DIGEST, "names": tensors().keys(), **changes}
    with pytest.raises(Refused) as caught:
        receive(manifest, **arguments)
    assert caught.value.error_id == error_id
    return caught.value


def test_round_trip_keeps_every_bit_and_unlinks():
    sent = tensors()
    with send(sent.items(), step=3, contract_digest=DIGEST) as manifest:
        path = Path(manifest.segment)
        assert path.stat().st_mode & 0o777 == 0o600
        again = Manifest.from_json(manifest.to_json())
        assert again == manifest
        got = dict(receive(again, contract_digest=DIGEST, names=sent.keys(), step=3))
    assert not path.exists()
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].shape == tensor.shape
        assert got[name].dtype == tensor.dtype
        assert bits.compare(got[name], tensor).mismatches == 0
    assert manifest.checksums()["a.weight"] == bits.mixsum(sent["a.weight"])


def test_what_is_sent_has_to_be_what_the_sender_computes_with():
    live = {name: bits.mixsum(tensor) for name, tensor in tensors().items()}
    with send(tensors().items(), step=0, contract_digest=DIGEST, live=live) as manifest:
        assert manifest.checksums() == live
    sent = tensors() | {"b.bias": tensors()["b.bias"] + 1}
    reached = []

    def to_the_end():
        yield from sent.items()
        reached.append("end")  # other ranks are in the same collective

    with (
        pytest.raises(Refused, match=r"1 of 4 tensors, first `b\.bias`") as caught,
        send(to_the_end(), step=7, contract_digest=DIGEST, live=live),
    ):
        pass
    assert caught.value.error_id == "SB0710" and reached == ["end"]
    assert "at step 7" in caught.value.required


def test_a_live_tensor_that_is_not_sent_is_refused():
    live = {name: bits.mixsum(tensor) for name, tensor in tensors().items()}
    sent = [(name, tensor) for name, tensor in tensors().items() if name != "a.weight"]
    with (
        pytest.raises(Refused, match=r"SB0707(?s:.*)1 missing \(a\.weight\)"),
        send(sent, step=0, contract_digest=DIGEST, live=live),
    ):
        pass


def test_received_tensors_are_private():
    with send(tensors().items(), step=0, contract_digest=DIGEST) as manifest:
        first = dict(receive(manifest, contract_digest=DIGEST, names=tensors().keys()))
        first["a.weight"].zero_()
        second = dict(receive(manifest, contract_digest=DIGEST, names=tensors().keys()))
    assert bits.equal(second["a.weight"], tensors()["a.weight"])


def test_one_flipped_byte_is_refused_before_anything_is_yielded():
    with send(tensors().items(), step=0, contract_digest=DIGEST) as manifest:
        target = manifest.entries[1]
        with open(manifest.segment, "r+b") as segment:
            segment.seek(target.offset)
            byte = segment.read(1)[0]
            segment.seek(target.offset)
            segment.write(bytes([byte ^ 1]))
        assert "`b.bias`" in refused("SB0705", manifest).seen


def test_other_contract_and_other_step():
    with send(tensors().items(), step=4, contract_digest=DIGEST) as manifest:
        refused("SB0706", manifest, contract_digest="beef")
        refused("SB0708", manifest, step=5)


def test_names_must_be_exactly_the_expected_ones():
    sent = tensors()
    with send(sent.items(), step=0, contract_digest=DIGEST) as manifest:
        assert (
            "1 missing (lm_head.weight)"
            in refused("SB0707", manifest, names=[*sent, "lm_head.weight"]).seen
        )
        assert "1 unknown (a.weight)" in refused("SB0707", manifest, names=list(sent)[1:]).seen
        doubled = dataclasses.replace(manifest, entries=(*manifest.entries, manifest.entries[0]))
        assert "1 doubled (a.weight)" in refused("SB0707", doubled).seen


@pytest.mark.parametrize(
    "items",
    [
        [("a", torch.zeros(1)), ("a", torch.zeros(1))],
        [("a", torch.zeros(1, dtype=torch.int64))],
    ],
)
def test_sender_refuses_doubled_names_and_other_dtypes_and_cleans_up(items, folders):
    with pytest.raises(Refused, match="SB0707"), send(items, step=0, contract_digest=DIGEST):
        pass
    assert not list(folders[0].iterdir())


def test_segment_gone_short_or_foreign(folders):
    with send(tensors().items(), step=0, contract_digest=DIGEST) as manifest:
        os.truncate(manifest.segment, 16)
        refused("SB0708", manifest)
    refused("SB0708", manifest)
    foreign = folders[1] / "other"
    foreign.write_bytes(bytes(10_000))
    refused("SB0708", dataclasses.replace(manifest, segment=str(foreign)))


@pytest.mark.parametrize(
    "edit",
    [
        lambda raw: raw.update(extra=1),
        lambda raw: raw.pop("step"),
        lambda raw: raw.update(step="3"),
        lambda raw: raw["entries"][0].update(offset=-1),
        lambda raw: raw["entries"][0].update(dtype="int4"),
        lambda raw: raw["entries"][0].update(shape=[1.5]),
        lambda raw: raw["entries"][0].update(checksum="xyz"),
        lambda raw: raw["entries"][0].update(unknown=1),
    ],
)
def test_malformed_manifests(edit):
    with send(tensors().items(), step=0, contract_digest=DIGEST) as manifest:
        raw = json.loads(manifest.to_json())
    edit(raw)
    with pytest.raises(Refused, match="SB0708"):
        Manifest.from_json(json.dumps(raw))
    with pytest.raises(Refused, match="SB0708"):
        Manifest.from_json("[1")


def test_unlinked_after_an_error(folders):
    with (
        pytest.raises(RuntimeError),
        send(tensors().items(), step=0, contract_digest=DIGEST) as manifest,
    ):
        raise RuntimeError
    assert not Path(manifest.segment).exists()


def _send_and_die(memory):
    transport._SHARED_MEMORY = memory
    with send(tensors().items(), step=0, contract_digest=DIGEST):
        os.kill(os.getpid(), signal.SIGKILL)


def test_next_send_removes_what_a_killed_process_left(folders):
    child = multiprocessing.get_context("fork").Process(target=_send_and_die, args=(folders[0],))
    child.start()
    child.join(30)
    assert len(list(folders[0].iterdir())) == 1
    with send(tensors().items(), step=0, contract_digest=DIGEST) as outer:
        assert [str(p) for p in folders[0].iterdir()] == [outer.segment]
        with send(tensors().items(), step=1, contract_digest=DIGEST):
            assert Path(outer.segment).exists()  # a live process keeps its segment


class _SmallFile:
    """A raw file that has room for `room` bytes in all."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def write(self, data):
        if self._file.tell() + len(data) > self._room:
            raise OSError(errno.ENOSPC, "full")
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.fixture(params=[None, 48])
def stage(request, monkeypatch):
    """Tensors are sent whole, or by way of so many bytes, as those of a GPU are."""
    if request.param:
        staged = torch.empty(request.param, dtype=torch.uint8)
        monkeypatch.setattr(transport, "_staging", lambda device: staged)


def test_tensors_in_parts_arrive_whole(stage):
    sent = tensors()
    with send(sent.items(), step=0, contract_digest=DIGEST, size=1 << 12) as manifest:
        got = dict(receive(manifest, contract_digest=DIGEST, names=sent.keys()))
    assert all(bits.compare(got[name], sent[name]).mismatches == 0 for name in sent)
    assert [entry.offset for entry in manifest.entries] == [0, 1152, 1216, 1280]


def test_full_shared_memory_moves_to_the_temporary_folder_then_refuses(folders, monkeypatch, stage):
    create, room = transport._create, {folders[0]: 1200, folders[1]: 10_000}
    monkeypatch.setattr(
        transport, "_create", lambda path: _SmallFile(create(path), room[path.parent])
    )
    sent = tensors()
    with send(sent.items(), step=0, contract_digest=DIGEST) as manifest:
        assert Path(manifest.segment).parent == folders[1]
        assert not list(folders[0].iterdir())
        got = dict(receive(manifest, contract_digest=DIGEST, names=sent.keys()))
        assert bits.equal(got["a.weight"], sent["a.weight"])
    room[folders[1]] = 1200
    with (
        pytest.raises(Refused, match="SB0709"),
        send(sent.items(), step=0, contract_digest=DIGEST),
    ):
        pass
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_reserves_room_in_the_first_folder_that_has_it_or_refuses(folders, monkeypatch):
    reserved = []

    def fallocate(file, offset, size):
        folder = Path(os.readlink(f"/proc/self/fd/{file}")).parent
        reserved.append((folder, offset, size))
        if size > room[folder]:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(transport.os, "posix_fallocate", fallocate)
    room = {folders[0]: 5000, folders[1]: 6000}
    sent = tensors()
    with send(sent.items(), step=0, contract_digest=DIGEST, size=5500) as manifest:
        assert Path(manifest.segment).parent == folders[1]
        assert not list(folders[0].iterdir())
        got = dict(receive(manifest, contract_digest=DIGEST, names=sent.keys()))
        assert bits.equal(got["a.weight"], sent["a.weight"])
    assert reserved == [(folder, 0, 5500) for folder in folders]
    with (
        pytest.raises(Refused, match="SB0709") as caught,
        send(sent.items(), step=0, contract_digest=DIGEST, size=7000),
    ):
        pass
    assert "room for 7000 more bytes" in caught.value.required
    assert not [*folders[0].iterdir(), *folders[1].iterdir()]


def test_reserved_memory_that_is_not_filled_does_not_hide_a_short_transfer():
    with send(tensors().items(), step=0, contract_digest=DIGEST, size=1 << 20) as manifest:
        assert Path(manifest.segment).stat().st_size == 1 << 20
        got = dict(receive(manifest, contract_digest=DIGEST, names=tensors().keys()))
        assert bits.equal(got["b.bias"], tensors()["b.bias"])
        target = manifest.entries[0]
        with open(manifest.segment, "r+b") as segment:
            segment.seek(target.offset)
            segment.write(bytes(target.nbytes))
        refused("SB0705", manifest)
