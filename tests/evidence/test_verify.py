import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from samebits import evidence
from samebits.cli.evidence import app
from samebits.contract import Contract, canonical
from samebits.contract.build import seal
from samebits.errors import NotObserved, Refused
from samebits.evidence import current, pairs

FIRST = {"sequence": 0, "position": 1, "token": 2, "left": "00", "right": "01"}


@pytest.fixture
def written(good, recipe):
    return evidence.write(good, recipe.evidence_path)


def refused(path) -> str:
    with pytest.raises(Refused) as error:
        evidence.verify(path)
    assert error.value.exit_code == 2
    return error.value.error_id


def test_good_evidence_of_a_file_and_of_a_case(written, recipe):
    for target in (recipe.evidence_path, recipe.folder):
        result = evidence.verify(target)
        assert (result.status, result.exit_code, result.stale) == ("EQUAL", 0, ())
        assert result.as_dict()["scope"] == recipe.scope != ""


def test_not_observed_exits_3_and_different_exits_1(run, recipe, make_rows):
    evidence.write(run(comparisons=make_rows(recipe, "A", tokens=1)), recipe.evidence_path)
    assert evidence.verify(recipe.folder).exit_code == 3
    bad = make_rows(
        recipe, "A", mismatches=1, max_abs=1.0, first=FIRST, streams=("a" * 64, "b" * 64)
    )
    evidence.write(run(comparisons=bad), recipe.evidence_path)
    assert evidence.verify(recipe.folder).exit_code == 1


def test_a_case_without_evidence_is_not_observed(recipe):
    with pytest.raises(NotObserved, match="SB0805"):
        evidence.verify(recipe.folder)


# Forgeries. Each edit is what somebody might change; all but the first two recompute the digest.


def test_a_forged_digest_is_refused(forge):
    path = forge(lambda d: d["predicate"].update(integrity="0" * 64), honest_digest=False)
    assert refused(path) == "SB0802"


def test_a_changed_subject_is_refused(forge):
    def edit(data):
        data["subject"][0]["digest"]["gitTree"] = "9" * 40

    assert refused(forge(edit, honest_digest=False)) == "SB0802"


