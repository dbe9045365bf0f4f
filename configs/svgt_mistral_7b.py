"""SVGT on Mistral-7B-Instruct-v0.2, with the published hyperparameters (arXiv 2605.11712).

    python -m calyrex_jax.main --config=configs/svgt_mistral_7b.py --workdir=runs/svgt_mistral_7b --config.svgt.data=wildguardmix:PATH

Those that are not named here are the defaults. Labelled pairs train stages 1 and 2, their safe replies stage 3; other readers:
beavertails:, jigsaw:, toxigen:, jsonl:.
Hardware: one accelerator with 40 GB or more (not tried yet).
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:mistralai/Mistral-7B-Instruct-v0.2"
    config.backbone.dtype = "bfloat16"
    config.adapter.name = "prompt_only"
    config.chat.system_role = "merge"
    config.svgt.enabled = True
    config.svgt.layer = 22
    config.svgt.value_dim = 256
    config.svgt.num_bridge_tokens = 7
    config.svgt.num_heads = 16
    config.svgt.num_bridge_heads = 16
    config.svgt.pooling = "attention"
    config.svgt.aggregate = "blocks"
    config.generate.temperature = 0.7
    config.generate.top_p = 0.9
    return config
