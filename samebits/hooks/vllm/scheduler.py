"""vLLM's scheduler, which says how many cached blocks a reset of the prefix cache dropped."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler


class Scheduler(VllmScheduler):
    """Schedules as vLLM does."""

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """False when vLLM declines; else {"dropped_blocks": n}, true like vLLM's own True."""
        blocks = self.kv_cache_manager.block_pool.blocks
        cached = sum(block.block_hash is not None for block in blocks)
        return super().reset_prefix_cache(*args, **kwargs) and {"dropped_blocks": cached}
