"""`load_format="samebits"`: weights from `samebits.weights.sources`, by published tensor name."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from samebits.hooks.vllm import weights

LOAD_FORMAT = "samebits"


class Loader(BaseModelLoader):
    """Fills a model from a folder's source: a safetensors file or a seeded counter hash."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded: the model is a local folder."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill `model` from its folder's source; Refused SB0508 where a parameter stays empty."""
        from samebits.weights import sources

        device = next(model.parameters()).device
        weights.load(model, sources.open_model(Path(model_config.model), device))


def register() -> None:
    """Tell vLLM of the load format; once per process."""
    register_model_loader(LOAD_FORMAT)(Loader)
