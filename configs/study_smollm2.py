"""Does cross-attention onto the system prompt help? CAL against its controls on SmolLM2-135M-Instruct, in parts.

    for part in first controls seeds lora long ideas; do
      python -m calyrex_jax.main --config=configs/study_smollm2.py:$part --mode=ablate --workdir=runs/study || break
    done

Every part goes on from what the others left in the same workdir, reports all arms so far, and may be stopped and started again:
whatever is finished by then is the report. first: CAL and ParallelMLP, one seed · controls: CAL with keys from everywhere,
ParallelMLP with CAL's span gate · seeds: three of CAL and ParallelMLP · lora: on all layers and on the last eighth, two rates,
600 steps and one seed, for it trains without cached states · long: the first part's runs to 2400 steps · ideas: CAL changed,
two rates, 600 steps. --config=configs/study_smollm2.py alone is the part `seeds`.

Fixed before any run. All arms have CAL's 6.64 M parameters, one corpus, a constant learning rate after 40 steps, and try as many
rates (three, LoRA two) for 300 steps on conversations that nothing else uses. Aim, in the primary cells below: CAL at least 10
points ahead of ParallelMLP, half its steps to 90 %, many-shot success at least 13 points lower, nothing lost on new phrasings,
controls and perplexity. The primary cells are distance 800–4000, shots 16–64, turns and new phrasings, with rules about the
beginning and the end of a reply apart; n is 200 a cell in `preference`, which is teacher-forced and judges all checkpoints, and 50
beyond 1000 tokens or 16 shots; the other tasks generate, have fewer items, and judge the ends.

Hardware: 2 CPU cores, 4 GB of memory.
"""

from configs.quickstart import get_config as quickstart

PRIMARY = (
    *(f"preference: {n} tokens/{at}" for n in (800, 2000, 4000) for at in ("begin", "end")),
    *(f"preference: {kind}, {n} shots/{at}" for n in (16, 64) for kind in ("drop", "replace") for at in ("begin", "end")),
    *(f"preference: 0 tokens/new phrasings/{at}" for at in ("begin", "end")),
    *(f"long_context: {n} tokens/{at}" for n in (800, 2000, 4000) for at in ("begin", "end")),
    *(f"conflict: {kind}, {n} shots" for n in (16, 64) for kind in ("drop", "replace")),
    "turns: adherence, all turns",
    "turns: turns until the first breach/begin",
    "turns: turns until the first breach/end",
    "rules: unseen_phrasings",
    "rules: unseen_words_and_phrasings",
    "rules: controls",
    "rules: answers",
    "perplexity: perplexity",
)

TWO = ["cal:", "mlp: adapter.name=parallel_mlp"]
CONTROLS = [
    "cal_all_keys: cal.keys_from=all, ablate.seeds=1",
    "mlp_gated: adapter.name=parallel_mlp, parallel_mlp.gate_by_span=true, ablate.seeds=1",
]
_LORA = "adapter.name=lora, train.steps=600, ablate.seeds=1, ablate.rates=5e-4, 2e-3"
LORA = [f"lora: {_LORA}, ablate.curve=", f"lora_late8th: {_LORA}, lora.layers=late8th"]
IDEAS = [
    f"{name}: {changes}, train.steps=600, ablate.seeds=1, ablate.rates=1e-3, 2e-3"
    for name, changes in {
        "cal_copying": "cal.copying=true, cal.init=layer",  # the quickstart's
        "cal_layer": "cal.init=layer",
        "cal_rope": "cal.rope=true",
        "cal_ungated": "cal.gate_mlp_by_span=false",
        "cal_qk_norm": "cal.qk_norm=true",
        "cal_no_mlp": "cal.mlp_dim=-1, cal.num_heads=12, cal.num_kv_heads=6",
        "cal_more_heads": "cal.num_heads=12, cal.num_kv_heads=4, cal.mlp_dim=84",
    }.items()
]
PARTS = {
    "first": (TWO, 1),
    "controls": (TWO + CONTROLS, 1),
    "seeds": (TWO + CONTROLS, 3),
    "lora": (TWO + CONTROLS + LORA, 3),
    "ideas": (TWO + CONTROLS + LORA + IDEAS, 3),
    "long": (TWO, 1),
}


def get_config(part: str = "seeds"):
    config = quickstart()
    config.cal.init, config.cal.copying = "random", False  # the published block
    config.data.size = 7200
    config.train.steps = 2400 if part == "long" else 1200
    config.train.learning_rate = 1.5e-3
    config.train.schedule = "constant"
    config.train.keep = 1
    config.eval.after_training = ""
    arms, config.ablate.seeds = PARTS[part]
    config.ablate.arms = "; ".join(arms)
    config.ablate.reference = "cal"
    config.ablate.match = "parameters"
    config.ablate.rates = "1e-3,2e-3,4e-3"
    config.ablate.rate_steps = 300
    config.ablate.curve = "150,300,600,1200"
    config.ablate.curve_tasks = "preference"
    config.ablate.primary = "; ".join(PRIMARY)
    config.eval.tasks = "preference,rules,perplexity,long_context,conflict,turns"
    config.eval.context_lengths = "0,800,2000,4000"
    config.eval.shots = "0,16,64,128"
    config.eval.limits = "preference=200,long_context=150,conflict=60,turns=40"
    config.eval.far_limit = 50
    return config
