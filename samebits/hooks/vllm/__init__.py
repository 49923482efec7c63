"""Platform, worker, scheduler, layers and loader that vLLM runs with."""
