"""CAL on Llama-3.1-8B-Instruct, late8th, on a single TPU v5e chip of 16 GB: the frozen backbone in 4 bits.

    python -m calyrex_jax.main --config=configs/llama8b_late8th_v5e1_4bit.py --workdir=runs/llama8b_4bit \\
        --config.data.source=corpus.jsonl
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:meta-llama/Llama-3.1-8B-Instruct"
    config.backbone.dtype = "bfloat16"
    config.backbone.quantize = "int4"
    config.adapter.placement = "late8th"
    config.data.source = "corpus.jsonl"
    config.data.max_length = 2048
    config.data.packing = True
    config.plan.topology = "v5e:1x1"
    config.train.steps = 25000
    config.train.batch_size = 2
    config.train.learning_rate = 3e-4
    config.train.warmup_steps = 800
    config.train.weight_decay = 0.01
    config.train.loss_chunk = 512
    config.train.save_every = 1000
    return config
