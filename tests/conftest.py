"""Eight fake CPU devices, quick compiles, prepared data apart, and a seeded hypothesis profile."""

import atexit
import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
# Tests compile much and compute little.
_FLAGS = ['--xla_force_host_platform_device_count=8', '--xla_backend_optimization_level=0']
_GIVEN = os.environ.get('XLA_FLAGS', '')
os.environ['XLA_FLAGS'] = ' '.join([_GIVEN, *(f for f in _FLAGS if f not in _GIVEN)]).strip()

if 'PYTEST_XDIST_WORKER' not in os.environ:  # workers share their parent's folder
    os.environ['POLICYOPT_DATA_DIR'] = tempfile.mkdtemp(prefix='policyopt-tests-')
    atexit.register(shutil.rmtree, os.environ['POLICYOPT_DATA_DIR'], ignore_errors=True)

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    'policyopt',
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('policyopt')
