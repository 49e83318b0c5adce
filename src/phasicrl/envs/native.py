"""Loading of system libraries that EnvPool needs, without root. Kind: effects.

Up to 1.2.5, EnvPool's Linux wheels lack libQt5Core.so.5 and libQt5Gui.so.5, with which Procgen
draws. The loader uses libraries of these names that are already in the process, so that those of
the `PyQt5-Qt5` wheel are loaded first.

Since 1.2.7, EnvPool contains Qt, but `import envpool` loads families (MuJoCo and others) that are
linked with libEGL.so.1 and libOpenGL.so.0, which machines without graphics lack. Only EnvPool's
rendering calls them, which phasicrl does not use. Where they are absent, stand-ins with these names
are loaded, whose functions return zero: "no display".
"""

import ctypes
import functools
import importlib.util
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

QT_LIBRARIES = ("libQt5Core.so.5", "libQt5Gui.so.5")
"""Libraries of Qt in loading order."""

QT_STAND_INS = ("libGL.so.1", "libglib-2.0.so.0", "libgthread-2.0.so.0")
"""Libraries that the wheel's Qt is linked with, but does not call when drawing images."""

GRAPHICS_FUNCTIONS: Mapping[str, Sequence[str]] = {"libOpenGL.so.0": (), "libEGL.so.1": (
    "eglBindAPI", "eglChooseConfig", "eglCreateContext", "eglCreatePbufferSurface", "eglGetError",
    "eglDestroyContext", "eglDestroySurface", "eglGetDisplay", "eglGetProcAddress", "eglInitialize",
    "eglMakeCurrent", "eglQueryString", "eglReleaseThread",
)}  # fmt: skip
"""Libraries that EnvPool 1.2.7 is linked with, and their functions that are resolved on loading.

`nm -D --undefined-only` lists the functions.
"""

QT_REMEDY = "pip install PyQt5-Qt5, apt install libqt5gui5, conda install -c conda-forge qt-main"
GRAPHICS_REMEDY = "apt install libegl1 libopengl0, conda install -c conda-forge libegl libopengl"


@functools.cache
def load_qt() -> str:
    """Load Qt 5 for EnvPool's Procgen; return `system`, `wheel` or `not needed`.

    Raises:
        ImportError: Qt cannot be loaded; the message has remedies.
    """
    if envpool_bundles_qt():
        return "not needed"
    if all(_try_load(name) for name in QT_LIBRARIES):
        return "system"
    if (folder := find_qt_folder()) is None:
        raise ImportError(f"Procgen draws with Qt 5, which is not installed here; {QT_REMEDY}")
    load_qt_from_wheel(folder)
    return "wheel"


def load_qt_from_wheel(folder: Path, *, force_stand_ins: bool = False) -> None:
    """Load the wheel's Qt from a folder, with stand-ins for absent libraries.

    Args:
        folder: folder of the libraries.
        force_stand_ins: whether to use stand-ins for all libraries, absent or not.

    Raises:
        ImportError: Qt cannot be loaded; the message has remedies.
    """
    absent = [name for name in QT_STAND_INS if force_stand_ins or not _try_load(name)]
    if "libglib-2.0.so.0" in absent:
        # Otherwise Qt's event dispatcher would call g_main_context_new, and the process would end
        # with "symbol lookup error".
        os.environ["QT_NO_GLIB"] = "1"
    _load_stand_ins(dict.fromkeys(absent, ()), QT_REMEDY)
    for name in QT_LIBRARIES:
        load_library_lazily(folder / name, QT_REMEDY)


@functools.cache
def load_envpool_libraries() -> str:
    """Load the graphics libraries that EnvPool 1.2.7 is linked with, and return their source.

    Raises:
        ImportError: the stand-ins cannot be loaded; the message has remedies.
    """
    if not envpool_bundles_qt():
        return "not needed"
    absent = {name: calls for name, calls in GRAPHICS_FUNCTIONS.items() if not _try_load(name)}
    _load_stand_ins(absent, GRAPHICS_REMEDY)
    return "stand-ins" if absent else "system"


