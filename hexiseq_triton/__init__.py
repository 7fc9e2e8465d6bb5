"""Train LLMs on very long sequences over mixed GPUs."""
