"""CAL on Llama-3.1-8B-Instruct, late8th (boundaries 28 to 32), on a corpus of 50,000 conversations.

    python -m calyrex_jax.main --config=configs/llama8b_late8th.py --workdir=runs/llama8b --config.data.source=corpus.jsonl

Hardware: written for 16 TPU chips (v5e-16); the weights are sharded over config.mesh.fsdp, so set it to what the machine has.

Planned, by compiling for TPU v5e (`--mode=plan`, the compiler's own peak of the 15.75 GiB a chip):

    16 chips, batch 16          2.93 GiB
    4 chips, int8, batch 4      5.97 GiB    --config.attention=xla --config.plan.topology=v5e:2x2 --config.backbone.quantize=int8
                                            --config.mesh.fsdp=4 --config.train.batch_size=4
    1 chip, 4 bits, batch 2     configs/llama8b_late8th_v5e1_4bit.py

335,585,280 parameters are trained. At 197 TFLOP/s a chip, four chips can reach 38,000 tokens a second at best.
"""

from calyrex_jax.config import default_config


def get_config():
    config = default_config()
    config.backbone.source = "hf:meta-llama/Llama-3.1-8B-Instruct"
    config.backbone.dtype = "bfloat16"
    config.adapter.placement = "late8th"
    config.data.source = "corpus.jsonl"
    config.data.max_length = 2048
    config.data.packing = True
    config.plan.topology = "v5e:4x4"
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.train.steps = 3000
    config.train.batch_size = 16
    config.train.learning_rate = 1e-3
    config.train.warmup_steps = 100
    config.train.weight_decay = 0.01
    config.train.loss_chunk = 512
    config.train.save_every = 250
    return config
