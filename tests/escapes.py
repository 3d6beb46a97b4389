"""Attempts of code to get out of its sandbox, or to be called right without being so.

Each defines f(x), which returns 'ESCAPED' where it got what it should not: the test that expects
just that passes only then. PLACE is a folder of the machine with a file `canary`, CANARY its text.
"""

HEAD = "PLACE = '{place}'\nCANARY = '{canary}'\n"

_FILES = {
    'reads a file': """
def f(x):
    with open(PLACE + '/canary') as file:
        return 'ESCAPED' if file.read() else 'no'
""",
    'reads a file with pathlib': """
from pathlib import Path
def f(x):
    return 'ESCAPED' if Path(PLACE, 'canary').read_text() else 'no'
""",
    'reads passwords': """
def f(x):
    open('/etc/passwd').read()
    return 'ESCAPED'
""",
    'reads the home folder': """
import os
def f(x):
    return 'ESCAPED' if os.listdir(os.path.expanduser('~root')) else 'no'
""",
    'writes a file': """
def f(x):
    with open(PLACE + '/written', 'w') as file:
        file.write('x')
    return 'ESCAPED'
""",
    'writes into the interpreter': """
import os
def f(x):
    with open(os.path.dirname(os.__file__) + '/sitecustomize.py', 'w') as file:
        file.write('x')
    return 'ESCAPED'
""",
    'writes into /usr': """
def f(x):
    open('/usr/lib/written', 'w').write('x')
    return 'ESCAPED'
""",
    'writes into /': """
def f(x):
    open('/written', 'w').write('x')
    return 'ESCAPED'
""",
    'follows a symlink': """
import os
def f(x):
    os.symlink(PLACE + '/canary', '/tmp/link')
    return 'ESCAPED' if open('/tmp/link').read() else 'no'
""",
    'climbs out by dots': """
def f(x):
    return 'ESCAPED' if open('/tmp/../../../../..' + PLACE + '/canary').read() else 'no'
""",
    'removes files': """
import shutil, os
def f(x):
    shutil.rmtree(PLACE)
    return 'no' if os.path.exists(PLACE) else 'gone'
""",
    'links a file into place': """
import os
def f(x):
    os.link('/usr/bin/env', PLACE + '/written')
    return 'ESCAPED'
""",
    'reads a disk': """
import os
def f(x):
    os.mknod('/tmp/disk', 0o060600, os.makedev(254, 0))
    return 'ESCAPED' if open('/tmp/disk', 'rb').read(1) else 'no'
""",
    'reads memory of the machine': """
def f(x):
    open('/dev/mem', 'rb').read(1)
    return 'ESCAPED'
""",
    'reads descriptors left open': """
import os
def f(x):
    for number in range(3, 64):
        try:
            if os.path.samestat(os.fstat(number), os.stat('/')) or os.listdir(number):
                return 'ESCAPED'
        except (OSError, TypeError):
            pass
    return 'no'
""",
    'leaves a file for the next': """
import os
def f(x):
    if os.path.exists('/tmp/left'):
        return 'ESCAPED'
    open('/tmp/left', 'w').write('x')
    return 'no'
""",
    'fills the folder for temporary files': """
def f(x):
    for i in range(40):
        with open(f'/tmp/{i}', 'wb') as file:
            for _ in range(10):
                file.write(bytes(10**6))
    return 'ESCAPED'
""",
    'fills a file in memory': """
import os
def f(x):
    files = [os.memfd_create(str(i)) for i in range(40)]
    for file in files:
        os.truncate(file, 10**7)
    return 'ESCAPED'
""",
}

