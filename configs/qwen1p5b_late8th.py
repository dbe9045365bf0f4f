"""CAL on Qwen2.5-1.5B-Instruct, late8th (boundaries 24 to 28), on a corpus of 50,000 conversations.

    python -m calyrex_jax.main --config=configs/qwen1p5b_late8th.py --workdir=runs/qwen1p5b --config.data.source=corpus.jsonl

Hardware: one GPU or TPU chip with 16 GB or more; set config.mesh for several.

Planned, by compiling for one TPU v5e chip (`--mode=plan`): 8.90 of its 15.75 GiB; 45,235,200 parameters are trained, and at
197 TFLOP/s the chip can reach 43,900 tokens a second at best.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:Qwen/Qwen2.5-1.5B-Instruct"
    config.backbone.dtype = "bfloat16"
    config.adapter.placement = "late8th"
    config.data.source = "corpus.jsonl"
    config.data.max_length = 2048
    config.data.packing = True
    config.plan.topology = "v5e:1x1"
    config.train.steps = 6000
    config.train.batch_size = 8
    config.train.learning_rate = 1e-3
    config.train.warmup_steps = 200
    config.train.weight_decay = 0.01
    config.train.loss_chunk = 512
    config.train.save_every = 500
    return config
