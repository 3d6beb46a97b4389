"""Eight fake CPU devices, quick and shared compiles, data apart, a seeded hypothesis profile."""

import atexit
import os
import shutil
import tempfile

os.environ['JAX_PLATFORMS'] = 'cpu'
# Tests compile much and compute little; XLA's older code generator takes half the time.
_FLAGS = [
    '--xla_force_host_platform_device_count=8',
    '--xla_backend_optimization_level=0',
    '--xla_cpu_use_fusion_emitters=false',
]
_GIVEN = os.environ.get('XLA_FLAGS', '')
os.environ['XLA_FLAGS'] = ' '.join([_GIVEN, *(f for f in _FLAGS if f not in _GIVEN)]).strip()

# Programs over eight devices that are in flight together need more threads than devices: with
# eight they can wait for each other until jax aborts the process.
os.environ.setdefault('PJRT_NPROC', '32')

if 'PYTEST_XDIST_WORKER' not in os.environ:  # workers share their parent's folder
    _FOLDER = tempfile.mkdtemp(prefix='policyopt-tests-')
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
    os.environ['POLICYOPT_DATA_DIR'] = os.path.join(_FOLDER, 'data')
    # Many runs of the same toys: a program is compiled once by whoever comes first.
    os.environ['JAX_COMPILATION_CACHE_DIR'] = os.path.join(_FOLDER, 'xla')
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    'policyopt',
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('policyopt')
