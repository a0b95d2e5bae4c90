"""Chooses where Python takes memory for its objects: from its own allocator, or from the C library.

Python's own allocator is faster, but gives memory back in arenas of 1 MiB only, and one object that lives on keeps a
whole arena. The C library gives every free page back.

The choice counts for new objects only. Python's allocator goes on to free and resize all of them. It has always had to
tell its own blocks from those of the C library, because it takes blocks of more than 512 bytes there, and smaller ones
when it gets no arena.
"""

import ctypes
import os
import sys
from typing import Final

_RAW, _MEM, _OBJ = range(3)
"""The domains of CPython's allocators (PyMemAllocatorDomain)."""
_NEWEST: Final = (3, 13)
"""The newest Python with which this was tried."""


class _Functions(ctypes.Structure):
    """The functions of one domain (PyMemAllocatorEx)."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")]


class PythonAllocator:
    """The allocator of this process, which stays as it is if the operator or a debugger has chosen another one."""

    def __init__(self) -> None:
        is_chosen, is_tried = bool(os.environ.get("PYTHONMALLOC")), sys.version_info[:2] <= _NEWEST
        can_choose = not is_chosen and is_tried and is_usual(ctypes.pythonapi, ctypes.CDLL(None))
        self._domains = (_MEM, _OBJ) if can_choose else ()
        self._own = [_in_force(domain) for domain in self._domains]
        raw = _in_force(_RAW)
        self._c_library = [_Functions(own.context, raw.malloc, raw.calloc, own.realloc, own.free) for own in self._own]

    def use_c_library(self, *, wanted: bool) -> None:
        """Take memory for new objects from the C library, or else from Python's own allocator."""
        before, after = (self._own, self._c_library) if wanted else (self._c_library, self._own)
        # If it is neither of the two, memory is being traced, and must be until the trace ends.
        if [bytes(_in_force(domain)) for domain in self._domains] == [bytes(functions) for functions in before]:
            for domain, functions in zip(self._domains, after, strict=True):
                ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(functions))


def is_usual(python: object, c_library: object) -> bool:
    """Whether Python has its own allocator, which nothing watches, and the C library gives pages back."""
    name = getattr(python, "_PyMem_GetCurrentAllocatorName", None)
    if name is None or not hasattr(c_library, "malloc_trim"):
        return False
    name.restype = ctypes.c_char_p
    return bool(name() == b"pymalloc")


def _in_force(domain: int) -> _Functions:
    found = _Functions()
    ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(found))
    return found
