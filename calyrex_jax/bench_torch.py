"""The benchmark's other side: the same model in torch, trained by peft's LoRA and decoded by transformers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np


def load(directory: Path, **options: Any) -> Any:
    """The checkpoint as transformers' model, float32; its progress bars go nowhere."""
    import torch
    from transformers import AutoModelForCausalLM

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()


def lora_step(directory: Path, ids: np.ndarray, rank: int) -> Callable[[], None]:
    """A call trains one step: LoRA by peft on every linear layer, AdamW, cross-entropy at every position of ids [B, T], eager."""
    import peft
    import torch

    model = peft.get_peft_model(load(directory), peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = torch.from_numpy(np.array(ids, np.int64))

    def run() -> None:
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def reply(model: Any, ids: np.ndarray, new_tokens: int) -> None:
    """Greedy decoding of `new_tokens` after the prompts ids [B, T]; no reply ends early."""
    import torch

    tokens = torch.from_numpy(ids.astype(np.int64))
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    with torch.inference_mode():
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **lengths)
    assert out.shape[1] == ids.shape[1] + new_tokens
