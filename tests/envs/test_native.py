"""Libraries that EnvPool expects from the system.

They are found, replaced by stand-ins, or named in the error.
"""

import ctypes
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from phasicrl.envs import native

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or os.uname().machine != "x86_64"
    or importlib.util.find_spec("envpool") is None,
    reason="EnvPool on x86-64 Linux only",
)
needs_wheel = pytest.mark.skipif(native.find_qt_folder() is None, reason="needs PyQt5-Qt5")

FRAMES = """
import hashlib, numpy as np
pool = import_envpool(procgen=True).make_gymnasium("CoinrunHard-v0", num_envs=2, seed=3)
frames = [pool.reset()[0]] + [pool.step(np.full(2, 7, np.int32))[0] for _ in range(30)]
digest = hashlib.sha256(np.stack(frames).tobytes()).hexdigest()
print("ANSWER" + json.dumps([source, digest, int(np.max(frames))]))
"""
HEAD = """
import json, os
from phasicrl.envs import native
from phasicrl.envs.envpool import import_envpool
"""


def run(code: str) -> list[object]:
    words = [sys.executable, "-c", HEAD + code]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    answers = [line for line in result.stdout.splitlines() if line.startswith("ANSWER")]
    assert result.returncode == 0 and answers, result.stderr
    return json.loads(answers[0].removeprefix("ANSWER"))


@pytest.mark.long
@needs_wheel
def test_all_ways_to_qt_draw_the_same_images() -> None:
    """The usual way; the wheel with all three stand-ins.

    And EnvPool imported by somebody else before Qt was there.
    """
    usual = run("source = native.load_qt()" + FRAMES)
    stand_ins = run(
        "native.load_qt_from_wheel(native.find_qt_folder(), force_stand_ins=True); "
        "source = os.environ['QT_NO_GLIB']" + FRAMES
    )
    late = run(
        "native.load_envpool_libraries(); import envpool, envpool.procgen as p; "
        "source = str(p._PROCGEN_IMPORT_ERROR is not None)" + FRAMES
    )
    assert usual[0] in ("system", "wheel", "not needed")
    assert stand_ins[0] == "1"
    assert usual[1:] == stand_ins[1:] == late[1:]
    assert usual[2] == 255


def test_without_qt_one_error_names_all_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "envpool_bundles_qt", lambda: False)
    monkeypatch.setattr(native, "_try_load", lambda *_: False)
    monkeypatch.setattr(native, "find_qt_folder", lambda: None)
    native.load_qt.cache_clear()
    with pytest.raises(ImportError, match=r"pip install PyQt5-Qt5, apt .*, conda"):
        native.load_qt()


@pytest.mark.parametrize(
    "functions", [(), ("one",), ("one", "two"), native.GRAPHICS_FUNCTIONS["libEGL.so.1"]], ids=len
)
def test_a_stand_in_can_be_loaded_under_its_name_and_its_functions_return_zero(
    tmp_path: Path, functions: tuple[str, ...]
) -> None:
    name, path = f"libphasicrl-stand-in.so.{len(functions)}", tmp_path / "any file"
    content = native.build_stand_in_elf(name, functions)
    path.write_bytes(content)
    headers = [struct.unpack_from("<IIQQ", content, 64 + 56 * index)[:2] for index in range(4)]
    # Hardened systems refuse what can be both written and executed; only code may be executed.
    assert all(flags & 3 != 3 for _, flags in headers)
    assert sum(flags & 1 for _, flags in headers) == 1
    with pytest.raises(OSError, match="stand-in"):
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    library = ctypes.CDLL(str(path))
    ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    for function in functions:
        call = getattr(library, function)
        call.restype = ctypes.c_uint64
        assert call(*range(1, 7)) == 0
    with pytest.raises(AttributeError, match="three"):
        _ = library.three


GRAPHICS = """
import ctypes, platform
from pathlib import Path
import tempfile
real = native._try_load
native._try_load = lambda name: name not in native.GRAPHICS_FUNCTIONS and real(name)
native.envpool_bundles_qt = lambda: True
answer = [native.load_envpool_libraries()]
for name in native.GRAPHICS_FUNCTIONS:
    ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
answer.append(ctypes.CDLL("libEGL.so.1").eglGetDisplay(0))
print("ANSWER" + json.dumps(answer))
"""


@pytest.mark.long
def test_graphics_libraries_that_are_absent_are_stood_in_for() -> None:
    """In a process of its own, as if the machine had none.

    Afterwards the loader finds them by name, and there is no display.
    """
    assert run(GRAPHICS) == ["stand-ins", 0]


@pytest.mark.skipif(
    not native.envpool_bundles_qt(), reason="this EnvPool needs no graphics libraries"
)
def test_envpool_works_with_the_stand_ins_and_does_not_end_the_process_when_it_draws() -> None:
    """Run on machines with and without graphics libraries.

    Drawing is the one thing that calls them: it must fail as Python does.
    """
    steps = """
envpool = import_envpool()
pool = envpool.make_gymnasium("HalfCheetah-v4", num_envs=1, seed=3)
pool.reset()
answer.append(pool.step(np.zeros((1, 6)))[0].shape[1])
try:
    envpool.make_gymnasium("HalfCheetah-v4", num_envs=1, seed=3, render_mode="rgb_array").render()
    answer.append("drawn")
except Exception as error:
    answer.append("refused")
print("ANSWER" + json.dumps(answer))
"""
    code = "import numpy as np\n" + GRAPHICS.replace('print("ANSWER', "#") + steps
    assert run(code) == ["stand-ins", 0, 17, "refused"]


def test_graphics_libraries_that_are_there_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_try_load", lambda name: True)
    monkeypatch.setattr(
        native, "load_library_lazily", lambda *_: pytest.fail("a stand-in was loaded")
    )
    for own_qt, source in ((False, "not needed"), (True, "system")):
        monkeypatch.setattr(native, "envpool_bundles_qt", lambda own_qt=own_qt: own_qt)
        native.load_envpool_libraries.cache_clear()
        assert native.load_envpool_libraries() == source
    native.load_envpool_libraries.cache_clear()


def test_a_library_that_cannot_be_loaded_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"libbroken.so.*apt install libegl1"):
        native.load_library_lazily(path, native.GRAPHICS_REMEDY)
