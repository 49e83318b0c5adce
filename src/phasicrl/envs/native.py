"""Loads libraries that EnvPool leaves to the system, without root. Kind: effects.

Up to 1.2.5 EnvPool's Linux wheels leave out libQt5Core.so.5 and libQt5Gui.so.5, which Procgen draws
with. The loader accepts any library with these names that is already in the process, so those of
the `PyQt5-Qt5` wheel are loaded first.

From 1.2.7 on EnvPool carries its own Qt, but `import envpool` loads families (MuJoCo's and others)
that are linked with libEGL.so.1 and libOpenGL.so.0, which machines without graphics do not have.
Only EnvPool's own rendering, which phasicrl does not use, calls them. Where they are absent,
stand-ins with these names are loaded, whose functions return zero: "no display".
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

QT_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")
"""In the order in which they must be loaded: Gui needs Core."""

QT_STAND_INS = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
"""Libraries that the wheel's Qt is linked with, but does not call to draw into an image."""

GRAPHICS_LIBRARIES: Mapping[str, Sequence[str]] = {"libOpenGL.so.0": (), "libEGL.so.1": (
    "eglBindAPI", "eglChooseConfig", "eglCreateContext", "eglCreatePbufferSurface", "eglGetError",
    "eglDestroyContext", "eglDestroySurface", "eglGetDisplay", "eglGetProcAddress", "eglInitialize",
    "eglMakeCurrent", "eglQueryString", "eglReleaseThread",
)}  # fmt: skip
"""Libraries that EnvPool 1.2.7 is linked with, and the functions that it looks up when loaded.

`nm -D --undefined-only` lists them.
"""

QT_REMEDIES = "pip install PyQt5-Qt5, apt install libqt5gui5, conda install -c conda-forge qt-main"
GRAPHICS_REMEDIES = "apt install libegl1 libopengl0, conda install -c conda-forge libegl libopengl"


@functools.cache
def ensure_qt() -> str:
    """Load Qt 5 for EnvPool's Procgen into this process, and return where it came from.

    Raises:
        ImportError: no Qt could be loaded; the message names the remedies.
    """
    if not sys.platform.startswith("linux") or envpool_has_own_qt():
        return "not needed"
    if all(_loads(name) for name in QT_LIBRARIES):
        return "system"
    folder = find_wheel_folder()
    if folder is None:
        raise ImportError(f"Procgen draws with Qt 5, which is not installed here; {QT_REMEDIES}")
    if all(_loads(str(folder / name)) for name in QT_LIBRARIES):
        return "wheel"
    load_with_stand_ins(folder)
    return "wheel with stand-ins"


def load_with_stand_ins(folder: Path, *, force: bool = False) -> None:
    """Load the wheel's Qt from `folder`, with stand-ins for absent libraries (`force`: for all).

    Raises:
        ImportError: it could not be loaded; the message names the remedies.
    """
    absent = [name for name in QT_STAND_INS if force or not _loads(name)]
    if "libglib-2.0.so.0" in absent:
        # Otherwise Qt's event dispatcher calls g_main_context_new, and the process ends with
        # "symbol lookup error".
        os.environ["QT_NO_GLIB"] = "1"
    _load_stand_ins(dict.fromkeys(absent, ()), QT_REMEDIES)
    for name in QT_LIBRARIES:
        load_lazily(folder / name, QT_REMEDIES)


@functools.cache
def ensure_graphics() -> str:
    """Load the libraries that EnvPool 1.2.7 is linked with, and return where they came from.

    Raises:
        ImportError: the stand-ins could not be loaded; the message names the remedies.
    """
    if not sys.platform.startswith("linux") or not envpool_has_own_qt():
        return "not needed"
    absent = {name: functions for name, functions in GRAPHICS_LIBRARIES.items() if not _loads(name)}
    _load_stand_ins(absent, GRAPHICS_REMEDIES)
    return "stand-ins" if absent else "system"


def build_stand_in(soname: str, functions: Sequence[str] = ()) -> bytes:
    """Return an x86-64 ELF shared library whose functions return zero.

    It has the least that glibc's loader accepts, at fixed places: a page of names and tables, and a
    page of code. Up to 20 functions fit.
    """
    dynamic_at, hash_at, symbols_at, strings_at, code_at = 0x180, 0x200, 0x300, 0x600, 0x1000
    names, code = [soname, *functions], b"\x31\xc0\xc3"  # xor eax, eax; ret
    strings = "\0".join(["", *names, ""]).encode()
    name_at = [strings.index(f"\0{name}\0".encode()) + 1 for name in names]
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
    rows = [struct.pack("<IBBHQQ", at, 0x12, 0, 1, code_at, len(code)) for at in name_at[1:]]
    # PT_LOAD to read and write (older glibc relocates the dynamic section in place), PT_LOAD to
    # read and execute, PT_DYNAMIC, and PT_GNU_STACK without "execute": its absence would ask for an
    # executable stack.
    parts = (1, 6, 0, code_at), (1, 5, code_at, 3), (2, 6, dynamic_at, 112), (0x6474E551, 6, 0, 0)
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, 0x1000)
        for kind, flags, at, size in parts
    )
    numbers = (3, 62, 1, 0, 64, 0, 0, 64, 56, len(parts), 64, 0, 0)
    header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", *numbers)
    library = header + headers
    tables = {dynamic_at: dynamic, hash_at: table, symbols_at: bytes(24) + b"".join(rows)}
    for at, part in (tables | {strings_at: strings, code_at: code}).items():
        library = library.ljust(at, b"\0") + part
    return library


def envpool_has_own_qt() -> bool:
    """Return whether EnvPool's wheel has Qt (since 1.2.7: `envpool.libs/libQt6Core…`)."""
    spec = importlib.util.find_spec("envpool")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent.parent / "envpool.libs").glob("libQt*"))


def find_wheel_folder() -> Path | None:
    """Return the folder with the libraries of the package PyQt5-Qt5, if it is installed."""
    spec = importlib.util.find_spec("PyQt5")  # a namespace package: the wheel has no __init__.py
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    folders = [Path(place) / "Qt5" / "lib" for place in places]
    return next((folder for folder in folders if (folder / QT_LIBRARIES[0]).exists()), None)


def _loads(name: str) -> bool:
    """Load a library into this process; False if the loader cannot."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _load_stand_ins(libraries: Mapping[str, Sequence[str]], remedies: str) -> None:
    """Load stand-ins with these names and functions for the rest of the process."""
    with tempfile.TemporaryDirectory(prefix="phasicrl-libraries-") as scratch:
        for name, functions in libraries.items():
            path = Path(scratch) / name
            path.write_bytes(build_stand_in(name, functions))
            load_lazily(path, remedies)


def load_lazily(path: Path, remedies: str) -> None:
    """Load a library whose functions are looked up when they are called.

    `ctypes.CDLL` always adds RTLD_NOW, which fails on stand-ins.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    if not dlopen(str(path).encode(), os.RTLD_LAZY):
        raise ImportError(f"{path.name} could not be loaded; {remedies}")
