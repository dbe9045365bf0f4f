"""Where must CAL sit? All eight placements on SmolLM2-135M-Instruct and the embedded corpus, 100 steps and one seed.

    python -m calyrex_jax.main --config=configs/ablate_smollm2.py --mode=ablate --workdir=runs/ablate

Hardware: 2 CPU cores; 4 GB of memory were in use at its third placement. Stopped and started
again, it goes on. The full form, over some nights:

    … --config.train.steps=600 --config.ablate.seeds=3
"""

from configs.quickstart import get_config as quickstart


def get_config():
    config = quickstart()
    config.data.size = 1200
    config.train.steps = 100
    config.train.warmup_steps = 20
    config.train.keep = 1
    config.eval.tasks = "rules,perplexity"
    config.eval.limit = 160
    return config
