"""Small models, token sequences and a loss for the trainer's tests."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
import yaml

from samebits import bits, recipe
from samebits.contract import build
from samebits.engines.trainer_batch import TrainBatch
from samebits.engines.trainer_process import TrainerProcess
from samebits.patching import tree_path
from samebits.patching.workspace import Workspace
from samebits.weights import sources

HERE = Path(__file__).resolve().parent  # ranks import the loss function from here
CASES = HERE.parents[1] / "cases"
VOCAB = 256
QWEN3 = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
}
QWEN2 = QWEN3  # the same sizes, with biases instead of norms of queries and keys
LLAMA = QWEN3 | {
    "hidden_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
# One gated delta net and one gated attention layer, with the head sizes of real models.
HYBRID = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vocab_size": VOCAB,
}


def make_case(
    folder: Path, architecture: str, config: dict, base: str = "qwen3-tiny", **contract
) -> tuple[Path, Path]:
    """Write a recipe, draw its weights and build its contract: (model folder, contract).

    `config` and `contract` replace entries of the recipe of the case `base`.
    """
    data = yaml.safe_load((CASES / base / "recipe.yaml").read_text())
    data["model"]["architecture"] = architecture
    data["model"]["config"] |= config
    data["contract"] |= contract
    if architecture == "llama":
        data["layouts"] = {"trainer_tp": [1], "rollout_tp": [1]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    loaded = recipe.load(folder)
    model = sources.prepare(loaded, Workspace(folder))
    build.write(build.build(loaded), folder / "contract.json")
    return model, folder / "contract.json"


def make_recurrent(folder: Path, config: dict, schedule: str) -> tuple[Path, Path]:
    """`make_case` of a hybrid, with pages that hold the states of its schedule."""
    base = "qwen3.5-tiny" if schedule == "chunk_row" else "qwen3.5-tiny-cpr"
    return make_case(folder, "qwen3_5_text", config, base, gdn_schedule=schedule)


@functools.cache
def megatron_tree(series: str = "qwen3-tiny") -> Path:
    return tree_path("megatron", series)


def start(case: tuple[Path, Path], series: str = "qwen3-tiny", **options) -> TrainerProcess:
    """A trainer on the tree of `series` with the case's weights loaded."""
    model, contract = case
    paths = [megatron_tree(series), HERE]
    trainer = TrainerProcess(model, **({"contract": contract, "python_paths": paths} | options))
    trainer.load(model)
    return trainer


def sequences(lengths=(1, 2, 7, 40, 17, 90), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def train_batch(tokens: list[list[int]]) -> TrainBatch:
    """Every target counts, except the first of each sequence (a prompt of two tokens)."""
    ones = [torch.ones(len(s) - 1) for s in tokens]
    mask = [(torch.arange(len(s) - 1) > 0).float() for s in tokens]
    return TrainBatch(tokens, mask, ones, [torch.zeros_like(o) for o in ones])


def reference_logprobs(folder: Path, tokens):
    """float64 log-probabilities of every target, and the model, from Hugging Face's own code."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    weights = {name: value.double() for name, value in sources.open_model(folder)}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    rows = [model(torch.tensor([s])).logits[0].log_softmax(-1) for s in tokens]
    picked = [
        row[:-1].gather(1, torch.tensor(s[1:], dtype=torch.int64)[:, None])[:, 0]
        for row, s in zip(rows, tokens, strict=True)
    ]
    return picked, model


def reference_gradients(folder: Path, tokens) -> dict[str, torch.Tensor]:
    """Gradients of `mean_nll` over `train_batch(tokens)` by published name, in float64."""
    logprobs, model = reference_logprobs(folder, tokens)
    mask = torch.cat(train_batch(tokens).mask)
    (-(torch.cat(logprobs) * mask).sum() / mask.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def mean_nll(logprobs, old_logprobs, advantages, mask):
    """Negative mean log-probability of the masked targets; must be importable in a rank."""
    loss = -(logprobs * mask).sum() / mask.sum()
    return loss, {"counted": float(mask.sum())}


def mismatches(left, right) -> int:
    """Differing log-probabilities of two `Scores.logprobs` lists, by bit pattern."""
    pairs = zip(left, right, strict=True)
    return sum(bits.compare(a, b).mismatches for a, b in pairs if a.numel())
