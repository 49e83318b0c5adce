"""Make the libraries loadable that EnvPool leaves to the system. Kind: effects.

Neither root nor a package of the system is needed for it.

Up to 1.2.5 EnvPool's Linux wheels leave out libQt5Core.so.5 and libQt5Gui.so.5, which Procgen draws
with, on purpose (size). The loader is satisfied by any library with these names that is already in
the process, so loading the ones of the `PyQt5-Qt5` wheel first is enough.

From 1.2.7 on EnvPool carries a Qt of its own, but `import envpool` loads families (MuJoCo's and
others) that are linked with libEGL.so.1 and libOpenGL.so.0, which machines without graphics do not
have. Only EnvPool's own rendering calls them, and phasicrl never asks for that. So where they are
absent, stand-ins with these names are loaded, whose functions do nothing and return zero: "no
display".
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

QtSource = Literal["not needed", "already loaded", "system", "wheel", "wheel with stand-ins"]
GraphicsSource = Literal["not needed", "system", "stand-ins"]

QT_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")
"""In the order in which they must be loaded: Gui needs Core."""

QT_STAND_INS = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
"""What the wheel's Qt is linked with; bare containers do not have them.

Drawing into an image in memory never calls them.
"""

GRAPHICS_LIBRARIES: Mapping[str, Sequence[str]] = {
    "libEGL.so.1": (
        "eglBindAPI", "eglChooseConfig", "eglCreateContext", "eglCreatePbufferSurface",
        "eglDestroyContext", "eglDestroySurface", "eglGetDisplay", "eglGetError",
        "eglGetProcAddress", "eglInitialize", "eglMakeCurrent", "eglQueryString",
        "eglReleaseThread",
    ),
    "libOpenGL.so.0": (),
}  # fmt: skip
"""What EnvPool 1.2.7 is linked with, and the functions that it looks up when it is loaded.