def build_stand_in_elf(soname: str, functions: Sequence[str] = ()) -> bytes:
    """Build an x86-64 ELF shared library with up to 20 functions that return zero.

    It has the minimum that glibc's loader accepts, at fixed offsets: a page of names and tables,
    and a page of code.
    """
    dynamic_at, hash_at, symbols_at, strings_at, code_at = 0x180, 0x200, 0x300, 0x600, 0x1000
    names, code = [soname, *functions], b"\x31\xc0\xc3"  # xor eax, eax; ret
    strings = "\0".join(["", *names, ""]).encode()
    name_at = [strings.index(f"\0{name}\0".encode()) + 1 for name in names]
    # DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME, DT_NULL
    entries = (4, hash_at, 5, strings_at, 6, symbols_at, 10, len(strings), 11, 24, 14, name_at[0])
    dynamic = struct.pack("<14Q", *entries, 0, 0)
    # One bucket with all symbols in a chain 1 → 2 → … → 0, so that names need no hashes.
    count = len(functions)
    chain = [0, *range(2, count + 1), *[0] * bool(count)]
    table = struct.pack(f"<{4 + count}I", 1, 1 + count, min(count, 1), *chain)
    # Each symbol is a global function of section 1 (0 is "undefined") at the same code.
    rows = [struct.pack("<IBBHQQ", at, 0x12, 0, 1, code_at, len(code)) for at in name_at[1:]]
    # PT_LOAD to read and write (older glibc relocates the dynamic section in place), PT_LOAD to
    # read and execute, PT_DYNAMIC, and PT_GNU_STACK for a stack that is not executable.
    parts = (1, 6, 0, code_at), (1, 5, code_at, 3), (2, 6, dynamic_at, 112), (0x6474E551, 6, 0, 0)
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, 0x1000)
        for kind, flags, at, size in parts
    )
    numbers = (3, 62, 1, 0, 64, 0, 0, 64, 56, len(parts), 64, 0, 0)
    library = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", *numbers) + headers
    tables = {dynamic_at: dynamic, hash_at: table, symbols_at: bytes(24) + b"".join(rows)}
    for at, part in (tables | {strings_at: strings, code_at: code}).items():
        library = library.ljust(at, b"\0") + part
    return library


def envpool_bundles_qt() -> bool:
    """Return whether EnvPool's wheel has Qt (since 1.2.7: `envpool.libs/libQt6Core…`).

    Such a wheel needs graphics libraries instead of Qt 5.
    """
    spec = importlib.util.find_spec("envpool")
    if spec is None or spec.origin is None:
        return False
    return any((Path(spec.origin).parent.parent / "envpool.libs").glob("libQt*"))


def find_qt_folder() -> Path | None:
    """Find the folder of the libraries of the package PyQt5-Qt5; None if not installed."""
    spec = importlib.util.find_spec("PyQt5")  # a namespace package: the wheel has no __init__.py
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    folders = [Path(place) / "Qt5" / "lib" for place in places]
    return next((folder for folder in folders if (folder / QT_LIBRARIES[0]).exists()), None)


def _try_load(name: str) -> bool:
    """Load a library into this process; return False if that fails."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _load_stand_ins(functions_by_library: Mapping[str, Sequence[str]], remedy: str) -> None:
    """Load stand-ins with these names and functions into this process."""
    with tempfile.TemporaryDirectory(prefix="phasicrl-libraries-") as scratch:
        for name, functions in functions_by_library.items():
            path = Path(scratch) / name
            path.write_bytes(build_stand_in_elf(name, functions))
            load_library_lazily(path, remedy)


def load_library_lazily(path: Path, remedy: str) -> None:
    """Load a library into this process; its functions are resolved when they are called.

    `ctypes.CDLL` always adds RTLD_NOW, which fails with stand-ins.

    Raises:
        ImportError: the library cannot be loaded; the message has remedies.
    """
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    if not dlopen(str(path).encode(), os.RTLD_LAZY):
        raise ImportError(f"{path.name} cannot be loaded; {remedy}")