def test_a_truncated_file_is_refused(written, recipe):
    recipe.evidence_path.write_bytes(written.raw[: len(written.raw) // 2])
    assert refused(recipe.evidence_path) == "SB0303"


def test_an_empty_file_is_refused(recipe):
    recipe.evidence_path.parent.mkdir()
    recipe.evidence_path.write_bytes(b"")
    assert refused(recipe.evidence_path) == "SB0303"


@pytest.mark.parametrize("where", ["statement", "predicate", "comparison"])
def test_an_unknown_key_is_refused(forge, where):
    def edit(data):
        predicate = data["predicate"]
        targets = {
            "statement": data,
            "predicate": predicate,
            "comparison": predicate["comparisons"][0],
        }
        targets[where]["waived"] = "yes"

    assert refused(forge(edit)) == "SB0801"


def test_a_newer_predicate_is_refused(forge):
    path = forge(lambda d: d.update(predicateType="urn:samebits:evidence:v2"))
    assert refused(path) == "SB0801"


def test_a_typed_verdict_is_refused(forge):
    assert refused(forge(lambda d: d["predicate"].update(verdict="NOT_OBSERVED"))) == "SB0803"


def test_a_removed_control_is_refused(forge):
    def edit(data):
        for record in data["predicate"]["comparisons"]:
            if record["leg"] == "A":
                record["control"] = None

    assert refused(forge(edit)) == "SB0803"


def test_a_lowered_token_count_is_refused(forge):
    def edit(data):
        for record in data["predicate"]["comparisons"]:
            if record["leg"] == "B":
                record["tokens"] = 5

    assert refused(forge(edit)) == "SB0803"


@pytest.mark.parametrize(
    "changes",
    [
        {"mismatches": 4},
        {"mismatches": 10**6},
        {"first_difference": FIRST},
        {"streams": [{"left": "a" * 64, "right": "b" * 64}]},
        {"max_abs": evidence.number(0.5)},
        {"max_abs": {"decimal": "0.0", "bits": "3ff0000000000000", "dtype": "float64"}},
        {"max_abs": None},
        {"control": evidence.control("stock", 3, 4, 0.1)},
        {"control": evidence.control("stock", 3, 3, 0.1) | {"kind": "planted"}},
    ],
)
def test_counts_that_contradict_each_other_are_refused(forge, changes):
    def edit(data):
        data["predicate"]["comparisons"][1].update(changes)

    assert refused(forge(edit)) == "SB0804"


def test_hidden_mismatches_are_refused(run, recipe, make_row, tmp_path):
    """A DIFFERENT run whose mismatches were typed to zero still has two unequal streams."""
    bad = make_row(
        "A",
        "decode-alone/decode-mixed",
        recipe,
        mismatches=1,
        max_abs=1.0,
        first=FIRST,
        streams=("a" * 64, "b" * 64),
    )
    data = json.loads(run(comparisons=[bad]).raw)
    data["predicate"]["comparisons"][0].update(mismatches=0, max_abs=evidence.number(0.0))
    data["predicate"]["verdict"] = "NOT_OBSERVED"
    data["predicate"]["integrity"] = evidence.statement.integrity(data)
    path = recipe.folder / "hidden.json"
    path.write_bytes(canonical.encode(data))
    assert refused(path) == "SB0804"


def test_asking_for_less_than_the_recipe_is_refused(forge):
    def edit(data):
        data["predicate"]["parameters"]["legs"]["B"]["tokens"] = 1

    assert refused(forge(edit)) == "SB0807"


# Stale, by each cause.


def test_a_changed_recipe_is_stale(written, recipe):
    path = recipe.folder / "recipe.yaml"
    path.write_text(path.read_text().replace("kv_blocks: 256", "kv_blocks: 128"))
    result = evidence.verify(recipe.folder)
    assert (result.status, result.exit_code) == ("STALE", 3)
    assert result.stale == ("recipe changed",)


@pytest.mark.parametrize("tree", ["f" * 40, None])
def test_a_changed_or_unrecorded_tree_is_stale(written, recipe, monkeypatch, tree):
    known = current.trees(recipe)
    monkeypatch.setattr(current, "trees", lambda recipe: known | {"megatron": tree})
    result = evidence.verify(recipe.folder)
    assert (result.exit_code, result.stale) == (3, ("tree of megatron changed",))


def test_a_changed_implementation_is_stale(written, recipe, monkeypatch):
    real = current.source_hash

    def changed(modules):
        return "0" * 64 if modules == ["samebits.plan"] else real(modules)

    monkeypatch.setattr(current, "source_hash", changed)
    result = evidence.verify(recipe.folder)
    assert result.exit_code == 3
    assert "implementation/gemm.row.cpu.1 changed" in result.stale
    assert not any(reason.startswith("hooks/") for reason in result.stale)


def test_a_removed_implementation_is_stale(written, recipe, monkeypatch):
    real = current.source_hash

    def gone(modules):
        return real(["samebits.no_such_module"] if modules == ["samebits.plan"] else modules)

    monkeypatch.setattr(current, "source_hash", gone)
    assert "implementation/rope.cpu.1 changed" in evidence.verify(recipe.folder).stale


def test_an_added_hook_is_stale(written, recipe, monkeypatch):
    real = current.hook_modules
    monkeypatch.setattr(
        current,
        "hook_modules",
        lambda engine, *of: [*real(engine, *of), *(["samebits.plan"] if engine == "vllm" else [])],
    )
    assert evidence.verify(recipe.folder).stale == ("hooks/vllm changed",)


@pytest.mark.parametrize("engine", ["vllm", "megatron"])
def test_hooks_of_linear_attention_count_only_where_it_is_bound(engine):
    dense, hybrid = (set(current.hook_modules(engine, gdn)) for gdn in (False, True))
    assert hybrid - dense == {name for name in hybrid if ".gdn" in name} != set()
    named = [{"name": "implementation/gdn.core.cpu.1"}, {"name": "implementation/rope.cpu.1"}]
    assert pairs.has_states(named) and not pairs.has_states(named[1:])


def test_hooks_of_the_other_platform_do_not_count():
    cpu, gpu = (set(current.hook_modules("vllm", False, p)) for p in ("cpu", "sm90"))
    assert gpu - cpu == {name for name in gpu if ".cuda" in name}
    assert cpu - gpu == {name for name in cpu if ".cpu_" in name} != set()
    trainer = (current.hook_modules("megatron", False, p) for p in ("cpu", "sm90"))
    assert len(set(map(tuple, trainer))) == 1


def test_sources_say_their_platform():
    hooks = {"name": "hooks/vllm"}
    assert current.platform_of([hooks, {"name": "implementation/gemm.row.cpu.1"}]) == "cpu"
    assert current.platform_of([hooks, {"name": "implementation/gemm.row.sm90.1"}]) == "sm90"


def test_another_or_a_missing_contract_is_stale(written, recipe):
    path = recipe.contract_path
    data = dict(Contract.load(path).data)
    data["claims"] = json.loads(json.dumps(data["claims"]))
    data["claims"]["topology"]["trainer_tp"]["sizes"] = [1]
    path.write_bytes(seal(data).raw)
    assert evidence.verify(recipe.folder).stale == ("contract changed",)
    path.unlink()
    assert evidence.verify(recipe.folder).stale == ("contract is gone",)


def test_an_admitted_platform_is_not_stale(written, recipe):
    contract = Contract.load(recipe.contract_path)
    (entry,) = contract.data["platforms"].values()
    description = entry["description"] | {"isa": "AVX512"}
    more = {canonical.digest(description): entry | {"description": description}}
    platforms = contract.data["platforms"] | more
    recipe.contract_path.write_bytes(seal(dict(contract.data) | {"platforms": platforms}).raw)
    assert evidence.verify(recipe.folder).status == "EQUAL"


def test_trees_are_read_from_the_pin_file(recipe, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real reader
    from samebits.patching import pins
    from samebits.patching.workspace import Workspace

    copied = Workspace(tmp_path)
    copied.patches.mkdir()
    shutil.copy(Workspace.find().patches / "pins.yaml", copied.patches)
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls: copied))
    pins.record_tree(copied, "vllm", "qwen3-tiny", "5" * 40)
    assert current.trees(recipe)["vllm"] == "5" * 40


def test_a_statement_is_superseded_and_never_edited(written, run, recipe):
    later = {"started": "2025-02-01T00:00:00Z", "finished": "2025-02-01T00:10:00Z"}
    newer = evidence.write(run(happenstance=later), recipe.evidence_path)
    assert newer.predicate["supersedes"]["statement"] == written.digest
    assert evidence.verify(recipe.folder).statement.digest == newer.digest
    assert [f.name for f in recipe.evidence_path.parent.iterdir()] == ["evidence.json"]


def test_verify_runs_without_torch(written, recipe):
    script = f"""
        import sys
        sys.modules["torch"] = None
        from samebits import evidence
        from samebits.evidence import current, pairs
        current.trees = lambda recipe: {current.trees(recipe)!r}
        raise SystemExit(evidence.verify({str(recipe.folder)!r}).exit_code)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert done.returncode == 0


def test_command_line(written, recipe):
    run = CliRunner()
    text = run.invoke(app, ["verify", str(recipe.folder)])
    assert text.exit_code == 0 and text.stdout.rstrip().endswith(
        f"qwen3-tiny: EQUAL ({recipe.scope})"
    )
    report = json.loads(run.invoke(app, ["verify", str(recipe.folder), "--json"]).stdout)
    assert report["status"] == "EQUAL"
    assert report["legs"]["B"]["tokens"] == recipe.legs["B"].tokens
    assert report["reproduced"] is False


def test_explain_one_id_all_ids_and_an_unknown_id():
    run = CliRunner()
    one = run.invoke(app, ["explain", "sb0802"])
    assert one.exit_code == 0 and "fix:" in one.stdout
    record = json.loads(run.invoke(app, ["explain", "SB0802", "--json"]).stdout)
    assert set(record) == {"id", "title", "why", "fix"}
    rows = json.loads(run.invoke(app, ["explain", "--json"]).stdout)
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    assert isinstance(run.invoke(app, ["explain", "SB9999"]).exception, Refused)


def test_a_contract_names_the_evidence_that_proves_it(run, recipe, fake_operators):
    from samebits.contract.build import build

    bare = build(recipe, fake_operators)
    assert {c["evidence"] for c in bare.data["claims"]["topology"].values()} == {None}
    recipe.contract_path.write_bytes(bare.raw)
    statement = evidence.write(run(), recipe.evidence_path)
    proven = build(recipe, fake_operators)
    assert {c["evidence"] for c in proven.data["claims"]["topology"].values()} == {statement.digest}
    assert proven.identity == bare.identity
    recipe.contract_path.write_bytes(proven.raw)
    assert evidence.verify(recipe.folder).status == "EQUAL"


def test_a_contract_does_not_name_evidence_that_is_not_equal(run, recipe, fake_operators):
    from samebits.contract.build import build

    recipe.contract_path.write_bytes(build(recipe, fake_operators).raw)
    evidence.write(run(comparisons=[]), recipe.evidence_path)
    again = build(recipe, fake_operators)
    assert {c["evidence"] for c in again.data["claims"]["topology"].values()} == {None}
