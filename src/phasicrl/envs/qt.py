"""Make Qt 5 loadable for EnvPool's Procgen, without root and without a system package. Kind: effects.

Up to 1.2.5 EnvPool's Linux wheels leave out libQt5Core.so.5 and libQt5Gui.so.5 on purpose (size). The loader is satisfied by any
library with these names that is already in the process, so loading the ones of the `PyQt5-Qt5` wheel first is enough.
From 1.2.7 on EnvPool carries a Qt of its own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path
from typing import Literal

QtSource = Literal["not needed", "already loaded", "system", "wheel", "wheel with stand-ins"]

QT_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")
"""In the order in which they must be loaded: Gui needs Core."""

STAND_IN_LIBRARIES = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
"""What the wheel's Qt is linked with, but drawing into a picture in memory never calls; bare containers do not have them."""

REMEDIES = "pip install PyQt5-Qt5   (or: apt install libqt5gui5, or: conda install -c conda-forge qt-main)"


@functools.cache
def ensure_qt() -> QtSource:
    """Make Qt 5 available to EnvPool's Procgen in this process, and say where it came from.

    Raises:
        ImportError: no Qt could be loaded; the message names the remedies.
    """
    if not sys.platform.startswith("linux") or _envpool_has_own_qt():
        return "not needed"
    if all(_loads(name, os.RTLD_NOLOAD) for name in QT_LIBRARIES):
        return "already loaded"
    if all(_loads(name) for name in QT_LIBRARIES):
        return "system"
    folder = _wheel_folder()
    if folder is None:
        raise ImportError(f"Procgen draws with Qt 5, and neither the system nor the package PyQt5-Qt5 provides it here; {REMEDIES}")
    if all(_loads(str(folder / name)) for name in QT_LIBRARIES):
        return "wheel"
    load_with_stand_ins(folder)
    return "wheel with stand-ins"


def load_with_stand_ins(folder: Path, *, force: bool = False) -> None:
    """Load the wheel's Qt from `folder` with empty stand-ins for those of `STAND_IN_LIBRARIES` that are absent (with `force`: for all).

    Raises:
        ImportError: that did not work either; the message holds the loader's words and the remedies.
    """
    absent = [name for name in STAND_IN_LIBRARIES if force or not _loads(name)]
    if "libglib-2.0.so.0" in absent:
        # Otherwise Qt's event dispatcher calls g_main_context_new, and the process ends with "symbol lookup error".
        os.environ["QT_NO_GLIB"] = "1"
    with tempfile.TemporaryDirectory(prefix="phasicrl-qt-") as scratch:
        for name in absent:
            path = Path(scratch) / name
            path.write_bytes(empty_library(name))
            _load_lazily(path)
        for name in QT_LIBRARIES:
            _load_lazily(folder / name)


def empty_library(soname: str) -> bytes:
    """The bytes of an x86-64 ELF shared library that has a name and nothing else."""
    strings = b"\0" + soname.encode() + b"\0"
    headers, dynamic_size, symbol_size = 64 + 3 * 56, 6 * 16, 24
    dynamic_at = headers + (-headers % 16)
    symbols_at = dynamic_at + dynamic_size
    strings_at = symbols_at + symbol_size
    size = strings_at + len(strings)
    # DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME (offset 1 in the strings), DT_NULL
    entries = ((5, strings_at), (6, symbols_at), (10, len(strings)), (11, symbol_size), (14, 1), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in entries)
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    header = identity + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    segments = (
        (1, 6, 0, size, 0x1000),  # PT_LOAD, read and write: older glibc relocates the dynamic section in place
        (2, 6, dynamic_at, dynamic_size, 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 16),  # PT_GNU_STACK without "execute": its absence would ask for an executable stack
    )
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, length, length, align) for kind, flags, at, length, align in segments
    )
    return (header + table).ljust(dynamic_at, b"\0") + dynamic + bytes(symbol_size) + strings


def _envpool_has_own_qt() -> bool:
    """True where EnvPool's wheel vendors Qt (1.2.7 and later: `envpool.libs/libQt6Core…`)."""
    spec = importlib.util.find_spec("envpool")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent.parent / "envpool.libs").glob("libQt*"))


def _wheel_folder() -> Path | None:
    """The folder with the libraries of the package PyQt5-Qt5, if it is installed."""
    spec = importlib.util.find_spec("PyQt5")  # a namespace package: the wheel has no __init__.py
    for location in spec.submodule_search_locations or () if spec is not None else ():
        folder = Path(location) / "Qt5" / "lib"
        if all((folder / name).exists() for name in QT_LIBRARIES):
            return folder
    return None


def _loads(name: str, mode: int = 0) -> bool:
    """Load a library into this process; False if the loader cannot."""
    try:
        ctypes.CDLL(name, mode=mode)
    except OSError:
        return False
    return True


def _load_lazily(path: Path) -> None:
    """Load a library whose functions are looked up when they are called. `ctypes.CDLL` always adds RTLD_NOW, which fails on stand-ins."""
    if platform.machine() != "x86_64":
        raise ImportError(f"Qt 5 could not be loaded on {platform.machine()}; {REMEDIES}")
    loader = ctypes.CDLL(None)
    loader.dlopen.restype, loader.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    loader.dlerror.restype = ctypes.c_char_p
    if not loader.dlopen(str(path).encode(), os.RTLD_LAZY):
        reason = (loader.dlerror() or b"unknown reason").decode(errors="replace")
        raise ImportError(f"Qt 5 could not be loaded ({reason}); {REMEDIES}")