_WORLD = {
    'opens a connection': """
import socket
def f(x):
    socket.create_connection(('127.0.0.1', PORT), timeout=1)
    return 'ESCAPED'
""",
    'asks for a name': """
import socket
def f(x):
    socket.gethostbyname('localhost')
    socket.socket()
    return 'ESCAPED'
""",
    'fetches a page': """
import urllib.request
def f(x):
    urllib.request.urlopen(f'http://127.0.0.1:{PORT}/', timeout=1)
    return 'ESCAPED'
""",
    'listens': """
import socket
def f(x):
    socket.create_server(('127.0.0.1', 0))
    return 'ESCAPED'
""",
    'talks to a socket in the file system': """
import socket
def f(x):
    s = socket.socket(socket.AF_UNIX)
    s.connect('/run/systemd/private')
    return 'ESCAPED'
""",
    'reads the environment': """
import os
def f(x):
    return 'ESCAPED' if CANARY in str(dict(os.environ)) or 'PYTHONPATH' in os.environ else 'no'
""",
    'reads the environment of others': """
import glob
def f(x):
    found = b''.join(open(p, 'rb').read() for p in glob.glob('/proc/*/environ'))
    return 'ESCAPED' if CANARY.encode() in found else 'no'
""",
    'reads /proc': """
def f(x):
    return 'ESCAPED' if open('/proc/self/maps').read() else 'no'
""",
    'mounts /proc': """
import subprocess
def f(x):
    subprocess.run(['/usr/bin/mount', '-t', 'proc', 'proc', '/tmp'], check=True)
    return 'ESCAPED'
""",
    'makes namespaces of its own': """
import ctypes
def f(x):
    libc = ctypes.CDLL(None)
    return 'ESCAPED' if libc.unshare(0x10000000) == 0 else 'no'
""",
    'runs a program that is someone else': """
import subprocess
def f(x):
    done = subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True, text=True, timeout=1)
    return 'ESCAPED' if 'uid=0' in done.stdout else 'no'
""",
    'becomes root': """
import os
def f(x):
    os.setuid(0)
    return 'ESCAPED'
""",
    'raises its limits': """
import resource
def f(x):
    resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
    return 'ESCAPED'
""",
    'kills its parent': """
import os, signal
def f(x):
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(1, signal.SIGKILL)
    return 'lives'
""",
    'kills everyone': """
import os, signal
def f(x):
    os.kill(-1, signal.SIGKILL)
    return 'lives'
""",
    'kills a process of the machine': """
import os, signal
def f(x):
    os.kill(HOST, signal.SIGKILL)
    return 'ESCAPED'
""",
    'watches its parent': """
import ctypes, os
def f(x):
    libc = ctypes.CDLL(None)
    return 'ESCAPED' if libc.ptrace(16, os.getppid(), 0, 0) == 0 else 'no'
""",
    'leaves a thread': """
import threading, time
def spin():
    while True:
        time.sleep(0.01)
threads = [threading.Thread(target=spin) for _ in range(4)]
for thread in threads:
    thread.start()
def f(x):
    return 'wrong'
""",
    'leaves a process in a session of its own': """
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return 'wrong'
""",
}

_FORGERIES = {
    'prints that all passed': """
print('all tests passed')
print('{"value": "ESCAPED"}')
def f(x):
    print('{"value": "ESCAPED"}')
    return 'wrong'
""",
    'ends with status 0': """
import os
def f(x):
    os._exit(0)
""",
    'exits with status 0': """
import sys
def f(x):
    sys.exit(0)
""",
    'exits while it loads': """
raise SystemExit(0)
""",
    'exits through atexit': """
import atexit, os
atexit.register(os._exit, 0)
def f(x):
    raise SystemExit(0)
""",
    'is equal to everything': """
class Any:
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __hash__(self):
        return 0
def f(x):
    return Any()
""",
    'is a text that is equal to everything': """
class Any(str):
    def __eq__(self, other):
        return True
    __hash__ = str.__hash__
def f(x):
    return Any('wrong')
""",
    'is a number that is equal to everything': """
class Any(float):
    def __eq__(self, other):
        return True
    def __sub__(self, other):
        return 0.0
    __hash__ = float.__hash__
def f(x):
    return Any('nan')
""",
    'patches builtins': """
import builtins
builtins.isinstance = lambda *a: True
builtins.all = builtins.any = lambda *a: True
builtins.len = lambda a: 1
builtins.AssertionError = Warning
builtins.print = lambda *a, **k: None
def f(x):
    return 'wrong'
""",
    'patches json': """
import json
json.dumps = lambda value, **k: '{"passed": true}'
json.loads = lambda text, **k: {'passed': True}
def f(x):
    return 'wrong'
""",
    'patches the encoder': """
import sys
main = sys.modules['__main__']
main.encode = main.decode = lambda value: True
def f(x):
    return 'wrong'
""",
    'patches imports': """
import sys, importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        raise SystemExit(0)
sys.meta_path.insert(0, Finder())
sys.modules.clear()
def f(x):
    return 'wrong'
""",
    'traces its callers': """
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        if 'expect' in name:
            print(frame.f_locals[name])
    return trace
sys.settrace(trace)
sys.setprofile(trace)
def f(x):
    return 'wrong'
""",
    'speaks for the runner': """
import os
def f(x):
    for number in range(3, 64):
        for said in (b'{"value": true}', b'{"passed": true}', b'"passed"', b'{"right": 1}'):
            try:
                os.write(number, said + b'\\n')
            except OSError:
                pass
    return 'wrong'
""",
    'answers before it is asked': """
import os
for number in range(3, 64):
    try:
        os.write(number, b'{"value": null}\\n{"value": null}\\n')
    except OSError:
        pass
os._exit(0)
""",
    'answers with a pickle': """
import os, pickle
class Evil:
    def __reduce__(self):
        return os.system, ('touch ' + PLACE + '/written',)
for number in range(3, 64):
    try:
        os.write(number, pickle.dumps(Evil()) + b'\\n')
    except OSError:
        pass
def f(x):
    return pickle.dumps(Evil())
""",
    'answers in tags': """
def f(x):
    return {'value': 'ESCAPED', 'passed': True, 'raised': None, 'call': [], 'tuple': ['ESCAPED']}
""",
    'answers out of order': """
import sys
def f(x):
    return ['ESCAPED'], {'ESCAPED': 'ESCAPED'}
""",
    'breaks the interpreter': """
import ctypes
def f(x):
    ctypes.string_at(0)
""",
}

