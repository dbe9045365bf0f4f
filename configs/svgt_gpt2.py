"""SVGT on GPT-2 (124M), with the published hyperparameters (arXiv 2605.11712).

    python -m calyrex_jax.main --config=configs/svgt_gpt2.py --workdir=runs/svgt_gpt2 --config.svgt.data=wildguardmix:PATH

Those that are not named here are the defaults. Labelled pairs train stages 1 and 2, their safe replies stage 3; other readers:
beavertails:, jigsaw:, toxigen:, jsonl:.
Hardware: one accelerator or a CPU (not tried yet).
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:openai-community/gpt2"
    config.backbone.dtype = "bfloat16"
    config.adapter.name = "prompt_only"
    config.chat.system_role = "merge"
    config.chat.template = "plain"
    config.svgt.enabled = True
    config.svgt.layer = 7
    config.svgt.num_bridge_heads = 8
    config.generate.temperature = 0.7
    config.generate.top_p = 0.9
    return config
