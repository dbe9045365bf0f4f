"""SVGT on Qwen2-1.5B-Instruct, with the published hyperparameters (arXiv 2605.11712).

    python -m calyrex_jax.main --config=configs/svgt_qwen2_1p5b.py --workdir=runs/svgt_qwen2_1p5b --config.svgt.data=wildguardmix:PATH

Those that are not named here are the defaults. Labelled pairs train stages 1 and 2, their safe replies stage 3; other readers:
beavertails:, jigsaw:, toxigen:, jsonl:.
Hardware: one accelerator (not tried yet).
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:Qwen/Qwen2-1.5B-Instruct"
    config.backbone.dtype = "bfloat16"
    config.adapter.name = "prompt_only"
    config.chat.system_role = "merge"
    config.svgt.enabled = True
    config.svgt.layer = 20
    config.svgt.num_bridge_heads = 16
    config.generate.temperature = 0.7
    config.generate.top_p = 0.9
    return config