`nm -D --undefined-only` lists them.
"""

QT_REMEDIES = (
    "pip install PyQt5-Qt5   (or: apt install libqt5gui5, or: conda install -c conda-forge qt-main)"
)
GRAPHICS_REMEDIES = (
    "apt install libegl1 libopengl0   (or: conda install -c conda-forge libegl libopengl)"
)


@functools.cache
def ensure_qt() -> QtSource:
    """Make Qt 5 available to EnvPool's Procgen in this process, and say where it came from.

    Raises:
        ImportError: no Qt could be loaded; the message names the remedies.
    """
    if not sys.platform.startswith("linux") or envpool_has_own_qt():
        return "not needed"
    if all(_loads(name, os.RTLD_NOLOAD) for name in QT_LIBRARIES):
        return "already loaded"
    if all(_loads(name) for name in QT_LIBRARIES):
        return "system"
    folder = _wheel_folder()
    if folder is None:
        raise ImportError(f"Procgen draws with Qt 5, which is not installed here; {QT_REMEDIES}")
    if all(_loads(str(folder / name)) for name in QT_LIBRARIES):
        return "wheel"
    load_with_stand_ins(folder)
    return "wheel with stand-ins"


def load_with_stand_ins(folder: Path, *, force: bool = False) -> None:
    """Load the wheel's Qt from `folder`, with empty stand-ins for what is absent.

    That is looked up for each of `QT_STAND_INS`; `force` takes stand-ins for all of them.

    Raises:
        ImportError: that did not work either; the message holds the loader's words and the
            remedies.
    """
    absent = [name for name in QT_STAND_INS if force or not _loads(name)]
    if "libglib-2.0.so.0" in absent:
        # Otherwise Qt's event dispatcher calls g_main_context_new, and the process ends with
        # "symbol lookup error".
        os.environ["QT_NO_GLIB"] = "1"
    _load_stand_ins(dict.fromkeys(absent, ()), QT_REMEDIES)
    for name in QT_LIBRARIES:
        _load_lazily(folder / name, QT_REMEDIES)


@functools.cache
def ensure_graphics() -> GraphicsSource:
    """Make what EnvPool 1.2.7 and later is linked with available, and say where it came from.

    Raises:
        ImportError: the stand-ins could not be loaded; the message names the remedies.
    """
    if not sys.platform.startswith("linux") or not envpool_has_own_qt():
        return "not needed"
    absent = {name: functions for name, functions in GRAPHICS_LIBRARIES.items() if not _loads(name)}
    _load_stand_ins(absent, GRAPHICS_REMEDIES)
    return "stand-ins" if absent else "system"


def stand_in_library(soname: str, functions: Sequence[str] = ()) -> bytes:
    """The bytes of an x86-64 ELF shared library whose functions do nothing and return zero.

    The layout is the least that glibc's loader accepts: one part with names and tables, and one
    with code.
    """
    names = [soname, *functions]
    strings = "\0".join(["", *names, ""]).encode()
    name_at = [1 + sum(len(name) + 1 for name in names[:index]) for index in range(len(names))]
    num_segments, page = 4, 0x1000
    dynamic_at = 64 + 56 * num_segments + (-56 * num_segments) % 16
    hash_at = dynamic_at + 7 * 16
    symbols_at = hash_at + 4 * (2 + 1 + 1 + len(functions)) + (4 * len(functions)) % 8
    strings_at = symbols_at + 24 * (1 + len(functions))
    size = strings_at + len(strings)
    code_at, code = -(-size // page) * page, b"\x31\xc0\xc3"  # xor eax, eax; ret
    # DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME, DT_NULL
    entries = (4, hash_at, 5, strings_at, 6, symbols_at, 10, len(strings), 11, 24, 14, name_at[0])
    dynamic = struct.pack("<14Q", *entries, 0, 0)
    # One bucket with all symbols in a chain, so that names are compared and never hashed: 1 → 2 → …
    # → 0, the end.
    count = len(functions)
    chain = [0, *range(2, count + 1), *[0] * bool(count)]
    table = struct.pack(f"<{4 + count}I", 1, 1 + count, min(count, 1), *chain)
    # Each a global function of the first section (any number but 0, which is "undefined") at the
    # one piece of code.
    symbols = bytes(24)
    for at in name_at[1:]:
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0, 1, code_at, len(code))
    # PT_LOAD to read and write (older glibc relocates the dynamic section in place), PT_DYNAMIC,
    # and PT_GNU_STACK without "execute": its absence would ask for an executable stack.
    segments = [
        (1, 6, 0, size, page),
        (1, 5, code_at, len(code), page),  # PT_LOAD to read and execute, never written
        (2, 6, dynamic_at, len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 16),
    ]
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, length, length, align)
        for kind, flags, at, length, align in segments
    )
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    numbers = (3, 62, 1, 0, 64, 0, 0, 64, 56, num_segments, 64, 0, 0)
    header = identity + struct.pack("<HHIQQQIHHHHHH", *numbers)
    parts = [(0, header + headers), (dynamic_at, dynamic), (hash_at, table)]
    library = b""
    for at, part in (*parts, (symbols_at, symbols), (strings_at, strings), (code_at, code)):
        library = library.ljust(at, b"\0") + part
    return library


def envpool_has_own_qt() -> bool:
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


def _load_stand_ins(libraries: Mapping[str, Sequence[str]], remedies: str) -> None:
    """Make stand-ins with these names and functions, and load them for the rest of the process."""
    with tempfile.TemporaryDirectory(prefix="phasicrl-libraries-") as scratch:
        for name, functions in libraries.items():
            path = Path(scratch) / name
            path.write_bytes(stand_in_library(name, functions))
            _load_lazily(path, remedies)


def _load_lazily(path: Path, remedies: str) -> None:
    """Load a library whose functions are looked up when they are called.

    `ctypes.CDLL` always adds RTLD_NOW, which fails on stand-ins.
    """
    if platform.machine() != "x86_64":
        raise ImportError(f"{path.name} could not be loaded on {platform.machine()}; {remedies}")
    loader = ctypes.CDLL(None)
    loader.dlopen.restype, loader.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    loader.dlerror.restype = ctypes.c_char_p
    if not loader.dlopen(str(path).encode(), os.RTLD_LAZY):
        reason = (loader.dlerror() or b"unknown reason").decode(errors="replace")
        raise ImportError(f"{path.name} could not be loaded ({reason}); {remedies}")