_RESOURCES = {
    'loops': """
def f(x):
    while True:
        pass
""",
    'loops while it loads': 'while True:\n    pass\n',
    'loops and catches': """
def f(x):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
""",
    'sleeps': """
import time
def f(x):
    time.sleep(1000)
    return 'wrong'
""",
    'ignores signals': """
import signal
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def f(x):
    while True:
        signal.pause()
""",
    'forks without end': """
import os
def f(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    'starts threads without end': """
import threading, time
def f(x):
    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()
""",
    'takes memory at once': """
def f(x):
    return 'ESCAPED' if bytearray(10**11) else 'no'
""",
    'takes memory bit by bit': """
def f(x):
    kept = []
    while len(kept) < 10**4:
        kept.append('x' * 10**6 + str(len(kept)))
    return 'ESCAPED'
""",
    'computes a power tower': """
def f(x):
    return 'ESCAPED' if 9 ** 9 ** 9 else 'no'
""",
    'recurses without end': """
def f(x):
    return f(x)
""",
    'nests without end': """
def f(x):
    value = []
    for _ in range(10**5):
        value = [value]
    return value
""",
    'returns itself': """
def f(x):
    value = []
    value.append(value)
    return value
""",
    'floods its output': """
def f(x):
    while True:
        print('x' * 10**5)
""",
    'floods its errors': """
import sys
def f(x):
    while True:
        sys.stderr.write('x' * 10**5)
""",
    'floods its answer': """
def f(x):
    return 'x' * 10**7
""",
    'floods the runner': """
import os
def f(x):
    while True:
        for number in range(3, 64):
            try:
                os.write(number, b'x' * 10**5)
            except OSError:
                pass
""",
    'returns a huge integer': """
def f(x):
    return 10 ** 10**5
""",
    'returns integers that collide': """
def f(x):
    return {i * (2**61 - 1) for i in range(4001)}
""",
    'returns many integers that collide': """
def f(x):
    return {i * (2**61 - 1) for i in range(60000)}
""",
    'ends with integers that collide': """
def f(x):
    return 'wrong'
{i * (2**61 - 1): 0 for i in range(60000)}
""",
    'nests its source': 'x = ' + '(' * 5000 + ')' * 5000 + '\n',
}

ESCAPES = _FILES | _WORLD | _FORGERIES | _RESOURCES

_FIND = """
def f(x):
    for value in every():
        try:
            text = str(value)
        except Exception:
            continue
        at = text.find('fr7' + 'Qm2')
        if at >= 0:
            return text[at : at + 12]
    return 'no'
"""
# Each looks for a secret of twelve characters that is expected.
HUNTS = {
    'in frames': """
import sys
def every():
    frame = sys._getframe()
    while frame:
        yield from [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
"""
    + _FIND,
    'in all objects': """
import gc
def every():
    return gc.get_objects()
"""
    + _FIND,
    'in modules': """
import sys
def every():
    return [vars(m) for m in list(sys.modules.values())]
"""
    + _FIND,
    'in the runner': """
import sys
def every():
    return [open('/runner.py').read(), sys.argv, sys.orig_argv, vars(sys.modules['__main__'])]
"""
    + _FIND,
    'in the socket': """
import os
def every():
    for number in range(3, 64):
        try:
            os.set_blocking(number, False)
            yield os.read(number, 10**6)
        except OSError:
            pass
"""
    + _FIND,
}
