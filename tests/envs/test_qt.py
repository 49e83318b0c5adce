"""Qt for Procgen: the ways it is found, the stand-ins, and the words when there is none."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from phasicrl.envs import qt

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.uname().machine != "x86_64" or importlib.util.find_spec("envpool") is None,
    reason="EnvPool on x86-64 Linux only",
)
needs_wheel = pytest.mark.skipif(qt._wheel_folder() is None, reason="PyQt5-Qt5 is not installed")

FRAMES = """
import hashlib, numpy as np
pool = import_envpool(procgen=True).make_gymnasium("CoinrunHard-v0", num_envs=2, seed=3)
frames = [pool.reset()[0]] + [pool.step(np.full(2, 7, np.int32))[0] for _ in range(30)]
print("ANSWER" + json.dumps([source, hashlib.sha256(np.stack(frames).tobytes()).hexdigest(), int(np.max(frames))]))
"""
HEAD = "import json, os\nfrom phasicrl.envs import qt\nfrom phasicrl.envs.envpool_adapter import import_envpool\n"


def run(code: str) -> list[object]:
    result = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=100, check=False)
    answers = [line for line in result.stdout.splitlines() if line.startswith("ANSWER")]
    assert result.returncode == 0 and answers, result.stderr
    return json.loads(answers[0].removeprefix("ANSWER"))


@needs_wheel
def test_all_ways_to_qt_draw_the_same_pictures() -> None:
    """The usual way; the wheel with all three stand-ins; and EnvPool imported by somebody else before Qt was there."""
    usual = run("source = qt.ensure_qt()" + FRAMES)
    stand_ins = run("qt.load_with_stand_ins(qt._wheel_folder(), force=True); source = os.environ['QT_NO_GLIB']" + FRAMES)
    late = run("import envpool, envpool.procgen as p; source = str(p._PROCGEN_IMPORT_ERROR is not None)" + FRAMES)
    assert usual[0] in ("system", "wheel", "wheel with stand-ins", "not needed")
    assert stand_ins[0] == "1"
    assert usual[1:] == stand_ins[1:] == late[1:]
    assert usual[2] == 255


@needs_wheel
def test_the_answer_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert qt.ensure_qt() == qt.ensure_qt()
    qt.ensure_qt.cache_clear()
    if not qt._envpool_has_own_qt():
        assert qt.ensure_qt() == "already loaded"
    monkeypatch.setattr(qt, "_envpool_has_own_qt", lambda: True)
    qt.ensure_qt.cache_clear()
    assert qt.ensure_qt() == "not needed"
    qt.ensure_qt.cache_clear()


def test_without_qt_one_error_names_all_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qt, "_envpool_has_own_qt", lambda: False)
    monkeypatch.setattr(qt, "_loads", lambda *_: False)
    monkeypatch.setattr(qt, "_wheel_folder", lambda: None)
    qt.ensure_qt.cache_clear()
    with pytest.raises(ImportError, match=r"pip install PyQt5-Qt5.*apt install libqt5gui5.*conda-forge qt-main"):
        qt.ensure_qt()


def test_the_order_is_loaded_system_wheel_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, int]] = []
    monkeypatch.setattr(qt, "_envpool_has_own_qt", lambda: False)
    monkeypatch.setattr(qt, "_wheel_folder", lambda: Path("/wheel"))
    monkeypatch.setattr(qt, "_loads", lambda name, mode=0: tried.append((name, mode)) is not None)
    monkeypatch.setattr(qt, "load_with_stand_ins", lambda folder: tried.append((f"stand-ins for {folder}", 0)))
    qt.ensure_qt.cache_clear()
    assert qt.ensure_qt() == "wheel with stand-ins"
    qt.ensure_qt.cache_clear()
    core = "libQt5Core.so.5"
    assert tried == [(core, os.RTLD_NOLOAD), (core, 0), (f"/wheel/{core}", 0), ("stand-ins for /wheel", 0)]


def test_an_empty_library_can_be_loaded_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "any file"
    content = qt.empty_library("libphasicrl-stand-in.so.7")
    path.write_bytes(content)
    assert len(content) < 500
    flags = [struct.unpack_from("<I", content, 64 + 56 * segment + 4)[0] for segment in range(3)]
    assert not any(flag & 1 for flag in flags), "nothing in it may be executable: hardened systems refuse that"
    with pytest.raises(OSError, match="stand-in"):
        ctypes.CDLL("libphasicrl-stand-in.so.7", mode=os.RTLD_NOLOAD)
    ctypes.CDLL(str(path))
    ctypes.CDLL("libphasicrl-stand-in.so.7", mode=os.RTLD_NOLOAD)


def test_a_library_that_cannot_be_loaded_is_told_with_the_loaders_words(tmp_path: Path) -> None:
    path = tmp_path / "libbroken.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"libbroken.so.*pip install PyQt5-Qt5"):
        qt._load_lazily(path)
