"""The placement study at the publication's smaller scale: eight placements of CAL on Qwen2.5-1.5B-Instruct, three seeds.

    python -m calyrex_jax.main --config=configs/ablate_qwen1p5b.py --mode=ablate --workdir=runs/ablate_qwen \
        --config.data.source=corpus.jsonl --config.eval.data=ifeval_system=ifeval.jsonl

Hardware: not tried yet; `every` trains through all layers, and config.mesh lays out several chips. Blocks are sized so that all
placements have late8th's number of parameters; --config.ablate.match=width leaves every block alike.
"""

from configs.qwen1p5b_late8th import get_config as late8th


def get_config():
    config = late8th()
    config.train.keep = 1
    config.ablate.seeds = 3
    config.ablate.match = "parameters"
    config.eval.tasks = "rules,long_context,turns,conflict,ifeval_system,perplexity"
    return config
