"""Eight fake CPU devices for every test, and seeded hypothesis profiles."""

import os

os.environ['JAX_PLATFORMS'] = 'cpu'
_COUNT = '--xla_force_host_platform_device_count=8'
if _COUNT not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_COUNT}'.strip()

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    'policyopt',
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('policyopt')
