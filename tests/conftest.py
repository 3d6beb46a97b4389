"""Eight fake CPU devices for every test, quick compiles, and a seeded hypothesis profile."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
# Tests compile much and compute little.
_FLAGS = ['--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=0']
_GIVEN = os.environ.get('XLA_FLAGS', '')
os.environ['XLA_FLAGS'] = ' '.join([_GIVEN, *(f for f in _FLAGS if f not in _GIVEN)]).strip()

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    'policyopt',
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('policyopt')
