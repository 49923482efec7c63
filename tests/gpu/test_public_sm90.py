"""Public operators on Hopper: what their check counts as wrong anywhere; the check on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from samebits.bench import gpu_hybrid, gpu_public
from samebits.bench.gpu_public import Area
from samebits.errors import Refused


def refused(error_id: str) -> None:
    raise Refused(error_id, seen="", required="", hint="samebits doctor")


@pytest.mark.parametrize(
    "check",
    [
        lambda area, x: area.same("a bit", x * torch.tensor([1, -1, 1]), x),
        lambda area, x: area.same("a NaN", torch.where(x > 0, torch.nan, x), x),
        lambda area, x: area.same("a shape", x[:2], x),
        lambda area, x: area.same("a dtype", x.bfloat16(), x),
        lambda area, x: area.same("nothing", x[:0], x[:0]),
        lambda area, x: area.close("an error", x + 0.1, x),
        lambda area, x: area.close("a NaN", x * torch.nan, x),
        lambda area, x: area.close("no gradient", None, x),
        lambda area, x: area.true("a statement", False),
        lambda area, x: area.refuses("SB0413", lambda: refused("SB0420")),
        lambda area, x: area.refuses("SB0413", lambda: None),
    ],
)
def test_what_is_wrong_is_counted(check):
    area = Area("planted")
    check(area, torch.tensor([1.0, 0.0, -2.0]))
    assert area.checks == 1 and len(area.wrong) == 1


def test_what_is_right_is_not():
    area, x = Area("right"), torch.tensor([1.0, torch.nan])
    area.same("bits", x.clone(), x)
    area.close("a gradient", x[:1] + 1e-3, x[:1])
    area.true("a statement", True)
    area.refuses("SB0413", lambda: refused("SB0413"))
    assert area.checks == 4 and not area.wrong


def test_an_area_that_breaks_does_not_hide_the_others(monkeypatch, capsys):
    def breaks(area: Area) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def holds(area: Area) -> None:
        area.true("holds", True)

    def compares_nothing(area: Area) -> None:
        pass

    run, report = gpu_public.run, gpu_public.report
    assert report(map(run, (breaks, holds))) == 1
    out = capsys.readouterr().out
    assert "planted" in out and out.splitlines()[-1].endswith("ok")
    assert report(map(run, (holds,))) == 0
    assert report(map(run, (compares_nothing,))) == 1


def test_areas_run_in_processes_of_their_own(capsys):
    if torch.cuda.is_available():
        pytest.skip("the areas would pass")
    assert gpu_public.report(gpu_public.isolated((gpu_hybrid.check_conv,))) == 1
    out = capsys.readouterr().out
    assert re.search(r"conv: Traceback[^|]*(CUDA|NVIDIA)", out, re.S), out
    assert out.splitlines()[-1].startswith("conv ") and out.endswith("1 WRONG\n")


@pytest.mark.gpu
@pytest.mark.parametrize("areas", [gpu_public.AREAS, gpu_hybrid.AREAS])
def test_public_operators(areas):
    assert gpu_public.report(gpu_public.isolated(areas)) == 0
