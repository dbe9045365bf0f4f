"""LoRA against peft on torch, both ways: ours saved and loaded by peft, peft's saved and loaded by us, the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.lora import Lora, merge
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.model import Model
from calyrex_jax.weights import peft as files
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve
from tests import tiny

torch = pytest.importorskip("torch", reason="the reference is peft, which needs torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="the reference is peft")

TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 15)).astype(np.int32)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def pair(request, tmp_path_factory):
    """(family, directory of one random checkpoint, our spec, our backbone)."""
    config = dict(tiny.CONFIGS[request.param])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.ndim > 1:
                weight.mul_(8)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    return request.param, directory, spec, load_backbone(source, spec, jnp.float32)


def base_of(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS.astype(np.int64))).logits.numpy()


def our_logits(spec, backbone, adapters=(), leaves=None):
    rows = [[tiny.Conversation(line, np.zeros(len(line), bool))] for line in TOKENS]
    params = {"backbone": backbone, "adapters": {} if leaves is None else {"lora": leaves}}
    return np.asarray(jax.jit(Model(spec, adapters).logits)(params, tiny.packed(rows, TOKENS.shape[1], width=0)))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["one rank", "rank pattern", "rslora", "range"])
def test_ours_loaded_by_peft(pair, case, tmp_path):
    _, directory, spec, backbone = pair
    ranks = {"attn/w_q": 4, "attn/w_qkv": 4, "attn/w_o": 4, "mlp/w_down": 4}
    changes = {
        "one rank": {},
        "rank pattern": {"ranks": ranks},
        "rslora": {"ranks": ranks, "rslora": True},
        "range": {"layers": range(1, 3)},
    }[case]
    adapter = tiny.lora(spec, 3, alpha=7.0, **changes)
    leaves = tiny.noise(jax.eval_shape(adapter.init, jax.random.key(0)), 1, 0.2)
    files.save_peft(tmp_path, spec, adapter.low_rank, leaves)
    ours = our_logits(spec, backbone, (adapter,), leaves)
    plain = our_logits(spec, backbone)
    assert np.abs(ours - plain).max() > 0.05 * np.abs(plain).max()
    theirs = peft.PeftModel.from_pretrained(base_of(directory), tmp_path)
    close(their_logits(theirs), ours)
    close(their_logits(theirs.merge_and_unload()), ours)
    close(our_logits(spec, merge(adapter.low_rank, backbone, leaves)), ours)


@pytest.mark.parametrize("case", ["all maps", "rank pattern", "rslora", "range"])
def test_pefts_loaded_by_us(pair, case, tmp_path):
    family, directory, spec, backbone = pair
    some = ["q_proj", "v_proj", "down_proj"] if family == "llama" else ["c_attn", "c_proj"]
    pattern = {"q_proj": 5, "down_proj": 2} if family == "llama" else {"c_attn": 5, "mlp.c_proj": 2}
    settings = {
        "all maps": {"target_modules": "all-linear"},
        "rank pattern": {"target_modules": some, "rank_pattern": pattern},
        "rslora": {"target_modules": some, "rank_pattern": pattern, "use_rslora": True},
        "range": {"target_modules": some, "layers_to_transform": [2, 3]},
    }[case]
    config = peft.LoraConfig(
        r=3, lora_alpha=7, lora_dropout=0.1, fan_in_fan_out=family == "gpt2", task_type="CAUSAL_LM", **settings
    )
    theirs = peft.get_peft_model(base_of(directory), config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))))
    theirs.save_pretrained(tmp_path)
    low_rank, leaves = files.load_peft(tmp_path, spec)
    adapter = Lora(low_rank, tuple(files.shapes_of(spec).items()))
    expected = their_logits(theirs)
    close(our_logits(spec, backbone, (adapter,), jax.tree.map(jnp.asarray, leaves)), expected)
    close(our_logits(spec, merge(low_rank, backbone, leaves)), expected)
    plain = our_logits(spec, backbone)
    assert np.abs(expected - plain).max() > 0.05 * np.abs(plain).max()
