import json
import shutil

import pytest
from typer.testing import CliRunner

from samebits import recipe as recipes
from samebits.cli.contract import app
from samebits.contract import Contract
from samebits.errors import Refused

run = CliRunner()


@pytest.fixture
def case(tmp_path, monkeypatch, operators):
    """A copy of a case in its own folder, with small operators installed."""
    from samebits.ops import registry

    monkeypatch.setattr(registry, "implementations", lambda platform="cpu": operators)
    folder = tmp_path / "qwen3-tiny"
    folder.mkdir()
    shutil.copy(recipes.find("qwen3-tiny"), folder)
    return folder


def test_build_then_show_then_diff(case):
    first = json.loads(run.invoke(app, ["build", str(case), "--json"]).stdout)
    again = json.loads(run.invoke(app, ["build", str(case), "--json"]).stdout)
    assert [first[0]["state"], again[0]["state"]] == ["written", "unchanged"]
    shown = run.invoke(app, ["show", str(case)])
    assert shown.exit_code == 0 and first[0]["digest"] in shown.stdout
    assert "gemm.row.cpu.1" in shown.stdout and "leaves=2" in shown.stdout
    digests = json.loads(run.invoke(app, ["show", str(case), "--digests", "--json"]).stdout)
    assert digests[0]["file"] == first[0]["digest"]
    same = run.invoke(app, ["diff", str(case), str(case / "contract.json")])
    assert (same.exit_code, same.stdout) == (0, "")


@pytest.mark.parametrize("options", [[], ["--json"], ["--digests"]])
def test_show_says_that_sources_are_not_those_that_are_bound(case, monkeypatch, options):
    run.invoke(app, ["build", str(case)])
    whole = run.invoke(app, ["show", str(case), *options])
    assert (whole.exit_code, whole.stderr) == (0, "")
    monkeypatch.setattr("samebits.contract.model.source_hash", lambda modules: "0" * 64)
    changed = run.invoke(app, ["show", str(case), *options])
    assert (changed.exit_code, changed.stdout) == (1, whole.stdout)
    assert "not as bound: rope: source of rope.cpu.1 has hash 0000" in changed.stderr


def test_a_file_at_odds_with_itself_is_told_how_to_make_that_file(case, tmp_path):
    run.invoke(app, ["build", str(case)])
    text = (case / "contract.json").read_text()
    digest = Contract.load(case).digests["semantic"]
    elsewhere = tmp_path / "copy.json"
    for file, hint in (
        (case / "contract.json", f"samebits contract build {case}"),
        (elsewhere, "samebits explain SB0307"),
    ):
        file.write_text(text.replace(digest, "0" * 64))
        with pytest.raises(Refused, match="SB0307") as caught:
            Contract.load(file)
        assert caught.value.hint == hint


def test_diff_exits_1_and_names_the_fields(case, tmp_path):
    run.invoke(app, ["build", str(case)])
    other = tmp_path / "other"
    other.mkdir()
    text = (case / "recipe.yaml").read_text()
    (other / "recipe.yaml").write_text(text.replace("reduction_leaves: 2", "reduction_leaves: 4"))
    run.invoke(app, ["build", str(other)])
    result = run.invoke(app, ["diff", str(case), str(other), "--json"])
    assert result.exit_code == 1
    fields = [row["field"] for row in json.loads(result.stdout)]
    assert "composition.gemm.row.constants.leaves" in fields
    told = run.invoke(app, ["diff", str(case), str(other)]).stdout
    assert "qwen3-tiny: composition.gemm.row.constants.leaves\n  - 2\n  + 4" in told


def test_a_machine_that_is_not_on_record_differs_by_its_answers_alone(case, monkeypatch):
    from samebits.contract import build

    run.invoke(app, ["build", str(case)])
    describe = build.describe
    monkeypatch.setattr(build, "describe", lambda kind: describe(kind) | {"isa": "another"})
    same = run.invoke(app, ["diff", str(case)])
    assert (same.exit_code, same.stdout) == (0, "")
    assert "isa another" in same.stderr and "is not on record; answers as " in same.stderr
    answers = build.run_probes
    wrong = {"rope": "0" * 32}
    monkeypatch.setattr(build, "run_probes", lambda *rest: answers(*rest) | wrong)
    other = run.invoke(app, ["diff", str(case)])
    assert other.exit_code == 1 and "qwen3-tiny: platforms." in other.stdout


def test_an_unreadable_old_contract_is_replaced_and_said_so(case):
    (case / "contract.json").write_text("{}")
    result = run.invoke(app, ["build", str(case)])
    assert result.exit_code == 0 and "SB0321" in result.stderr
    assert "written" in result.stdout


def test_bad_input_is_refused(case):
    result = run.invoke(app, ["show", str(case / "missing.json")])
    assert isinstance(result.exception, Refused) and result.exception.exit_code == 2


@pytest.mark.engine
def test_admit_records_what_two_processes_answer(tmp_path):
    folder = tmp_path / "qwen3-tiny"
    folder.mkdir()
    shutil.copy(recipes.find("qwen3-tiny"), folder)
    assert run.invoke(app, ["build", str(folder)]).exit_code == 0
    from samebits.contract import Contract
    from samebits.contract.build import seal, write

    whole = Contract.load(folder)
    write(seal(dict(whole.data) | {"platforms": {}}), folder / "contract.json")
    result = run.invoke(app, ["admit", str(folder), "--json"])
    assert json.loads(result.stdout)[0]["status"] == "new platform"
    assert Contract.load(folder).raw == whole.raw


def test_a_missing_contract_is_built_only_where_a_recipe_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, hint in (("bare", "samebits case list"), ("a case", "build 'a case'")):
        (tmp_path / folder).mkdir()
        if folder == "a case":
            (tmp_path / folder / "recipe.yaml").write_text("")
        with pytest.raises(Refused, match="SB0303") as caught:
            Contract.load(tmp_path / folder / "contract.json")
        assert caught.value.hint.endswith(hint)
